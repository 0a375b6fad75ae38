"""Names in a run's folder that are read without torch, too."""

CHECKPOINTS = "checkpoints"
LATEST = "latest"  # in CHECKPOINTS: names the checkpoint to resume from
RUN = "run.json"
INTERVENTIONS = "interventions"  # in run.json: changes of the learning rate and of the data, by the step before them
OWN_CODE = "own_code"  # in a start: SHA-256 of each file of the user's whose code ran, by its name
STARTS = "starts"  # in run.json: of each start when, where and with what, see `describe_start`
