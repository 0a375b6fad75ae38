"""The engine: tasks, what is done already, where tasks run, and the ledger of a stage."""
