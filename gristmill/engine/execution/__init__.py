"""Execution: runs the tasks of a step in this process, in workers, shared with other machines, or on Ray."""
