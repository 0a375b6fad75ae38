"""Parameter offload for ZeRO-3: parameters in memory-mapped files, read when used and dropped afterwards.

After ZeRO-Infinity (Rajbhandari et al. 2021, section 5); the operating system does the reads and writes.
"""

import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from gristmill.errors import OutputError
from training.memory.memory_config import MemoryConfig, OffloadTarget
from training.memory.scratch_files import make_scratch_folder, open_scratch_file, remove_scratch_folder
from training.model.decoder import Decoder
from training.sharding.sharded_parameter import ShardedParameter


def offload_policy(target: OffloadTarget) -> OffloadPolicy:
    """FSDP's offload policy: the storage of sharded parameters and their gradients.

    Memory is pinned for "cpu" if there is a GPU; the mapped files of "disk" cannot be pinned.
    """
    if target == "device":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=target == "cpu" and torch.cuda.is_available())


def allocate_parameters(
    parts: Sequence[Decoder], memory: MemoryConfig, device: torch.device, rank: int
) -> "ParametersOnDisk | None":
    """Allocate meta-device parts, uninitialized; returns the files that hold them with memory.parameters "disk"."""
    files = None
    if memory.parameters == "disk":
        assert memory.folder is not None, "the caller chooses the folder"
        files = ParametersOnDisk(memory.folder, rank)
    for part in parts:
        if files is not None:
            files.materialize(part)
        else:
            part.to_empty(device=device if memory.parameters == "device" else "cpu")
        part.tie()  # to_empty allocates tied matrices separately
    return files


@dataclass
class _MappedFile:
    """A memory-mapped file: this rank's shard of one parameter, and FSDP's padding rows."""

    pages: mmap.mmap
    values: Tensor
    """The mapped elements, flat: the shard, then padding."""

    def drop_pages(self) -> None:
        """Free the pages until the next use; the operating system writes changed ones to the file."""
        self.pages.madvise(mmap.MADV_DONTNEED)

    def read_ahead(self) -> None:
        """Ask the operating system to start reading the file."""
        self.pages.madvise(mmap.MADV_WILLNEED)


class ParametersOnDisk:
    """Parameters in mapped files, one per parameter; pages are dropped after each use.

    The files are scratch files, removed by `close`.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder / f"rank-{rank:05d}-parameters"
        lock = make_scratch_folder(self.folder)
        self._files: dict[int, _MappedFile] = {}  # by the address of their memory
        self._materialized: dict[int, Tensor] = {}  # materialized tensors, by the id of the meta tensor
        self.close = weakref.finalize(self, remove_scratch_folder, self.folder, lock)

    def materialize(self, part: nn.Module) -> None:
        """Allocate the parameters of `part` in files, in place of `to_empty`. Raises OutputError if the disk is full.

        `part` is a decoder or pipeline stage on the meta device, already sharded by `fully_shard`.
        """
        try:
            with _PadInFile(self._files):
                part._apply(self._materialize_tensor)
        except OutputError:
            self.close()  # the disk is full: leave nothing on it
            raise
        self._materialized.clear()
        blocks = list(part.blocks.children())  # type: ignore[union-attr]
        local = [self._files_of(block.parameters()) for block in blocks]
        for block, files, following in zip(blocks, local, [*local[1:], []], strict=True):
            block.register_forward_pre_hook(partial(_read_ahead, following), prepend=True)  # before FSDP gathers
            block.register_forward_hook(partial(_drop_pages, files))
        for parameter in part.parameters():  # once its gradient is reduced the backward pass no longer needs it
            parameter.register_post_accumulate_grad_hook(partial(_drop_pages, self._files_of([parameter])))

    def after_update(self, param: ShardedParameter, _start: int, _stop: int) -> None:
        """Drop the pages of a shard of which a part was updated."""
        file = self._files.get(_address(param.local))
        if file is not None:
            file.drop_pages()

    def drop_pages(self) -> None:
        """Drop the pages of all parameters, after these were read or written other than by a step."""
        _drop_pages([*self._files.values()])

    def _materialize_tensor(self, meta: Tensor) -> Tensor:
        """Materialize a meta tensor, once for tied parameters."""
        if id(meta) not in self._materialized:
            tensor = torch.empty_like(meta, device="cpu")
            if isinstance(tensor, DTensor) and tensor.to_local().numel():
                local = tensor.to_local()
                local.set_(self._map_file(tensor, local).view(local.shape))  # type: ignore[call-overload]
            self._materialized[id(meta)] = tensor
        return self._materialized[id(meta)]

    def _map_file(self, whole: DTensor, local: Tensor) -> Tensor:
        """Create the file of a shard and return its elements, flat, without padding."""
        (parts,) = (whole.device_mesh.size(i) for i, p in enumerate(whole.placements) if isinstance(p, Shard))
        padded = -(-whole.shape[0] // parts) * local[0].numel()
        path = self.folder / f"{len(self._files):05d}.bin"
        descriptor = open_scratch_file(path, padded * local.itemsize)
        pages = mmap.mmap(descriptor, padded * local.itemsize)
        os.close(descriptor)
        values = torch.frombuffer(pages, dtype=local.dtype)
        self._files[_address(values)] = _MappedFile(pages, values)
        return values[: local.numel()]

    def _files_of(self, parameters: Iterable[nn.Parameter]) -> list[_MappedFile]:
        """Return the files of the given parameters; none for a parameter whose shard on this rank is empty."""
        with torch.no_grad():
            shards = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
        return [self._files[_address(t)] for t in shards if _address(t) in self._files]


class _PadInFile(TorchDispatchMode):
    """Makes FSDP pad short shards inside their files instead of copying them to memory."""

    def __init__(self, files: dict[int, _MappedFile]) -> None:
        super().__init__()
        self.files = files

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is torch.ops.aten.new_zeros.default and _address(args[0]) in self.files:
            return self.files[_address(args[0])].values.view(args[1])
        return operation(*args, **(kwargs or {}))


def _read_ahead(files: Sequence[_MappedFile], *_: object) -> None:
    for file in files:
        file.read_ahead()


def _drop_pages(files: Sequence[_MappedFile], *_: object) -> None:
    for file in files:
        file.drop_pages()


def _address(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()
