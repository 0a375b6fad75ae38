"""ZeRO-3's parameters in files: mapped, so that the system reads what is used and writes what has changed."""

import mmap
import os
import shutil
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from gristmill.errors import InputError
from training.memory.memory_config import Place
from training.memory.scratch_files import scratch_file, scratch_folder
from training.sharding.sharded_parameter import ShardedParameter


def offload_policy(place: Place) -> OffloadPolicy:
    """What to hand to `fully_shard`: where FSDP is to keep the parameters it has divided, and their gradients.

    Pinning wants a GPU, and memory that is not a file's.
    """
    if place == "device":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=place == "cpu" and torch.cuda.is_available())


@dataclass
class _File:
    """A parameter's rows of this process, and the padding that FSDP gives them."""

    path: Path
    pages: mmap.mmap
    values: Tensor
    """All of it, flat; the first `length` elements are the parameter's."""
    length: int
    running: int = 0
    sum: int | None = None
    """CRC-32 of the parameter's elements; None where it is not known."""
    checked: bool = False

    def crc(self, start: int, stop: int, before: int = 0) -> int:
        return zlib.crc32(memoryview(self.values[start:stop].numpy()).cast("B"), before)  # type: ignore[arg-type]

    def let_go(self) -> None:
        """Take no memory until it is used again; what has changed is the system's to write."""
        self.pages.madvise(mmap.MADV_DONTNEED)

    def read_ahead(self) -> None:
        self.pages.madvise(mmap.MADV_WILLNEED)


class ParametersOnDisk:
    """The files that parts' parameters are in, one a parameter; their pages are let go when they have been used.

    A parameter's CRC-32 is taken while it is updated, and compared before its next use in a forward pass
    (the reads of the backward pass and of the update are not covered). The files are scratch, and removed
    by `close`.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder / f"rank-{rank:05d}-parameters"
        scratch_folder(self.folder)
        self._files: dict[int, _File] = {}  # by address
        self._made: dict[int, Tensor] = {}  # by the parameter it stands for
        self.close = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def materialize(self, part: nn.Module) -> None:
        """Give a part that `fully_shard` divided on the meta device its memory: to_empty's place.

        Raises OutputError where the disk has no room.
        """
        with _SharedPadding(self._files):
            part._apply(self._empty)
        self._made.clear()
        blocks = list(part.blocks.children())  # type: ignore[union-attr]
        own = [self._of(block.parameters()) for block in blocks]
        inside = {id(file) for files in own for file in files}
        outside = [file for file in self._of(part.parameters()) if id(file) not in inside]
        _before(part, partial(self._check, outside))
        for block, files, following in zip(blocks, own, [*own[1:], []], strict=True):
            _before(block, partial(self._check, files, following))
            _after(block, partial(_let_go, files))
        for parameter in part.parameters():
            parameter.register_post_accumulate_grad_hook(partial(_let_go_of, self._of([parameter])))

    def updated(self, weight: ShardedParameter, start: int, stop: int) -> None:
        """To be called when elements start … stop of a weight are, the earlier ones having been before them."""
        file = self._files.get(_address(weight.local))
        if file is not None:
            file.running = file.crc(start, stop, file.running if start else 0)
            file.sum, file.checked = (file.running, False) if stop == file.length else (None, False)
            file.let_go()

    def loaded(self) -> None:
        """To be called when parameters were written otherwise: take them as they are."""
        for file in self._files.values():
            file.sum = None
            file.let_go()

    def check(self) -> None:
        """Raise InputError if a parameter is not what it was updated to: before they are saved."""
        for file in self._files.values():
            self._check([file])
            file.let_go()

    def _empty(self, t: Tensor) -> Tensor:
        """What takes the place of a tensor on the meta device; a tied one is met twice."""
        if id(t) not in self._made:
            made = torch.empty_like(t, device="cpu")
            if isinstance(made, DTensor) and made.to_local().numel():
                local = made.to_local()
                local.set_(self._file(made, local).view(local.shape))  # type: ignore[call-overload]
            self._made[id(t)] = made
        return self._made[id(t)]

    def _file(self, whole: DTensor, local: Tensor) -> Tensor:
        (parts,) = (whole.device_mesh.size(i) for i, p in enumerate(whole.placements) if isinstance(p, Shard))
        padded = -(-whole.shape[0] // parts) * local[0].numel()
        path = self.folder / f"{len(self._files):05d}.bin"
        descriptor = scratch_file(path, padded * local.itemsize)
        pages = mmap.mmap(descriptor, padded * local.itemsize)
        os.close(descriptor)
        values = torch.frombuffer(pages, dtype=local.dtype)
        self._files[_address(values)] = _File(path, pages, values, local.numel())
        return values[: local.numel()]

    def _of(self, parameters: Iterable[nn.Parameter]) -> list[_File]:
        with torch.no_grad():
            locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
        return [self._files[_address(t)] for t in locals_ if _address(t) in self._files]

    def _check(self, files: Sequence[_File], following: Sequence[_File] = ()) -> None:
        for file in following:
            file.read_ahead()
        for file in files:
            if file.sum is not None and not file.checked and file.crc(0, file.length) != file.sum:
                raise InputError(
                    f"{file.path} is not what was written there: this run's parameters are lost. Run the same command "
                    "again, it goes on from the last checkpoint; if it happens again, mistrust that disk and choose "
                    "another with --memory.folder"
                )
            file.checked = True


class _SharedPadding(TorchDispatchMode):
    """FSDP copies rows that are fewer than other processes' into a padded tensor: let that be the file, too."""

    def __init__(self, files: dict[int, _File]) -> None:
        super().__init__()
        self.files = files

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is torch.ops.aten.new_zeros.default and _address(args[0]) in self.files:
            return self.files[_address(args[0])].values.view(args[1])
        return operation(*args, **(kwargs or {}))


def _before(module: nn.Module, action: Callable[[], None]) -> None:
    module.register_forward_pre_hook(lambda *_: action(), prepend=True)  # before FSDP gathers


def _after(module: nn.Module, action: Callable[[], None]) -> None:
    module.register_forward_hook(lambda *_: action())


def _let_go(files: Sequence[_File]) -> None:
    for file in files:
        file.let_go()


def _let_go_of(files: Sequence[_File], _: Tensor) -> None:
    """After a parameter was gathered for the backward pass, and its gradient reduced."""
    _let_go(files)


def _address(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()
