"""The optional features of a run, as the options ask for them: each is a plug-in of the training loop."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from training.checkpoint.checkpoint import CheckpointManager
from training.data.sequences import TokenSequences
from training.experimental.compression.bucket import buckets_of
from training.experimental.compression.error_feedback import ErrorFeedback
from training.experimental.local_steps.rendezvous_replicas import RendezvousReplicas, common_to_all
from training.experimental.local_steps.replicas import LocalReplicas
from training.experimental.parallel_config import ParallelConfig
from training.optim.optim_config import OptimConfig
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
    config = plan.config
    layout = plan.layout
    plugins = Plugins()
    add = plugins.plugins.append
    if config.profile.is_on:
        add(Profiler(config.profile, model, names, config.out_dir))
    if config.data.verify == "checksum":
        add(ShardVerifier([*plan.train.parts, *plan.named_holdouts.values()], checkpoints, say))
    if len(plan.train.parts) > 1:
        add(SourceLosses(model, [str(part.folder) for part in plan.train.parts]))
    plugins.plugins += plugins_of_layout(layout, model, optimizer, config.optim, say)
    if config.eval.ema:
        assert isinstance(optimizer, AveragingOptimizer)
        add(EvaluatedAverage(model, optimizer))
    if config.replicas.folder is not None:
        common = common_to_all(plan.identity, layout.record())
        add(RendezvousReplicas(config.replicas, config.optim, model, optimizer, common))
    return plugins


def plugins_of_layout(
    layout: ParallelConfig,
    model: ParallelModel,
    optimizer: Optimizer,
    config: OptimConfig,
    say: Callable[[str], None],
) -> list[Plugin]:
    """Build the features without which the updates of a model in this layout would be wrong; every rank calls it."""
    plugins = list[Plugin]()
    if model.routing is not None:
        plugins.append(ExpertLoad(model.routing, say))
    if buckets_of(model.reducers):
        plugins.append(ErrorFeedback(model))
    if layout.local_steps:
        plugins.append(LocalReplicas(layout.local_steps, config, model, optimizer))
    return plugins


_WAIT_SECONDS = 1.0  # of one rank for its shards, between two messages to the others: below every timeout


class ShardVerifier(Plugin):
    """Compares token shards with their manifests in a thread while the model trains, every n-th one on each of n ranks.

    The first checkpoint waits for it: none depends on damaged shards.
    """

    def __init__(
        self, data: Sequence[TokenSequences], checkpoints: CheckpointManager, say: Callable[[str], None]
    ) -> None:
        self.checkpoints = checkpoints
        self.say = say
        world = checkpoints.world
        self._thread = ThreadPoolExecutor(1, "shard verifier")
        self._finished = False
        shards = [(sequences, record) for sequences in data for record in sequences.manifest.shards]
        self._reads: deque[Future[None]] = deque(
            self._thread.submit(sequences.verify, record) for sequences, record in shards[world.rank :: world.size]
        )

    def done(self, seconds: float = 0.0) -> bool:
        """Wait for the shard being read, at most so long. True once all are verified.

        Raises InputError that names a damaged shard.
        """
        wait([*self._reads][:1], seconds)
        while self._reads and self._reads[0].done():
            self._reads.popleft().result()
        return not self._reads

    @contextmanager
    def step(self, step: int) -> Iterator[None]:  # noqa: ARG002
        """Raises InputError where a damaged shard was found."""
        self.done()
        yield

    def before_save(self) -> None:
        if self._finished:
            return
        gather = self.checkpoints.group.gather
        if not all(gather(self.done)):
            self.say("the first checkpoint waits for the token shards' checksums (--data.verify)")
        while not self._finished:
            self._finished = all(gather(lambda: self.done(_WAIT_SECONDS)))

    def close(self) -> None:
        """Stop the thread after the shard that it reads."""
        self._thread.shutdown(cancel_futures=True)


class EvaluatedAverage(Plugin):
    """Evaluates the average of the weights in their place."""

    def __init__(self, model: ParallelModel, optimizer: AveragingOptimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        self.model.finish_all_gather()
        with self.optimizer.averaged_weights():
            self.model.all_gather_params()
            yield
        self.model.all_gather_params()
