"""Shards in torch's distributed checkpoints (DCP): written under one layout, read under any other.

A state is `{key: [(tensor, spec), …]}`: what this process holds of each whole tensor, plain tensors and
which box each is; mostly one, and two of a tied matrix that two of its pipeline stages use. DCP writes
files, and one `.metadata` that says where in them each box lies.
"""

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
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from gristmill.errors import GristmillError, InputError, OutputError
from training.checkpoint.shard_plans import ShardLoadPlanner, ShardSavePlanner, State
from training.sharding.shard_spec import ShardSpec
from training.sharding.sharded_parameter import ShardedParameter

METADATA = ".metadata"
ShardKey = tuple[str, ShardSpec]
_ADMITTED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
}  # fmt: skip


def model_state(params: Iterable[ShardedParameter], moments: Mapping[str, Mapping[str, Tensor]] | None = None) -> State:
    """What a checkpoint holds: `model.NAME`, and `optim.NAME.MOMENT` for `moments[NAME][MOMENT]`, each of own's shape.

    Without `moments` the parameters alone: what a run is begun from.
    """
    state: State = {}
    for param in params:
        state.setdefault(f"model.{param.name}", []).append((param.local.detach(), param.spec))
        for moment, values in (moments or {}).get(param.name, {}).items():
            state[f"optim.{param.name}.{moment}"] = [(values.detach(), param.spec)]  # one, however often it is held
    return state


def held_shards(state: State) -> list[ShardKey]:
    return [(key, spec) for key, entries in state.items() for _, spec in entries]


def assign_writers(held: list[list[ShardKey]]) -> list[set[ShardKey]]:
    """What each process is to write, given what each holds: every shard once, and about as much for each.

    >>> whole, rows = ShardSpec.whole((2, 2)), [ShardSpec.whole((2, 2)).shard(0, 2, i) for i in range(2)]
    >>> written = assign_writers([[("a", whole), ("b", rows[0])], [("a", whole), ("b", rows[1]), ("c", whole)]])
    >>> [sorted(key for key, _ in items) for items in written]
    [['a', 'b'], ['b', 'c']]
    """
    holders: dict[ShardKey, list[int]] = {}
    for rank, items in enumerate(held):
        for key, spec in items:
            if spec.numel:
                holders.setdefault((key, spec), []).append(rank)
    written: list[set[ShardKey]] = [set() for _ in held]
    load = [0] * len(held)
    # where there is no choice first, then the largest
    order = sorted(holders, key=lambda item: (len({*holders[item]}) > 1, -item[1].numel, item[0], item[1].offset))
    for item in order:
        rank = min(holders[item], key=lambda rank: (load[rank], rank))
        written[rank].add(item)
        load[rank] += item[1].numel
    return written


def write_shards(state: State, folder: Path, group: dist.ProcessGroup) -> None:
    """Write what the processes of `group` give, together a partition of each whole tensor, into an empty `folder`.

    Raises OutputError, the same on every process, where one of them cannot write.
    """
    with _one_line(folder, "write"):
        dcp.save(dict(state), storage_writer=_Writer(folder), planner=ShardSavePlanner(), process_group=group)


def read_shards(state: State, folder: Path, group: dist.ProcessGroup) -> None:
    """Fill the tensors of `state` in place from the checkpoint in `folder`, whatever layout wrote it.

    Raises InputError, the same on every process, where it lacks one of them or holds it in another shape.
    """
    reader = _Reader(folder)
    reader.read_metadata()  # here its error is ours
    with _one_line(folder, "read"):
        dcp.load(dict(state), storage_reader=reader, planner=ShardLoadPlanner(), process_group=group)


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """The types of the tensors in the checkpoint in `folder`, by key."""
    stored = _Reader(folder).read_metadata().state_dict_metadata
    return {key: entry.properties.dtype for key, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}


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
