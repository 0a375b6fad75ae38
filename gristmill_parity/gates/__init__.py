"""Gates for runs of any size: two recorded runs of one training are compared, step by step and tensor by tensor.

check.py          the command `gristmill check`
recorded_run.py   what a run has recorded in its folder, and under which layout each of its steps was
difference.py     the first step, and the first tensor, in which two of them differ
"""
