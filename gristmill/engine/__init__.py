"""The engine: runs the tasks of a stage in worker processes, skips tasks already done, and keeps a ledger.

docs/concepts/guarantees.md is its contract. `staleness` says which tasks must run, `execution` runs them, and neither
knows the other; run.py joins the two.
"""
