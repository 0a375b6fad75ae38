"""Storage of AdamW's moments: on the device, in CPU memory, or on disk with a few buckets in memory at a time.

On disk, the next bucket is read and the previous one written while a bucket is updated, as in ZeRO-Infinity
(Rajbhandari et al. 2021, section 5.2.2).
"""

import os
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from gristmill.errors import OutputError, wrap_read_errors, wrap_write_errors
from training.memory.scratch_files import make_scratch_folder, open_scratch_file, remove_scratch_folder
from training.optim.flat_buckets import BUCKETS_IN_FLIGHT, Bucket, InPlace

STATES = ("exp_avg", "exp_avg_sq")  # first and second moment, named as in torch.optim.AdamW


class MomentsInMemory(InPlace):
    """Moments on the device or in CPU memory, pinned there if the machine has a GPU; methods as of `MomentsOnDisk`."""

    def __init__(self, total: int, buckets: list[Bucket], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cpu" and torch.cuda.is_available()
        self.flat = {name: torch.zeros(total, dtype=dtype, device=device, pin_memory=pinned) for name in STATES}
        self.slices = [tuple(bucket.split(flat[bucket.start :]) for flat in self.flat.values()) for bucket in buckets]

    def get(self, index: int) -> tuple[list[Tensor], ...]:
        return self.slices[index]

    def flat_states(self) -> dict[str, Tensor]:
        return self.flat

    def close(self) -> None:
        self.flat = {}
        self.slices = []


class MomentsOnDisk:
    """Moments in two files, with BUCKETS_IN_FLIGHT buckets in memory: one thread reads ahead, another writes behind.

    The files are scratch files: allocated at the start (OutputError if the disk is full, or another run uses them),
    removed by `close`.
    """

    def __init__(self, folder: Path, total: int, buckets: list[Bucket], dtype: torch.dtype) -> None:
        self.folder = folder
        self.total = total
        self.buckets = buckets
        self.dtype = dtype
        self.paths = {name: folder / f"{name}.bin" for name in STATES}
        self.files: dict[str, int] = {}
        self.reader = ThreadPoolExecutor(1, "read ahead")
        self.writer = ThreadPoolExecutor(1, "write behind")
        pools = (self.reader, self.writer)
        self.close = weakref.finalize(self, _close, folder, make_scratch_folder(folder), self.files, pools)
        try:
            for name, path in self.paths.items():
                self.files[name] = open_scratch_file(path, total * dtype.itemsize)
        except OutputError:
            self.close()  # the disk is full: leave nothing on it
            raise
        longest = max((bucket.numel for bucket in buckets), default=0)
        self.slots = [
            tuple(torch.empty(longest, dtype=dtype) for _ in STATES)
            for _ in range(min(BUCKETS_IN_FLIGHT, len(buckets)))
        ]
        self.reads: dict[int, Future[None]] = {}
        self.writes: dict[int, Future[None]] = {}

    def prefetch(self, index: int) -> None:
        """Start to read a bucket; called once for each, in order."""
        self.reads[index] = self.reader.submit(self._read, index, self.writes.pop(index - len(self.slots), None))

    def get(self, index: int) -> tuple[list[Tensor], ...]:
        """Return both moments of the bucket's slices, flat, to be updated in place; waits for the read."""
        self.reads.pop(index).result()
        return tuple(self.buckets[index].split(flat) for flat in self._slot(index))

    def write_back(self, index: int) -> None:
        """Start to write a bucket that was updated."""
        self.writes[index] = self.writer.submit(self._write, index)

    def finish(self) -> None:
        """Wait for all writes."""
        for index in list(self.writes):
            self.writes.pop(index).result()

    def flat_states(self) -> dict[str, Tensor]:
        """Return both moments of all parameters, by name: flat buffers, laid out by `plan_buckets`.

        Here memory-mapped.
        """
        return {name: _map(path, self.total, self.dtype) for name, path in self.paths.items()}

    def _slot(self, index: int) -> tuple[Tensor, ...]:
        return tuple(values[: self.buckets[index].numel] for values in self.slots[index % len(self.slots)])

    def _read(self, index: int, write: Future[None] | None) -> None:
        """Read a bucket into its slot, after `write`: the pending write of the slot's previous bucket."""
        if write is not None:
            write.result()
        offset = self.buckets[index].start * self.dtype.itemsize
        for name, values in zip(STATES, self._slot(index), strict=True):
            with wrap_read_errors(self.paths[name]):
                _read_at(self.files[name], _bytes(values), offset)

    def _write(self, index: int) -> None:
        offset = self.buckets[index].start * self.dtype.itemsize
        for name, values in zip(STATES, self._slot(index), strict=True):
            with wrap_write_errors(self.paths[name]):
                _write_at(self.files[name], _bytes(values), offset)


def _map(path: Path, length: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(str(path), shared=True, size=length, dtype=dtype) if length else torch.empty(0, dtype=dtype)


def _bytes(values: Tensor) -> memoryview:
    return memoryview(values.numpy()).cast("B")  # type: ignore[arg-type]


def _read_at(file: int, buffer: memoryview, offset: int) -> None:
    """Fill `buffer` from byte `offset`."""
    done = 0
    while done < len(buffer):
        if not (count := os.preadv(file, [buffer[done:]], offset + done)):
            raise OSError("the file is shorter than what was written to it")
        done += count


def _write_at(file: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)


def _close(folder: Path, lock: int, files: dict[str, int], pools: Iterable[ThreadPoolExecutor]) -> None:
    for pool in pools:
        pool.shutdown()
    remove_scratch_folder(folder, lock, files.values())
