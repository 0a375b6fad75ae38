"""Names in a run's folder that are read without torch, too."""

CHECKPOINTS = "checkpoints"
STARTS = "starts"  # in run.json: of each start when, where and with what, see `describe_start`
