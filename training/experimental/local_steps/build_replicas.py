"""Builds the replicas that the options ask for."""

from typing import Any

from training.experimental.local_steps.meeting_config import MeetingConfig
from training.experimental.local_steps.meeting_replicas import MeetingReplicas, common_to_all
from training.experimental.local_steps.replicas import LocalReplicas, Replicas
from training.optim.optim_config import OptimConfig
from training.optim.optimizer import Optimizer
from training.parallel.layout import ParallelConfig
from training.parallel.parallel_model import ParallelModel


def build_replicas(
    layout: ParallelConfig,
    meeting: MeetingConfig,
    options: OptimConfig,
    model: ParallelModel,
    optimizer: Optimizer,
    identity: dict[str, Any],
) -> Replicas:
    """Build the replicas of a run of this `identity` and resolved `layout`; every rank calls it."""
    if meeting.folder is not None:
        return MeetingReplicas(meeting, options, model, optimizer, common_to_all(identity, layout.record()))
    return LocalReplicas(layout, options, model, optimizer) if layout.local_steps else Replicas(model, optimizer)
