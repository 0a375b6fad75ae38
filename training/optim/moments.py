"""Where AdamW's states are: on the device, in the machine's memory, or in files of which a few buckets are in memory.

While a bucket is updated, the next is read and the one before is written (Rajbhandari et al. 2021,
"ZeRO-Infinity", section 5.2.2).
"""

import os
import shutil
import weakref
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from gristmill.errors import InputError, reading, writing
from training.memory.scratch_files import scratch_file, scratch_folder
from training.optim.flat_buckets import SLOTS, Bucket

STATES = ("exp_avg", "exp_avg_sq")


class Moments(Protocol):
    """Both states of every bucket. A bucket is begun, taken, changed in place, put; at the end all is finished.

    What is taken are the two states of the bucket's cuts, flat.
    """

    @property
    def memory_bytes(self) -> int: ...
    def begin(self, number: int) -> None: ...
    def take(self, number: int) -> tuple[list[Tensor], ...]: ...
    def put(self, number: int) -> None: ...
    def finish(self) -> None: ...
    def whole(self) -> dict[str, Tensor]: ...
    def renew(self) -> None: ...
    def close(self) -> None: ...


class MomentsInMemory:
    """On the device, or on the CPU: pinned there if a GPU is to copy from it."""

    def __init__(self, total: int, buckets: list[Bucket], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cpu" and torch.cuda.is_available()
        self.flat = {name: torch.zeros(total, dtype=dtype, device=device, pin_memory=pinned) for name in STATES}
        self.cuts = [tuple(bucket.divide(row[bucket.start :]) for row in self.flat.values()) for bucket in buckets]

    @property
    def memory_bytes(self) -> int:
        return sum(values.nbytes for values in self.flat.values())

    def begin(self, number: int) -> None:
        pass

    def take(self, number: int) -> tuple[list[Tensor], ...]:
        return self.cuts[number]

    def put(self, number: int) -> None:
        pass

    def finish(self) -> None:
        pass

    def whole(self) -> dict[str, Tensor]:
        return self.flat

    def renew(self) -> None:
        pass

    def close(self) -> None:
        self.flat, self.cuts = {}, []


class MomentsOnDisk:
    """In two files, of which SLOTS buckets are in memory: one thread reads ahead, another writes behind.

    Every bucket's CRC-32 is kept in memory, and compared when the bucket is read. The files are scratch:
    room for them is taken at the start (OutputError where there is none), and given back by `close`.
    """

    def __init__(self, folder: Path, total: int, buckets: list[Bucket], dtype: torch.dtype) -> None:
        self.folder, self.total, self.buckets, self.dtype = folder, total, buckets, dtype
        self.paths = {name: folder / f"{name}.bin" for name in STATES}
        self.sums: dict[str, list[int | None]] = {name: [None] * len(buckets) for name in STATES}
        scratch_folder(folder)
        self.files = {name: scratch_file(path, total * dtype.itemsize) for name, path in self.paths.items()}
        longest = max((bucket.length for bucket in buckets), default=0)
        self.slots = [tuple(torch.empty(longest, dtype=dtype) for _ in STATES) for _ in range(min(SLOTS, len(buckets)))]
        self.reader, self.writer = ThreadPoolExecutor(1, "read ahead"), ThreadPoolExecutor(1, "write behind")
        self.reads: dict[int, Future[None]] = {}
        self.writes: dict[int, Future[None]] = {}
        self.close = weakref.finalize(self, _close, folder, list(self.files.values()), [self.reader, self.writer])

    @property
    def memory_bytes(self) -> int:
        return sum(values.nbytes for slot in self.slots for values in slot)

    def begin(self, number: int) -> None:
        self.reads[number] = self.reader.submit(self._read, number, self.writes.pop(number - len(self.slots), None))

    def take(self, number: int) -> tuple[list[Tensor], ...]:
        self.reads.pop(number).result()
        return tuple(self.buckets[number].divide(row) for row in self._slot(number))

    def put(self, number: int) -> None:
        self.writes[number] = self.writer.submit(self._write, number)

    def finish(self) -> None:
        for number in list(self.writes):
            self.writes.pop(number).result()

    def whole(self) -> dict[str, Tensor]:
        """The states, mapped; compared with their sums first, as a checkpoint must not take what is damaged."""
        for number in range(len(self.buckets)):
            self._read(number, None)
        return {name: _map(path, self.total, self.dtype) for name, path in self.paths.items()}

    def renew(self) -> None:
        """Take the files as they are."""
        self.sums = {name: [None] * len(self.buckets) for name in STATES}
        for number in range(len(self.buckets)):
            self._read(number, None)
            for name, values in zip(STATES, self._slot(number), strict=True):
                self.sums[name][number] = zlib.crc32(_bytes(values))

    def _slot(self, number: int) -> tuple[Tensor, ...]:
        return tuple(values[: self.buckets[number].length] for values in self.slots[number % len(self.slots)])

    def _read(self, number: int, before: Future[None] | None) -> None:
        """Fill the bucket's slot, when what it held `before` is written."""
        if before is not None:
            before.result()
        at = self.buckets[number].start * self.dtype.itemsize
        for name, values in zip(STATES, self._slot(number), strict=True):
            path, room, wanted = self.paths[name], _bytes(values), self.sums[name][number]
            with reading(path):
                whole = _read_at(self.files[name], room, at)
            if not whole or wanted not in (None, zlib.crc32(room)):
                raise InputError(
                    f"{path}: bytes {at} to {at + len(room)} are not what was written there, so this run's optimizer "
                    "states are lost. Run the same command again, it goes on from the last checkpoint; if it happens "
                    "again, mistrust that disk and choose another with --memory.folder"
                )

    def _write(self, number: int) -> None:
        at = self.buckets[number].start * self.dtype.itemsize
        for name, values in zip(STATES, self._slot(number), strict=True):
            data = _bytes(values)
            self.sums[name][number] = zlib.crc32(data)
            with writing(self.paths[name]):
                _write_at(self.files[name], data, at)


def _map(path: Path, length: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(str(path), shared=True, size=length, dtype=dtype) if length else torch.empty(0, dtype=dtype)


def _bytes(values: Tensor) -> memoryview:
    return memoryview(values.numpy()).cast("B")  # type: ignore[arg-type]


def _read_at(file: int, room: memoryview, at: int) -> bool:
    done = 0
    while done < len(room):
        count = os.preadv(file, [room[done:]], at + done)
        if not count:
            return False
        done += count
    return True


def _write_at(file: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], at + done)


def _close(folder: Path, files: list[int], pools: list[ThreadPoolExecutor]) -> None:
    for pool in pools:
        pool.shutdown()
    for file in files:
        os.close(file)
    shutil.rmtree(folder, ignore_errors=True)
