"""The engine: runs the tasks of a stage in worker processes, skips those already done, and keeps a ledger.

docs/concepts/guarantees.md is its contract; run.py tells a stage's run from beginning to end.
"""
