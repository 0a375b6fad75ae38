"""Runs of the trainer itself: from token shards, with evaluations and checkpoints, stopped and resumed.

run_case.py    a run: what it trains, where it stops, and the layout that it resumes under
shards.py      its token shards
stint.py       what each rank of it does, from a start of its processes to their end
outcome.py     what is on disk at its end
reference.py   what it is compared with, which reads the same shards by itself
"""
