"""Parallelism, applied to a plain decoder from outside. Read parallelize.py first.

Each kind has a folder (data, tensor, pipeline, context, expert): options.py has its options and their checks,
placements.py which parameters its ranks have, traffic.py what they send, and the other files its modules. layout.py,
placement_table.py and traffic.py put these together. A new pipeline schedule is an entry of the table in
pipeline/schedules.py; what is tried out in place of a kind is an Experiment (experiment.py) in training/experimental.
"""
