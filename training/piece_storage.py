"""Pieces in torch's distributed checkpoints (DCP): written under one layout, read under any other.

A state is `{key: (tensor, piece)}`: what this process holds, plain tensors, and which box of the whole
each is. DCP writes files, and one `.metadata` that says where in them each box lies; what it takes to
be told is a plan of what to write, and a plan of what to read.
"""

import io
import itertools
import math
import pickle
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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

from pipeline.errors import GristmillError, InputError, OutputError
from training.piece import Piece, Weight

METADATA = ".metadata"
State = dict[str, tuple[Tensor, Piece]]
_ADMITTED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
}  # fmt: skip
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size


def model_state(weights: Iterable[Weight], moments: Mapping[str, Mapping[str, Tensor]] | None = None) -> State:
    """What a checkpoint holds: `model.NAME`, and `optim.NAME.MOMENT` for `moments[NAME][MOMENT]`, each of own's shape.

    Without `moments` the parameters alone: what a run is begun from.
    """
    state: State = {}
    for weight in weights:
        state[f"model.{weight.name}"] = (weight.own.detach(), weight.piece)
        for moment, values in (moments or {}).get(weight.name, {}).items():
            state[f"optim.{weight.name}.{moment}"] = (values.detach(), weight.piece)
    return state


def overlap(one: Box, other: Box) -> Box:
    """Offset and size of the box that two boxes share; some size is 0 where they share none.

    >>> overlap(((0, 0), (4, 4)), ((2, 1), (4, 2)))
    ((2, 1), (2, 2))
    """
    start = tuple(max(a, b) for a, b in zip(one[0], other[0], strict=True))
    stops = (min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    return start, tuple(max(0, stop - begin) for begin, stop in zip(start, stops, strict=True))


def share_out(held: list[dict[str, Piece]]) -> list[set[str]]:
    """The keys that each process is to write, given what each holds: every piece once, and about as much for each.

    >>> whole, rows = Piece.whole((2, 2)), [Piece.whole((2, 2)).part(0, 2, i) for i in range(2)]
    >>> [sorted(keys) for keys in share_out([{"a": whole, "b": rows[0]}, {"a": whole, "b": rows[1], "c": whole}])]
    [['a', 'b'], ['b', 'c']]
    """
    holders: dict[tuple[str, Piece], list[int]] = {}
    for rank, pieces in enumerate(held):
        for key, piece in pieces.items():
            if piece.numel or 0 in piece.shape:  # an empty share of something is nowhere
                holders.setdefault((key, piece), []).append(rank)
    written: list[set[str]] = [set() for _ in held]
    load = [0] * len(held)
    # where there is no choice first, then the largest
    order = sorted(holders, key=lambda item: (len(holders[item]) > 1, -item[1].numel, item[0], item[1].offset))
    for key, piece in order:
        rank = min(holders[key, piece], key=lambda rank: (load[rank], rank))
        written[rank].add(key)
        load[rank] += piece.numel
    return written


def write_pieces(state: State, folder: Path, group: dist.ProcessGroup) -> None:
    """Write what the processes of `group` give, together a partition of each whole tensor, into an empty `folder`.

    Raises OutputError, the same on every process, where one of them cannot write.
    """
    with _one_line(folder, "write"):
        dcp.save(dict(state), storage_writer=_Writer(folder), planner=PieceSavePlanner(), process_group=group)


def read_pieces(state: State, folder: Path, group: dist.ProcessGroup) -> None:
    """Fill the tensors of `state` in place from the checkpoint in `folder`, whatever layout wrote it.

    Raises InputError, the same on every process, where it lacks one of them or holds it in another shape.
    """
    reader = _Reader(folder)
    reader.read_metadata()  # here its error is ours
    with _one_line(folder, "read"):
        dcp.load(dict(state), storage_reader=reader, planner=PieceLoadPlanner(), process_group=group)


def stored_types(folder: Path) -> dict[str, torch.dtype]:
    """The types of the tensors in the checkpoint in `folder`, by key."""
    stored = _Reader(folder).read_metadata().state_dict_metadata
    return {key: entry.properties.dtype for key, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}


class PieceSavePlanner(SavePlanner):
    """Writes every piece of the state it is given. Together they must make up each whole tensor, without overlap."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,  # noqa: ARG002
        is_coordinator: bool = False,  # noqa: ARG002
    ) -> None:
        self.state: State = state_dict

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(key, tensor, piece) for key, (tensor, piece) in sorted(self.state.items())])

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
        # where torch's own tools put each in a nested dictionary: {"model": {name: tensor}, "optim": …}
        paths = {key: tuple(key.split(".", 1)) for key in stored}
        return all_plans, Metadata(dict(stored), planner_data=paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self.state[write_item.index.fqn][0].detach().contiguous()


class PieceLoadPlanner(LoadPlanner):
    """Fills each tensor of the state it is given from the boxes that were stored of it."""

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
        missing = [key for key in self.state if not isinstance(self.stored.get(key), TensorStorageMetadata)]
        if missing:
            raise InputError(
                f"the checkpoint holds no {missing[0]} (nor {len(missing) - 1} others of the {len(self.state)} tensors "
                "wanted): it is of another model or optimizer; give the configuration it was saved with"
            )
        return LoadPlan([item for key, (_, piece) in sorted(self.state.items()) for item in self._reads(key, piece)])

    def _reads(self, key: str, piece: Piece) -> list[ReadItem]:
        entry = self.stored[key]
        assert isinstance(entry, TensorStorageMetadata)
        if tuple(entry.size) != piece.shape:
            raise InputError(
                f"the checkpoint holds {key} of shape {tuple(entry.size)}, and this model's is {piece.shape}; "
                "give the configuration it was saved with"
            )
        shared = [(chunk, overlap((piece.offset, piece.size), _box(chunk))) for chunk in entry.chunks]
        found = sum(math.prod(size) for _, (_, size) in shared)
        if found != piece.numel:
            raise InputError(f"the checkpoint holds {found} of the {piece.numel} elements wanted of {key}")
        return [_read_item(key, piece, chunk, box) for chunk, box in shared if math.prod(box[1])]

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        tensor = self.state[read_item.dest_index.fqn][0].detach()
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: what resolve_tensor gave was a view."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:  # noqa: ARG002
        raise AssertionError("a state is made of tensors")


class _Writer(dcp.FileSystemWriter):
    """Leaves out what torch makes up for each save, so that the same state makes the same bytes."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


class _Reader(dcp.FileSystemReader):
    """Reads `.metadata`, a pickle, without running code that it may name: a checkpoint may be a stranger's."""

    def read_metadata(self, *_arguments: Any, **_named: Any) -> Metadata:
        path = Path(self.path) / METADATA
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
            assert isinstance(metadata, Metadata)
        except Exception as error:  # a damaged pickle may ask for anything
            raise InputError(f"{path} is not a checkpoint's index that we can read ({error})") from error
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ADMITTED.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of ours does")


def _write_item(key: str, tensor: Tensor, piece: Piece) -> WriteItem:
    assert tuple(tensor.shape) == piece.size, f"{key} is {tuple(tensor.shape)}, and its piece {piece.size}"
    chunk = ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.size))
    data = TensorWriteData(chunk, TensorProperties(tensor.dtype), torch.Size(piece.shape))
    return WriteItem(MetadataIndex(key, piece.offset), WriteItemType.SHARD, tensor_data=data)


