"""How far runs are: of data, stage by stage, and of training."""
