"""Error feedback of gradient compression: remembers what each replica left out, also in checkpoints.

`compression.error.NAME`  (replicas, …): the memory of each replica, in the shape of the parameter
`compression.q.NAME`      (parts, m, r): the Q of each of the tensor-parallel pieces of the parameter

On another number of replicas, replica i of n takes over the memories of i, i + n, i + 2 n, … added up, and a further
one begins with none: their sum, which is what the updates still lack, stays. On other tensor-parallel ranks Q begins
anew.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from training.checkpoint.record import CheckpointRecord
from training.checkpoint.shard_plans import State
from training.checkpoint.shard_storage import read_shards, stored_tensors
from training.experimental.compression.bucket import buckets_of
from training.parallel.parallel_model import ParallelModel
from training.plugin import Plugin
from training.sharding.shard_spec import ShardSpec
from training.sharding.sharded_parameter import ShardedParameter

Shapes = Mapping[str, tuple[int, ...]]


class ErrorFeedback(Plugin):
    """Keeps what compression left out of the gradients that an update uses, and PowerSGD's warm starts."""

    def __init__(self, model: ParallelModel) -> None:
        self.model, self.buckets = model, buckets_of(model.reducers)

    @contextmanager
    def update(self, loss_scale: float) -> Iterator[None]:  # noqa: ARG002
        """Remember what was left out of the gradients of this update; of no other ones."""
        yield
        for bucket in self.buckets:
            bucket.keep()

    def state(self, state: State, stored: CheckpointRecord | None = None) -> State:
        """This rank's memories and warm starts, too; they are read apart."""
        if stored is not None:
            return state
        replicate, state = self.model.world.axis("replicate"), {**state}
        for bucket in self.buckets:
            for name, error in bucket.errors.items():
                spec = _of_replica(_param(self.model, name).spec, replicate.rank, replicate.size)
                state[_error_key(name)] = [(error[None], spec)]
        return state | {key: [(q[None], spec)] for key, q, spec in _warm_starts(self.model)}

    def read(self, checkpoint: Path, group: dist.ProcessGroup) -> None:
        """Take over what the checkpoint has of it, saved with any number of replicas."""
        stored = {key: tuple(tensor.size) for key, tensor in stored_tensors(checkpoint).items()}
        _load_errors(self.model, stored, checkpoint, group)
        starts = [(key, q, spec) for key, q, spec in _warm_starts(self.model) if stored.get(key) == spec.global_shape]
        read_shards({key: [(q[None], spec)] for key, q, spec in starts}, checkpoint, group)


def _load_errors(model: ParallelModel, stored: Shapes, folder: Path, group: dist.ProcessGroup) -> None:
    replicate, state = model.world.axis("replicate"), State()
    for bucket in buckets_of(model.reducers):
        for name, error in bucket.errors.items():
            count = stored.get(_error_key(name), (0,))[0]  # 0: a branch from a run without compression
            specs = [
                _of_replica(_param(model, name).spec, i, count) for i in range(replicate.rank, count, replicate.size)
            ]
            if specs:
                state[_error_key(name)] = [(torch.empty_like(error[None]), spec) for spec in specs]
    read_shards(state, folder, group)
    for bucket in buckets_of(model.reducers):
        for name, error in bucket.errors.items():
            error.zero_()
            for values, _ in state.get(_error_key(name), ()):
                error += values[0]


def _warm_starts(model: ParallelModel) -> Iterator[tuple[str, Tensor, ShardSpec]]:
    """Each Q with its key, and its place among those of the tensor-parallel pieces."""
    axis = model.world.axis("tp")
    for bucket in buckets_of(model.reducers):
        for name, q in bucket.qs.items():
            parts, index = (axis.size, axis.rank) if "tp" in _param(model, name).placement.shard else (1, 0)
            yield _q_key(name), q, ShardSpec((parts, *q.shape), (index, 0, 0), (1, *q.shape))


def _param(model: ParallelModel, name: str) -> ShardedParameter:
    return next(param for param in model.params if param.name == name)


def _of_replica(piece: ShardSpec, replica: int, replicas: int) -> ShardSpec:
    return ShardSpec((replicas, *piece.global_shape), (replica, *piece.offset), (1, *piece.size))


def _error_key(name: str) -> str:
    return f"compression.error.{name}"


def _q_key(name: str) -> str:
    return f"compression.q.{name}"
