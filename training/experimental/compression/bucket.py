"""CompressedBucket: a bucket of gradients whose matrices replicas send compressed, with error feedback.

A replica adds to its gradient what it has left out before, its memory, and remembers what is left out now. So over the
replicas: gradients + old memories = what all of them get + new memories. Vectors, and matrices of which ranks outside
data parallelism have terms, are summed as they are.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from training.experimental.compression.int8 import Int8Sum
from training.experimental.compression.options import CompressionOptions
from training.experimental.compression.powersgd import PowerSGD, initial_q, is_smaller
from training.experimental.compression.traffic import CompressionFormulas
from training.model.decoder import Decoder
from training.parallel.data.grad_reducer import GradBucket, GradReducer
from training.parallel.data.placements import DATA_PARALLEL
from training.parallel.pipeline.pipeline_stages import global_name
from training.sharding.axis import Axes
from training.sharding.placement import Placement


class CompressedBucket(GradBucket):
    """A `GradBucket` without ZeRO; `errors` are this replica's memories by name, and `qs` PowerSGD's warm starts.

    An update that is refused must leave both as they were: `keep` takes over those of the last reduction. `names`: of
    the matrices to compress, by the id of the module's parameter; `seed` of the warm starts.
    """

    def __init__(self, *arguments: Any, options: CompressionOptions, seed: int, names: Mapping[int, str]) -> None:
        super().__init__(*arguments)
        assert self.shard.size == 1
        self.method = options.compression
        rank = options.compression_rank
        self.errors: dict[str, Tensor] = {}
        self.qs: dict[str, Tensor] = {}
        self._at: list[int] = []  # numbers of the compressed parameters
        for i, (p, o) in enumerate(zip(self.full, self.own, strict=True)):
            if id(p) in names and (self.method != "powersgd" or is_smaller(p.shape, rank)):
                self._at.append(i)
                self.errors[names[id(p)]] = torch.zeros_like(o, requires_grad=False)
        if self.method == "powersgd":
            for name, error in self.errors.items():
                self.qs[name] = initial_q((error.shape[0], error.shape[1]), rank, seed, name, error)
        self._summing: PowerSGD | Int8Sum | None = None
        self._next: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None

    def keep(self) -> None:
        """Take over what the last reduction left out: its gradients are used."""
        if self._next is not None:
            self.errors, self.qs = self._next
        self._next = None

    def _start_sum(self, buffer: Tensor) -> None:
        compressed, others = self._parts(buffer[0])
        exact = torch.cat([buffer.new_empty(0), *others])
        matrices = list[Tensor]()
        for part, error in zip(compressed, self.errors.values(), strict=True):
            matrices.append(part.view_as(error).add_(error))
        if self.method == "powersgd":
            self._summing = PowerSGD(matrices, list(self.qs.values()), exact, self.replicate)
        else:
            flat = torch.cat([buffer.new_empty(0), *(matrix.flatten() for matrix in matrices)])
            self._summing = Int8Sum(flat, exact, self.replicate)
        self._reduced = buffer[0]

    def _finish_sum(self, reduced: Tensor) -> Tensor:
        if isinstance(self._summing, PowerSGD):
            sums, qs, exact = self._summing.finish()
            left = self._summing.matrices
            new_qs = dict(zip(self.qs, qs, strict=True))
        else:
            assert self._summing is not None
            flat, exact = self._summing.finish()
            lengths = [error.numel() for error in self.errors.values()]
            new_qs = {}
            sums = list(flat.split(lengths))
            left = list(self._summing.flat.split(lengths))
        new_errors = dict[str, Tensor]()
        for (name, error), left_out in zip(self.errors.items(), left, strict=True):
            new_errors[name] = left_out.view_as(error)
        self._next = (new_errors, new_qs)
        self._summing = None
        result = torch.empty_like(reduced)
        compressed, others = self._parts(result)
        exact_parts = exact.split([len(part) for part in others])
        for part, values in zip([*compressed, *others], [*sums, *exact_parts], strict=True):
            part.copy_(values.flatten())
        return result

    def _parts(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parts of a bucket, (L,), that are compressed, and the others."""
        parts = flat.split(self.lengths)
        compressed = [parts[i] for i in self._at]
        others = [part for i, part in enumerate(parts) if i not in self._at]
        return compressed, others


def buckets_of(reducers: Iterable[GradReducer]) -> "list[CompressedBucket]":
    """Return the buckets of a model's reducers that are sent compressed."""
    buckets = list[CompressedBucket]()
    for reducer in reducers:
        buckets += [bucket for bucket in reducer.buckets if isinstance(bucket, CompressedBucket)]
    return buckets


class CompressionExperiment(CompressionFormulas):
    """Gradient compression takes over the buckets in which replicas sum gradients."""

    def make_bucket(
        self, part: Decoder, table: Mapping[str, Placement], axes: Axes, seed: int
    ) -> Callable[..., GradBucket]:
        """Return what makes a stage's buckets: matrices whose gradients only replicas sum are compressed."""
        names = {}
        for local_name, p in part.named_parameters():
            name = global_name(part, local_name)
            others = set(table[name].gradient_sum) - set(DATA_PARALLEL.gradient_sum)
            if p.ndim == 2 and all(axes[axis].size == 1 for axis in others):
                names[id(p)] = name
        return partial(CompressedBucket, options=self.layout, seed=seed, names=names)
