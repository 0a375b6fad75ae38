"""DCP save and load plans for shards: the chunks of each tensor to write, and the stored chunks that fill a shard.

Plans do not depend on layouts: a load reads the overlap of every stored chunk with every shard to fill.
"""

import io
import itertools
import math
from typing import Any

import torch
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
from training.sharding.shard_spec import ShardSpec

State = dict[str, list[tuple[Tensor, ShardSpec]]]
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size, of a chunk or of an overlap


def overlap(one: Box, other: Box) -> Box:
    """Intersection of two boxes: its offset and size; a size is 0 if they do not overlap.

    >>> overlap(((0, 0), (4, 4)), ((2, 1), (4, 2)))
    ((2, 1), (2, 2))
    """
    start = tuple(max(a, b) for a, b in zip(one[0], other[0], strict=True))
    stops = (min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    return start, tuple(max(0, stop - begin) for begin, stop in zip(start, stops, strict=True))


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
        entries = [found for key in sorted(self.state) for found in _shards_with_index(self.state, key)]
        return SavePlan([_write_item(index, _shard_values(self.state, index), spec) for index, spec in entries])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        stored: dict[str, TensorStorageMetadata] = {}
        for item in sorted((item for plan in all_plans for item in plan.items), key=lambda item: item.index.fqn):
            data = item.tensor_data
            assert data is not None
            entry = stored.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, []))
            assert entry.size == data.size, f"{item.index.fqn} is {entry.size} here and {data.size} there"
            entry.chunks.append(data.chunk)
        for key, entry in stored.items():
            _check_partition(key, entry)
        # torch's own tools nest the keys by these paths: {"model": {name: tensor}, "optim": …}
        paths = {key: tuple(key.split(".", 1)) for key in stored}
        return all_plans, Metadata(dict(stored), planner_data=paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

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

    def create_local_plan(self) -> LoadPlan:
        wanted = [
            (i, spec) for key in sorted(self.state) for i, spec in _shards_with_index(self.state, key) if spec.numel
        ]
        missing = [i.fqn for i, _ in wanted if not isinstance(self.stored.get(i.fqn), TensorStorageMetadata)]
        if missing:
            raise InputError(
                f"the checkpoint holds no {missing[0]} (and lacks {len(missing) - 1} others of the {len(wanted)} "
                "tensors wanted): it is of another model or optimizer; give the configuration it was saved with"
            )
        return LoadPlan([item for index, spec in wanted for item in self._read_items(index, spec)])

    def _read_items(self, index: MetadataIndex, spec: ShardSpec) -> list[ReadItem]:
        key = index.fqn
        entry = self.stored[key]
        assert isinstance(entry, TensorStorageMetadata)
        if tuple(entry.size) != spec.global_shape:
            raise InputError(
                f"the checkpoint holds {key} of shape {tuple(entry.size)}, this model wants {spec.global_shape}; "
                "give the configuration it was saved with"
            )
        shared = [(chunk, overlap((spec.offset, spec.size), _box(chunk))) for chunk in entry.chunks]
        found = sum(math.prod(size) for _, (_, size) in shared)
        if found != spec.numel:
            raise InputError(f"the checkpoint holds {found} of the {spec.numel} elements wanted of {key}")
        return [_read_item(index, spec, chunk, box) for chunk, box in shared if math.prod(box[1])]

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
    """The shards of a tensor on this rank, each with its DCP index."""
    return [(MetadataIndex(key, spec.offset, i), spec) for i, (_, spec) in enumerate(state[key])]


def _shard_values(state: State, index: MetadataIndex) -> Tensor:
    assert index.index is not None
    return state[index.fqn][index.index][0].detach()


def _write_item(index: MetadataIndex, tensor: Tensor, spec: ShardSpec) -> WriteItem:
    assert tuple(tensor.shape) == spec.size, f"{index.fqn} has shape {tuple(tensor.shape)}, and its shard {spec.size}"
    chunk = ChunkStorageMetadata(torch.Size(spec.offset), torch.Size(spec.size))
    data = TensorWriteData(chunk, TensorProperties(tensor.dtype), torch.Size(spec.global_shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _read_item(index: MetadataIndex, spec: ShardSpec, chunk: ChunkStorageMetadata, shared: Box) -> ReadItem:
    start, size = shared
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=index,
        dest_offsets=torch.Size(a - b for a, b in zip(start, spec.offset, strict=True)),
        storage_index=MetadataIndex(index.fqn, chunk.offsets),
        storage_offsets=torch.Size(a - b for a, b in zip(start, chunk.offsets, strict=True)),
        lengths=torch.Size(size),
    )


def _box(chunk: ChunkStorageMetadata) -> Box:
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _check_partition(key: str, entry: TensorStorageMetadata) -> None:
    boxes = [_box(chunk) for chunk in entry.chunks]
    held, wanted = sum(math.prod(size) for _, size in boxes), math.prod(entry.size)
    assert held == wanted, f"the shards of {key} have {held} elements, and the whole {wanted}"
    shared = [overlap(one, other)[1] for one, other in itertools.combinations(boxes, 2)]
    assert not any(math.prod(size) for size in shared), f"shards of {key} overlap"
