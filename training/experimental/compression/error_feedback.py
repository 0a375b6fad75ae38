"""Error feedback of gradient compression: remembers what each replica left out, also in checkpoints.

`compression.error.NAME`  (replicas, …): the memory of each replica, in the shape of the parameter
`compression.q.NAME`      (parts, m, r): the Q of each of the tensor-parallel pieces of the parameter

On another number of replicas, replica i of n takes over the memories of i, i + n, i + 2 n, … added up, and a further
one begins with none: their sum, which is what the updates still lack, stays. On other tensor-parallel ranks Q begins
anew.
"""

from collections.abc import Iterator
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

_ERROR = "compression.error."
_Q = "compression.q."


class ErrorFeedback(Plugin):
    """Keeps what compression left out of the gradients that an update uses, and PowerSGD's warm starts."""

    def __init__(self, model: ParallelModel) -> None:
        self.model = model
        self.buckets = buckets_of(model.reducers)
        self._specs = {param.name: param.spec for param in model.params}

    @contextmanager
    def update(self, loss_scale: float) -> Iterator[None]:  # noqa: ARG002
        """Remember what was left out of the gradients of this update; of no other ones."""
        yield
        for bucket in self.buckets:
            bucket.keep()

    def state(self, state: State, stored: CheckpointRecord | None = None) -> State:
        """Return this rank's memories and warm starts, too; they are read apart."""
        if stored is not None:
            return state
        replicate = self.model.world.axis("replicate")
        errors = {
            _ERROR + name: [(error[None], _of_replica(self._specs[name], replicate.rank, replicate.size))]
            for name, error in self._errors().items()
        }
        return {**state, **errors, **self._warm_starts()}

    def read(self, checkpoint: Path, group: dist.ProcessGroup) -> None:
        """Take over what the checkpoint has of it, saved with any number of replicas."""
        replicate = self.model.world.axis("replicate")
        state = State()
        stored = {key: tuple(tensor.size) for key, tensor in stored_tensors(checkpoint).items()}
        for name, error in self._errors().items():
            count = stored.get(_ERROR + name, (0,))[0]  # 0: a branch from a run without compression
            state[_ERROR + name] = [
                (torch.empty_like(error[None]), _of_replica(self._specs[name], i, count))
                for i in range(replicate.rank, count, replicate.size)
            ]
        read_shards({key: pieces for key, pieces in state.items() if pieces}, checkpoint, group)
        for name, error in self._errors().items():
            error.zero_()
            for values, _ in state[_ERROR + name]:
                error += values[0]
        starts = self._warm_starts()
        alike = {key: start for key, start in starts.items() if stored.get(key) == start[0][1].global_shape}
        read_shards(alike, checkpoint, group)

    def _errors(self) -> dict[str, Tensor]:
        errors = dict[str, Tensor]()
        for bucket in self.buckets:
            errors |= bucket.errors
        return errors

    def _warm_starts(self) -> State:
        """Return each Q, with its place among those of the tensor-parallel pieces."""
        axis = self.model.world.axis("tp")
        starts = State()
        placements = {param.name: param.placement for param in self.model.params}
        for bucket in self.buckets:
            for name, q in bucket.qs.items():
                parts, index = (axis.size, axis.rank) if "tp" in placements[name].shard else (1, 0)
                starts[_Q + name] = [(q[None], ShardSpec((parts, *q.shape), (index, 0, 0), (1, *q.shape)))]
        return starts


def _of_replica(piece: ShardSpec, replica: int, replicas: int) -> ShardSpec:
    return ShardSpec((replicas, *piece.global_shape), (replica, *piece.offset), (1, *piece.size))
