"""Builds the optimizer that the options name, with its states in the storage that they name."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch

from training.memory.memory_config import MemoryConfig
from training.optim.flat_buckets import BUCKET_NUMEL, ParamsInPlace, ParamsStagedOnCPU, plan_buckets
from training.optim.moments import MomentsInMemory, MomentsOnDisk
from training.optim.muon import Muon
from training.optim.optim_config import OptimConfig, part_of
from training.optim.optimizer import SGD, AdamW, AfterUpdate, Optimizer, OptimizerByPart, unique_params
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
    adamw = partial(_build_adamw, config, memory or MemoryConfig(), rank, bucket_numel, after_update)
    optimizer: Optimizer
    if config.name == "sgd":
        optimizer = SGD(params, after_update)
    elif config.name == "adamw":
        optimizer = adamw(params)
    else:
        parts = defaultdict[int, list[ShardedParameter]](list)  # by dimensions: of matrices, and of experts' matrices
        for param in params:
            shape = param.spec.global_shape
            parts[len(shape) if part_of(param.name, shape) == "hidden" else 0].append(param)
        others = adamw(parts.pop(0, []))
        optimizer = OptimizerByPart([*(Muon(part, config, holders(part)) for part in parts.values()), others])
    return AveragingOptimizer(optimizer, config.ema_decay) if config.ema_decay else optimizer


def _build_adamw(
    config: OptimConfig,
    memory: MemoryConfig,
    rank: int,
    bucket_numel: int,
    after_update: AfterUpdate | None,
    params: Sequence[ShardedParameter],
) -> AdamW:
    unique = unique_params(params)
    kinds = {(param.local.dtype, param.local.device) for param in unique} or {(torch.float32, torch.device("cpu"))}
    assert len(kinds) == 1, f"the parameters differ in dtype or device: {kinds}"
    dtype, device = kinds.pop()
    staged = memory.optimizer != "device" and device.type != "cpu"
    in_buckets = staged or memory.optimizer == "disk" or after_update is not None
    total, buckets = plan_buckets([param.local.numel() for param in unique], bucket_numel if in_buckets else None)
    values = ParamsStagedOnCPU(unique, buckets, dtype) if staged else ParamsInPlace(unique, buckets)
    moments: MomentsInMemory | MomentsOnDisk
    if memory.optimizer == "disk":
        assert memory.folder is not None, "memory.folder must be set"
        moments = MomentsOnDisk(memory.folder / f"rank-{rank:05d}", total, buckets, dtype)
    else:
        moments = MomentsInMemory(total, buckets, dtype, torch.device("cpu") if staged else device)
    return AdamW(params, config, buckets, moments, values, after_update)
