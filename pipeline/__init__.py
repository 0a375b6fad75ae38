"""What the stages share: tasks, documents, token shards, the ledger. Imports no stage and never torch."""
