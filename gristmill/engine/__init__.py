"""The engine: runs the tasks of a stage in worker processes, skips those already done, and keeps a ledger."""
