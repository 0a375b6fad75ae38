"""Plan request: what is to be planned."""

from dataclasses import dataclass

from gristmill_planner.cost.hardware import Cluster
from gristmill_planner.cost.planned_run import ADAMW, GRISTMILL, OptimizerStates, Software
from training.config import Precision
from training.model.model_config import ModelConfig


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned: a resolved model, `batch` sequences of `seq_len` tokens a step, and a cluster."""

    model: ModelConfig
    batch: int
    seq_len: int
    cluster: Cluster
    precision: Precision = "bf16"
    software: Software = GRISTMILL
    states: OptimizerStates = ADAMW
    compiled: bool = False
    """Blocks are compiled, so that no schedule may compute gradients of inputs and weights apart."""
