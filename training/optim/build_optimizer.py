"""Builds the optimizer that the options name, with its states in the storage that they name."""

from collections.abc import Callable, Sequence

from training.memory.memory_config import MemoryConfig
from training.optim.flat_buckets import BUCKET_NUMEL
from training.optim.optim_config import OptimConfig
from training.optim.optimizer import AfterUpdate, Optimizer, OptimizerContext
from training.optim.optimizer_kinds import find_optimizer
from training.optim.weight_average import AveragingOptimizer
from training.sharding.axis import JointAxis
from training.sharding.sharded_parameter import ShardedParameter


def build_optimizer(
    params: Sequence[ShardedParameter],
    config: OptimConfig,
    memory: MemoryConfig | None = None,
    rank: int = 0,
    bucket_numel: int = BUCKET_NUMEL,
    after_update: AfterUpdate | None = None,
    holders: Callable[[Sequence[ShardedParameter]], JointAxis] = lambda _: JointAxis(),
) -> Optimizer:
    """Build the optimizer `config.name`, with its states in the storage of `memory.optimizer`, and a weight average.

    On disk, files are in memory.folder/rank-00000 and so on, with a few buckets of `bucket_numel` elements in memory
    at a time. `after_update` is called for each updated part of a parameter, in order. `holders` gives the ranks that
    hold pieces of these matrices of this one, which Muon gathers. Raises OutputError if the disk is full.
    """
    context = OptimizerContext(config, memory or MemoryConfig(), rank, bucket_numel, after_update, holders)
    optimizer: Optimizer = find_optimizer(config.name).load_builder()(params, context)
    return AveragingOptimizer(optimizer, config.ema_decay) if config.ema_decay else optimizer
