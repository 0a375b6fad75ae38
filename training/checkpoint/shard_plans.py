"""DCP save and load plans for shards: the chunks of each tensor to write, and the stored chunks that fill a shard.

Plans do not depend on layouts: a load reads the overlap of every stored chunk with every shard to fill.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from gristmill.errors import InputError
from gristmill.wording import count_of
from training.sharding.shard_spec import ShardSpec

State = dict[str, list[tuple[Tensor, ShardSpec]]]
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size
Boxes = NDArray[np.int64]  # of n boxes of d dimensions: (n, 2, d)


def box_array(boxes: Sequence[Box], dims: int) -> Boxes:
    """Build the (n, 2, dims) array of n boxes."""
    return np.array(boxes, np.int64).reshape(len(boxes), 2, dims)


def numel(boxes: Boxes) -> NDArray[np.int64]:
    """Return the number of elements of each box: (n,) int64."""
    return boxes[:, 1].prod(axis=1)


def intersect(box: Box, boxes: Boxes) -> Boxes:
    """Return the intersection of `box` with each of `boxes`: (n, 2, d), of size 0 where they do not overlap.

    >>> intersect(((0, 0), (4, 4)), box_array([((2, 1), (4, 2))], 2)).tolist()
    [[[2, 1], [2, 2]]]
    """
    offset, size = np.array(box, np.int64)
    start = np.maximum(boxes[:, 0], offset)
    stop = np.minimum(boxes.sum(axis=1), offset + size)
    return np.stack([start, np.maximum(stop - start, 0)], axis=1)


# The chunks of each way in which a shape is cut: layers are alike, so that a model has few
Partitions = dict[tuple[tuple[int, ...], tuple[Box, ...]], list[ChunkStorageMetadata]]


class HeldTensor(NamedTuple):
    """The boxes of one tensor that a rank writes. Tuples, which pickle small: rank 0 gets one per rank and tensor."""

    key: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    boxes: list[Box]


class ShardSavePlanner(SavePlanner):
    """Plans to write every shard of the given state. The shards of all ranks must partition each tensor."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,  # noqa: ARG002
        is_coordinator: bool = False,  # noqa: ARG002
    ) -> None:
        self.state: State = state_dict

    def create_local_plan(self) -> SavePlan:
        held = list[HeldTensor]()
        for key, shards in sorted(self.state.items()):
            tensor, spec = shards[0]
            boxes = [(spec.offset, spec.size) for _, spec in shards]
            held.append(HeldTensor(key, tensor.dtype, spec.global_shape, boxes))
        return SavePlan([], planner_data=held)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        held: dict[str, list[HeldTensor]] = {}
        for plan in all_plans:
            for tensor in plan.planner_data:
                held.setdefault(tensor.key, []).append(tensor)
        known: Partitions = {}
        stored = {key: _tensor_metadata(key, held[key], known) for key in sorted(held)}
        # torch's own tools nest the keys by these paths: {"model": {name: tensor}, "optim": …}
        paths = {key: tuple(key.split(".", 1)) for key in stored}
        return [replace(plan, planner_data=None) for plan in all_plans], Metadata(dict(stored), planner_data=paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Add this rank's items: the coordinator need not know them."""
        items = list[WriteItem]()
        for key in sorted(self.state):
            for index, spec in _shards_with_index(self.state, key):
                items.append(_write_item(index, _shard_values(self.state, index), spec))
        return replace(new_plan, items=items)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return _shard_values(self.state, write_item.index).contiguous()


class ShardLoadPlanner(LoadPlanner):
    """Plans to fill each shard of the given state from the stored chunks that overlap it.

    Raises InputError for a tensor that is not stored, or with another shape.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: ARG002
    ) -> None:
        assert metadata is not None
        self.state: State = state_dict
        self.stored = metadata.state_dict_metadata
        self._boxes: dict[int, Boxes] = {}  # by the identity of a list of chunks, which tensors may share

    def create_local_plan(self) -> LoadPlan:
        needed = list[tuple[MetadataIndex, ShardSpec]]()
        for key in sorted(self.state):
            needed += [(index, spec) for index, spec in _shards_with_index(self.state, key) if spec.numel]
        missing = list[str]()
        for index, _ in needed:
            if not isinstance(self.stored.get(index.fqn), TensorStorageMetadata):
                missing.append(index.fqn)
        if missing:
            others = count_of(len(missing) - 1, "other tensor")
            more = f" (and lacks {others} of this run's {len(needed)})" if len(missing) > 1 else ""
            raise InputError(
                f"the checkpoint has no {missing[0]}{more}: it belongs to another model or optimizer; give the "
                "configuration it was saved with"
            )
        items = list[ReadItem]()
        for index, spec in needed:
            items += self._read_items(index, spec)
        return LoadPlan(items)

    def _read_items(self, index: MetadataIndex, spec: ShardSpec) -> list[ReadItem]:
        key = index.fqn
        entry = self.stored[key]
        assert isinstance(entry, TensorStorageMetadata)
        if tuple(entry.size) != spec.global_shape:
            raise InputError(
                f"the checkpoint holds {key} of shape {tuple(entry.size)}, this model needs {spec.global_shape}; "
                "give the configuration it was saved with"
            )
        shared = intersect((spec.offset, spec.size), self._stored_boxes(entry))
        counts = numel(shared)
        stored = int(counts.sum())
        if stored != spec.numel:
            raise InputError(
                f"the checkpoint holds {stored} of the {spec.numel} elements of {key} that this rank needs"
            )
        return [_read_item(index, spec, entry.chunks[i], shared[i].tolist()) for i in np.flatnonzero(counts)]

    def _stored_boxes(self, entry: TensorStorageMetadata) -> Boxes:
        if id(entry.chunks) not in self._boxes:
            boxes = [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
            self._boxes[id(entry.chunks)] = box_array(boxes, len(entry.size))
        return self._boxes[id(entry.chunks)]

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        tensor = _shard_values(self.state, read_item.dest_index)
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: resolve_tensor returned a view of the shard."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:  # noqa: ARG002
        raise AssertionError("a state holds tensors only")


def _shards_with_index(state: State, key: str) -> list[tuple[MetadataIndex, ShardSpec]]:
    """Return the shards of a tensor on this rank, each with its DCP index."""
    return [(MetadataIndex(key, spec.offset, i), spec) for i, (_, spec) in enumerate(state[key])]


def _shard_values(state: State, index: MetadataIndex) -> Tensor:
    assert index.index is not None
    return state[index.fqn][index.index][0].detach()


def _write_item(index: MetadataIndex, tensor: Tensor, spec: ShardSpec) -> WriteItem:
    assert tuple(tensor.shape) == spec.size, f"{index.fqn} has shape {tuple(tensor.shape)}, and its shard {spec.size}"
    chunk = ChunkStorageMetadata(torch.Size(spec.offset), torch.Size(spec.size))
    data = TensorWriteData(chunk, TensorProperties(tensor.dtype), torch.Size(spec.global_shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _read_item(
    index: MetadataIndex, spec: ShardSpec, chunk: ChunkStorageMetadata, shared: Sequence[Sequence[int]]
) -> ReadItem:
    start, size = shared
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=index,
        dest_offsets=torch.Size(a - b for a, b in zip(start, spec.offset, strict=True)),
        storage_index=MetadataIndex(index.fqn, chunk.offsets),
        storage_offsets=torch.Size(a - b for a, b in zip(start, chunk.offsets, strict=True)),
        lengths=torch.Size(size),
    )


def _tensor_metadata(key: str, held: list[HeldTensor], known: Partitions) -> TensorStorageMetadata:
    """Return the index entry of a tensor, from what each rank writes of it; adds its partition to those `known`."""
    _, dtype, shape, _ = held[0]
    for tensor in held:
        assert tensor.global_shape == shape, f"{key} is {shape} here and {tensor.global_shape} there"
    boxes = tuple(box for tensor in held for box in tensor.boxes)
    if (shape, boxes) not in known:
        _check_partition(key, shape, box_array(boxes, len(shape)))
        known[shape, boxes] = [ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, size in boxes]
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), known[shape, boxes])


def _check_partition(key: str, shape: tuple[int, ...], boxes: Boxes) -> None:
    count = int(numel(boxes).sum())
    total = math.prod(shape)
    assert count == total, f"the shards of {key} have {count} elements, and the whole {total}"
