"""Shard storage in torch's distributed checkpoints (DCP): saved under one layout, loaded under any other.

A state is `{key: [(tensor, spec), …]}`: the shards of each tensor that this rank holds, as plain tensors. Usually
one; two for a tied embedding whose first and last pipeline stage are both on this rank. DCP writes data files and one
`.metadata`, the index of where each shard is stored.
"""

import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from gristmill.errors import GristmillError, InputError, OutputError, UsageError
from training.checkpoint.shard_plans import ShardLoadPlanner, ShardSavePlanner, State
from training.optim.weight_average import AVERAGE
from training.sharding.shard_spec import ShardSpec
from training.sharding.sharded_parameter import ShardedParameter

METADATA = ".metadata"  # DCP's index file
ShardKey = tuple[str, ShardSpec]
# classes that the pickle .metadata may name
_ALLOWED_GLOBALS = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
}  # fmt: skip


def parameter_key(name: str) -> str:
    """Return the key of a parameter in a checkpoint."""
    return f"model.{name}"


def optimizer_key(name: str, state: str) -> str:
    """Return the key of one of a parameter's optimizer states in a checkpoint."""
    return f"optim.{name}.{state}"


def model_state(
    params: Iterable[ShardedParameter],
    moments: Mapping[str, Mapping[str, Tensor]] | None = None,
    key_of: Callable[[str], str] = parameter_key,
    buffers: Mapping[str, Tensor] = MappingProxyType({}),
) -> State:
    """Build the state of a checkpoint: `model.NAME` and `optim.NAME.MOMENT`, from `moments[NAME][MOMENT]`.

    Moments have the shape of the parameter's local shard. Without `moments`, the state holds the parameters only.
    `key_of`: the key to read a parameter's values from, by its name. `buffers`: further tensors, whole.
    """
    state: State = {
        parameter_key(name): [(values, ShardSpec.whole(tuple(values.shape)))] for name, values in buffers.items()
    }
    for param in params:
        state.setdefault(key_of(param.name), []).append((param.local.detach(), param.spec))
        for moment, values in (moments or {}).get(param.name, {}).items():
            state[optimizer_key(param.name, moment)] = [(values.detach(), param.spec)]  # tied copies share one moment
    return state


def held_shards(state: State) -> list[ShardKey]:
    """List the shards in a state, without their values."""
    return [(key, spec) for key, entries in state.items() for _, spec in entries]


def assign_writers(held: list[list[ShardKey]]) -> list[set[ShardKey]]:
    """Choose the rank that writes each shard, among those that hold it; balances the elements written per rank.

    >>> whole, rows = ShardSpec.whole((2, 2)), [ShardSpec.whole((2, 2)).shard(0, 2, i) for i in range(2)]
    >>> written = assign_writers([[("a", whole), ("b", rows[0])], [("a", whole), ("b", rows[1]), ("c", whole)]])
    >>> [sorted(key for key, _ in items) for items in written]
    [['a', 'b'], ['b', 'c']]
    """
    holders: dict[ShardKey, list[int]] = {}
    for rank, items in enumerate(held):
        for item in dict.fromkeys(items):
            holders.setdefault(item, []).append(rank)
    written: list[set[ShardKey]] = [set() for _ in held]
    load = [0] * len(held)
    for item, [first, *others] in holders.items():
        if not others and item[1].numel:
            written[first].add(item)
            load[first] += item[1].numel
    shared = [item for item, ranks in holders.items() if len(ranks) > 1 and item[1].numel]
    for item in sorted(shared, key=lambda item: (-item[1].numel, item[0], item[1].offset)):  # the largest first
        rank = min(holders[item], key=lambda rank: (load[rank], rank))
        written[rank].add(item)
        load[rank] += item[1].numel
    return written


def write_shards(state: State, folder: Path, group: dist.ProcessGroup) -> None:
    """Write each rank's shards to an empty `folder`; together they must partition each tensor. Collective over `group`.

    Raises OutputError on every rank if one of them cannot write.
    """
    with _as_one_error(folder, "write"):
        dcp.save(dict(state), storage_writer=_Writer(folder), planner=ShardSavePlanner(), process_group=group)


def read_shards(state: State, folder: Path, group: dist.ProcessGroup) -> None:
    """Fill the tensors of `state` in place from the checkpoint in `folder`, saved under any layout. Collective.

    Raises InputError on every rank if a tensor is missing or has another shape.
    """
    with _as_one_error(folder, "read"):
        dcp.load(dict(state), storage_reader=_Reader(folder), planner=ShardLoadPlanner(), process_group=group)


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return the metadata of each tensor in the checkpoint `folder`, such as its size and dtype, by key."""
    stored = _Reader(folder).read_metadata().state_dict_metadata
    return {key: entry for key, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}


class _Writer(dcp.FileSystemWriter):
    """Omits torch's random save id: the same state always gives the same bytes."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards. Raises OutputError, whose words reach every rank, where they cannot be written."""
        try:
            return super().write_data(plan, planner)
        except (OSError, RuntimeError) as error:
            raise _write_error(Path(self.path), error) from error

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, then empty it: torch would send it to every rank, where nobody reads it."""
        super().finish(metadata, results)
        metadata.state_dict_metadata = {}
        metadata.storage_data = None
        metadata.planner_data = None


class _Reader(dcp.FileSystemReader):
    """Reads `.metadata`, a pickle, with an allowlist: an untrusted checkpoint cannot run code."""

    def read_metadata(self, *_arguments: Any, **_named: Any) -> Metadata:
        path = Path(self.path) / METADATA
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            assert isinstance(metadata, Metadata)
        except Exception as error:  # a damaged pickle may ask for anything
            raise InputError(f"{path} is not a readable checkpoint index ({error})") from error
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED_GLOBALS.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed in a checkpoint")


@contextmanager
def _as_one_error(folder: Path, verb: str) -> Iterator[None]:
    """Replace torch's error, with a traceback per rank, by one line: that of the first rank that failed."""
    try:
        yield
    except dcp.CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        if isinstance(reason, GristmillError | AssertionError):
            raise reason from error
        if verb == "read":
            raise InputError(f"cannot read the checkpoint {folder} ({str(reason).strip()})") from error
        raise _write_error(folder, reason) from error


def _write_error(folder: Path, error: BaseException) -> OutputError:
    """Return the error for a checkpoint that could not be written, in words of the system where there are any."""
    reason = str(error).strip()
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    if cause is not None:
        reason = cause.strerror or reason
    elif "inline_container" in reason:
        # how torch's writer says that it is not where it should be in the file
        reason = "not all of it could be written"
    free = shutil.disk_usage(next(path for path in folder.parents if path.is_dir())).free >> 20
    return OutputError(
        f"cannot write the checkpoint {folder} ({reason}; {free:,} MiB are free there): make room, or choose another "
        "folder, and run the same command again"
    )


def weight_keys(checkpoint: Path, ema: bool) -> Callable[[str], str]:
    """Return what gives a parameter's key by its name: that of its weights or, with `ema`, of their average.

    Raises UsageError for a checkpoint without an average.
    """
    if not ema:
        return parameter_key
    if not any(key.endswith(f".{AVERAGE}") for key in stored_tensors(checkpoint)):
        raise UsageError(
            f"{checkpoint} holds no average of the weights, which --ema asks for: its run was without "
            "optim.ema_decay; try without --ema"
        )
    return lambda name: optimizer_key(name, AVERAGE)
