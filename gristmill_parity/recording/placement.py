"""Placement: the piece of a global tensor that a rank has, by the axes of the mesh of ranks."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as Copies

Runs = tuple[tuple[int, int, int], ...]
"""Indices along a dimension, in order: (start, stop, step) each."""
Coordinates = Mapping[str, tuple[int, int]]
"""A rank's place on the mesh: its index along each axis, and the axis's size."""


@dataclass(frozen=True)
class Shard:
    """The ranks along an axis divide a dimension evenly; of several axes on one dimension the first is outermost."""

    dim: int
    order: Literal["chunks", "interleaved", "zigzag"] = "chunks"
    """chunks: rank r of n has the r-th of n parts; interleaved: indices r, r + n, r + 2 n, …; zigzag: parts r and
    2 n - 1 - r of 2 n, as rings of attention have them."""


@dataclass(frozen=True)
class Replicate:
    """The ranks along an axis have the same values."""


@dataclass(frozen=True)
class Partial:
    """The ranks along an axis have terms of a sum, or of a mean."""

    reduce: Literal["sum", "mean"] = "sum"


Indices = np.ndarray[Any, np.dtype[np.int64]]
Kind = Shard | Replicate | Partial
Placement = Mapping[str, Kind]
"""What each axis does to a tensor; an axis that is not named has one rank with the tensor, as pipeline stages do."""


@dataclass(frozen=True)
class Box:
    """A rectangular piece whose place is known: pieces may have different sizes, or be empty."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    placement: Placement = field(default_factory=dict)
    """What each axis does; the box says which part a rank along an axis of `Shard` has."""


@dataclass(frozen=True)
class TensorPiece:
    """A rank's part of a tensor: global shape, indices along each dimension, and the axes by what they do."""

    shape: tuple[int, ...]
    index: tuple[Runs, ...]
    shards: Mapping[str, int]
    """Axis: the dimension that it divides."""
    partial: Mapping[str, str]
    """Axis: "sum" or "mean"."""
    replicated: tuple[str, ...]

    def indices(self) -> list[Indices]:
        """Return the global indices of the piece along each dimension."""
        return [expand_runs(runs) for runs in self.index]

    @functools.cached_property
    def as_json(self) -> str:
        return json.dumps([self.shape, self.index, dict(self.shards), dict(self.partial), self.replicated])

    @classmethod
    def from_json(cls, values: list[Any]) -> "TensorPiece":
        shape, index, shards, partial, replicated = values
        runs = list[Runs]()
        for runs_of_dim in index:
            runs.append(tuple((start, stop, step) for start, stop, step in runs_of_dim))
        return cls(tuple(shape), tuple(runs), shards, partial, tuple(replicated))


def expand_runs(runs: Runs) -> Indices:
    """Return the indices of runs as an array."""
    if not runs:
        return np.empty(0, np.int64)
    return np.concatenate([np.arange(*run, dtype=np.int64) for run in runs])


def compress_indices(indices: Indices) -> Runs:
    """Return ascending runs of equal steps that give these indices."""
    if len(indices) == 0:
        return ()
    if len(indices) == 1:
        return ((int(indices[0]), int(indices[0]) + 1, 1),)
    steps = np.diff(indices)
    changes = np.flatnonzero(np.diff(steps)) + 1
    if len(changes) == 0:
        return ((int(indices[0]), int(indices[-1]) + 1, int(steps[0])),)
    runs = list[tuple[int, int, int]]()
    start = 0
    while start < len(indices):
        step = int(steps[start]) if start < len(steps) else 1
        stop = start + 1
        while stop < len(indices) and indices[stop] - indices[stop - 1] == step:
            stop += 1
        runs.append((int(indices[start]), int(indices[stop - 1]) + 1, step))
        start = stop
    return tuple(runs)


