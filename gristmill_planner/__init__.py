"""Predictions: which layout of a model is fastest on a cluster, how fast, and whether it fits, before there is one.

Read in this order:

    plan.py                the command `gristmill plan`: a configuration in, a table, words, JSON and pictures out
    plan_config.py         the request, from training's own configuration file or from a published run
    candidates.py          every layout that the trainer accepts, in families whose layers take equally long
    search.py              the fastest that fit, from the least bound of time; what to change where none does
    step_time.py           seconds of a step: compute_time.py and communication_time.py, on hardware.py
    memory.py              bytes on each rank, by paper-level formulas; run_memory.py: on the fullest rank of a run
    dry_run.py             exact bytes and traffic of one rank, by the trainer's own code without memory or other ranks
    pipeline_simulator.py  when each pass of a step runs; timeline.py draws it, next to a measured step
    published_runs.py      what papers print, to compare with; fitted_constants.py: what was fitted to measured steps

It imports the trainer, never the other way. docs/reference/planner-accuracy.md says how far to trust it.
"""
