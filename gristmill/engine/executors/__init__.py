"""Executors: run the tasks of a step in this process, in worker processes, beside other machines, or on Ray."""
