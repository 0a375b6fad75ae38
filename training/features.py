"""The optional features of a run, as the options ask for them: each is a plug-in of the training loop."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from training.checkpoint.checkpoint import CheckpointManager
from training.data.sequences import TokenSequences
from training.data.shard_verifier import ShardVerifier
from training.experimental.compression.bucket import buckets_of
from training.experimental.compression.error_feedback import ErrorFeedback
from training.experimental.local_steps.rendezvous_replicas import RendezvousReplicas, common_to_all
from training.experimental.local_steps.replicas import LocalReplicas
from training.optim.optimizer import Optimizer
from training.optim.weight_average import AveragingOptimizer
from training.parallel.parallel_model import ParallelModel
from training.plugin import Plugin, Plugins
from training.profiling.profiler import Profiler
from training.reporting.expert_load import ExpertLoad
from training.reporting.source_losses import SourceLosses
from training.run_plan import RunPlan


def build_plugins(
    plan: RunPlan,
    model: ParallelModel,
    optimizer: Optimizer,
    checkpoints: CheckpointManager,
    names: Sequence[str],
    say: Callable[[str], None],
) -> Plugins:
    """Build the features that the options ask for; every rank calls it. `names` of all parameters."""
    config, layout, plugins = plan.config, plan.layout, Plugins()
    add = plugins.plugins.append
    if config.profile.is_on:
        add(Profiler(config.profile, model, names, config.out_dir))
    if config.data.verify == "checksum":
        add(VerifiedShards([*plan.train.parts, *plan.named_holdouts.values()], checkpoints, say))
    if model.routing is not None:
        add(ExpertLoad(model.routing, say))
    if len(plan.train.parts) > 1:
        add(SourceLosses(model, [str(part.folder) for part in plan.train.parts]))
    if buckets_of(model.reducers):
        add(ErrorFeedback(model))
    if config.eval.ema:
        assert isinstance(optimizer, AveragingOptimizer)
        add(EvaluatedAverage(model, optimizer))
    if config.replicas.folder is not None:
        common = common_to_all(plan.identity, layout.record())
        add(RendezvousReplicas(config.replicas, config.optim, model, optimizer, common))
    elif layout.local_steps:
        add(LocalReplicas(layout.local_steps, config.optim, model, optimizer))
    return plugins


class VerifiedShards(Plugin):
    """Verifies token shards while the model trains; the first checkpoint waits: none depends on damaged ones."""

    def __init__(
        self, data: Sequence[TokenSequences], checkpoints: CheckpointManager, say: Callable[[str], None]
    ) -> None:
        self.checkpoints, self.say = checkpoints, say
        self.verifier = ShardVerifier(data, checkpoints.world.rank, checkpoints.world.size)

    def before_step(self, step: int) -> None:  # noqa: ARG002
        """Raise InputError where a damaged shard was found."""
        self.verifier.done()

    def before_save(self) -> None:
        self.verifier.finish(self.checkpoints.group.gather, self.say)

    def close(self) -> None:
        self.verifier.close()


class EvaluatedAverage(Plugin):
    """Evaluates the average of the weights in their place."""

    def __init__(self, model: ParallelModel, optimizer: AveragingOptimizer) -> None:
        self.model, self.optimizer = model, optimizer

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        self.model.finish_all_gather()
        with self.optimizer.averaged_weights():
            self.model.all_gather_params()
            yield
        self.model.all_gather_params()