def _read_item(key: str, piece: Piece, chunk: ChunkStorageMetadata, shared: Box) -> ReadItem:
    start, size = shared
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(key, piece.offset),
        dest_offsets=torch.Size(a - b for a, b in zip(start, piece.offset, strict=True)),
        storage_index=MetadataIndex(key, chunk.offsets),
        storage_offsets=torch.Size(a - b for a, b in zip(start, chunk.offsets, strict=True)),
        lengths=torch.Size(size),
    )


def _box(chunk: ChunkStorageMetadata) -> Box:
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _check_partition(key: str, entry: TensorStorageMetadata) -> None:
    boxes = [_box(chunk) for chunk in entry.chunks]
    held, wanted = sum(math.prod(size) for _, size in boxes), math.prod(entry.size)
    assert held == wanted, f"the pieces of {key} have {held} elements, and the whole {wanted}"
    shared = [overlap(one, other)[1] for one, other in itertools.combinations(boxes, 2)]
    assert not any(math.prod(size) for size in shared), f"pieces of {key} overlap"


@contextmanager
def _one_line(folder: Path, verb: str) -> Iterator[None]:
    """torch tells a failure with a traceback from every process: here it is one line, of the first that failed."""
    try:
        yield
    except dcp.CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        if isinstance(reason, GristmillError | AssertionError):
            raise reason from error
        if verb == "read":
            raise InputError(f"cannot read the checkpoint {folder} ({str(reason).strip()})") from error
        # torch's file writer loses the reason: it meets a full disk as a position it did not expect
        free = shutil.disk_usage(next(path for path in folder.parents if path.is_dir())).free >> 20
        raise OutputError(
            f"cannot write the checkpoint {folder} ({str(reason).strip()}; {free:,} MiB "
            "are free there): make room, or choose another folder, and run the same command again"
        ) from error
