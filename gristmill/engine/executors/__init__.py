"""Executors: run the tasks of a step in this process, in worker processes, shared with other machines, or on Ray."""