def piece_of(tensor: Tensor, placement: Placement | Box, axes: Coordinates) -> tuple[Tensor, TensorPiece]:
    """Return the values that this rank has, and the piece of the global tensor that they are.

    A DTensor says itself what the axes of its mesh do; `placement` says it of the others. Axes that are not in `axes`
    have one rank.
    """
    if isinstance(tensor, DTensor):
        box = box_of_dtensor(tensor)
        given = placement.placement if isinstance(placement, Box) else placement
        divided = {name: kind for name, kind in given.items() if name not in box.placement}
        kinds = {**divided, **box.placement}
        tensor = tensor.to_local()
    elif isinstance(placement, Box):
        kinds = dict(placement.placement)
        divided = {}
        box = placement
    else:
        kinds = dict(placement)
        divided = dict(placement)
        box = Box((0,) * tensor.ndim, tuple(tensor.shape))
    piece = _piece_of_box(
        tuple(tensor.shape), tuple(box.offset), tuple(box.shape), tuple(kinds.items()), tuple(divided.items()),
        tuple(axes.items()),
    )  # fmt: skip
    return tensor, piece


@functools.lru_cache(maxsize=4096)
def _piece_of_box(
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    whole: tuple[int, ...],
    kinds: tuple[tuple[str, Kind], ...],
    divided: tuple[tuple[str, Kind], ...],
    coordinates: tuple[tuple[str, tuple[int, int]], ...],
) -> TensorPiece:
    """Return the piece of a box of `whole`, whose sizes are those before the axes of `divided` divide it."""
    axes = dict(coordinates)
    count = len(shape)
    sharded = [(name, kind) for name, kind in divided if isinstance(kind, Shard)]
    for _, kind in sharded:
        if not -count <= kind.dim < count:
            raise IndexError(f"it has no dimension {kind.dim}")
    sizes = list(whole)
    index = list[Runs]()
    for dim in range(count):
        own = [(name, kind) for name, kind in sharded if kind.dim % count == dim and name in axes]
        for name, _ in own:
            sizes[dim] *= axes[name][1]
        indices = np.arange(sizes[dim], dtype=np.int64)
        for name, kind in own:
            indices = _selected(indices, kind, *axes[name])
        index.append(compress_indices(indices[offset[dim] : offset[dim] + shape[dim]]))
    shards = dict[str, int]()
    partial = dict[str, str]()
    replicated = list[str]()
    for name, placed in kinds:
        if name not in axes or axes[name][1] == 1:
            continue
        if isinstance(placed, Shard):
            shards[name] = placed.dim % max(1, count)
        elif isinstance(placed, Partial):
            partial[name] = placed.reduce
        else:
            replicated.append(name)
    return TensorPiece(tuple(sizes), tuple(index), shards, partial, tuple(replicated))


def _selected(indices: Indices, kind: Shard, rank: int, size: int) -> Indices:
    """Return those of the indices that rank `rank` of `size` has."""
    if kind.order == "interleaved":
        return indices[rank::size]
    if kind.order == "chunks":
        return np.split(indices, size)[rank]
    parts = np.array_split(indices, 2 * size)
    return np.concatenate([parts[rank], parts[2 * size - 1 - rank]])


def box_of_dtensor(tensor: DTensor) -> Box:
    """Return the box of this rank's part of a DTensor, and what the axes of its mesh do, by their names."""
    settled = [Copies() if placed.is_partial() else placed for placed in tensor.placements]
    own = DTensor.from_local(
        tensor.to_local().detach(), tensor.device_mesh, settled, run_check=False, shape=tensor.shape,
        stride=tensor.stride(),
    )  # fmt: skip
    (chunk,) = own.__create_chunk_list__()  # what torch's own checkpoints ask, also of rows that are strided
    kinds: dict[str, Kind] = {}
    for name, placed in zip(names_of_mesh(tensor.device_mesh), tensor.placements, strict=True):
        if placed.is_partial():
            kinds[name] = Partial("mean" if getattr(placed, "reduce_op", "sum") == "avg" else "sum")
        elif placed.is_replicate():
            kinds[name] = Replicate()
        else:
            kinds[name] = Shard(placed.dim)  # type: ignore[attr-defined]
    return Box(tuple(chunk.offsets), tuple(tensor.shape), kinds)


def names_of_mesh(mesh: Any) -> tuple[str, ...]:
    """Return the names of a device mesh's dimensions; those without a name are mesh0, mesh1, …"""
    return tuple(mesh.mesh_dim_names or (f"mesh{dim}" for dim in range(mesh.ndim)))


def coordinates_of_mesh(mesh: Any) -> dict[str, tuple[int, int]]:
    """Return this rank's place on a device mesh, by the names of its dimensions."""
    coordinates = mesh.get_coordinate()
    return {name: (coordinates[dim], mesh.size(dim)) for dim, name in enumerate(names_of_mesh(mesh))}
