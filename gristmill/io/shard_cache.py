"""Token shards in a bucket, read through copies of their blocks on this machine, which all its processes share.

The small files of a folder (.idx, .sources, the tokenizer) are copied whole, and compared with their checksums. Of the
.bin files ranges are fetched as they are read: the blocks at the beginning of the folder, up to a limit of bytes, are
kept in sparse files; what is beyond is fetched anew each time. Nothing that was kept is replaced: a run reads each
sequence once an epoch, so that another choice of blocks would be found as often. A byte per block says whether it is
there; it is set after the block was written. Copies of an earlier boot of the machine, which a power cut may have
damaged, are not used.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill.errors import InputError, wrap_write_errors
from gristmill.io.token_masks import MASK, MASKS
from gristmill.io.token_shards import MANIFEST, REMEDY, SOURCES, Manifest, ShardRecord, with_suffix
from gristmill.io.tokenizer_companions import copies_in
from gristmill.paths import spell_urls
from gristmill.storage.files import FileInfo, is_file, list_folder, read_file, resolved
from gristmill.storage.local import atomic_write_bytes, locked
from gristmill.storage.stores import remote_store_of

BLOCK_BYTES = 1 << 20
_REQUESTS = 16  # at a time, of a process
_VERIFIED = 8 << 20  # bytes that are hashed together
_KEPT = "blocks"  # file with a byte for each block of all shards: 1 if it is there
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAME = "gristmill-tokens"  # in the folder for temporary files


@dataclass(frozen=True)
class CacheOptions:
    """Where copies of tokens in buckets are, and how many bytes they may take; 0: half of what is free there."""

    folder: Path | None = None
    size: int = 0

    @property
    def root(self) -> Path:
        """Return the folder of all copies."""
        return self.folder or Path(tempfile.gettempdir()) / _NAME


class TokenRange(NamedTuple):
    """Tokens `start` to `stop` of a shard."""

    shard: int
    start: int
    stop: int


class ShardCache:
    """The shards of a folder in a bucket; `local` is the folder of this machine that has its small files.

    `kept_bytes` are the bytes of the .bin files, from the first on, whose blocks are kept.
    """

    def __init__(self, folder: Path, manifest: Manifest, options: CacheOptions, reserved: int = 0) -> None:
        """`reserved` bytes of the options' size are other folders'. Raises InputError where files are not as recorded.

        Raises OutputError where copies cannot be written.
        """
        self.folder = folder
        self.manifest = manifest
        self.itemsize = np.dtype(manifest.dtype).itemsize
        name = hashlib.sha256(str(resolved(folder)).encode()).hexdigest()[:16]
        self.local = options.root / name
        sizes = [shard.tokens * self.itemsize for shard in manifest.shards]
        blocks = [-(-size // BLOCK_BYTES) for size in sizes]
        self._first_blocks = np.concatenate([[0], np.cumsum(blocks, dtype=np.int64)])
        self._files = self._list_shards(sizes)
        with locked(options.root / f"{name}.lock"), wrap_write_errors(self.local):
            self._prepare()
            limit = options.size or (_free_bytes(options.root) + _taken_bytes(self.local)) // 2
        self.kept_bytes = min(sum(sizes), max(0, limit - reserved))
        self._kept_blocks = self.kept_bytes // BLOCK_BYTES
        if self.kept_bytes == sum(sizes):
            self._kept_blocks = int(self._first_blocks[-1])
        self._is_kept = np.memmap(self.local / _KEPT, np.uint8, "r+", shape=(max(1, int(self._first_blocks[-1])),))

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_REQUESTS, "token shards")

    def read(self, ranges: Sequence[TokenRange]) -> list[NDArray[np.integer]]:
        """Return the tokens of ranges, which are fetched several at a time. Raises InputError or StorageError."""
        if len(ranges) == 1 or all(self._has(part) for part in ranges):
            return [self._read(part) for part in ranges]
        return list(self._pool.map(self._read, ranges))

    def verify(self, record: ShardRecord) -> None:
        """Read a shard and raise InputError where its SHA-256 is not the recorded one; its copy is dropped then."""
        shard = self.manifest.shards.index(record)
        digest = hashlib.sha256()
        step = _VERIFIED // self.itemsize
        for start in range(0, record.tokens, step):
            tokens = self._read(TokenRange(shard, start, min(start + step, record.tokens)))
            digest.update(tokens.tobytes())
        if digest.hexdigest() != record.sha256:
            self._is_kept[self._first_blocks[shard] : self._first_blocks[shard + 1]] = 0
            raise InputError(
                f"{self._path(shard)} is damaged or from another run: its SHA-256 is {digest.hexdigest()[:12]}…, and "
                f"{MANIFEST} says {record.sha256[:12]}…. Run the same command again, which fetches it again; if that "
                f"does not help: {REMEDY}"
            )

    def _path(self, shard: int) -> Path:
        return with_suffix(self.folder / self.manifest.shards[shard].name, ".bin")

    def _has(self, part: TokenRange) -> bool:
        """Return whether nothing of a range has to be fetched."""
        return bool(self._is_kept[self._blocks(part)].all())

    def _blocks(self, part: TokenRange) -> slice:
        """Return the blocks of a range, counted over all shards."""
        first = int(self._first_blocks[part.shard])
        begin = part.start * self.itemsize // BLOCK_BYTES
        end = -(-part.stop * self.itemsize // BLOCK_BYTES)
        return slice(first + begin, first + end)

    def _read(self, part: TokenRange) -> NDArray[np.integer]:
        blocks = self._blocks(part)
        start = part.start * self.itemsize
        size = part.stop * self.itemsize - start
        if blocks.stop > self._kept_blocks:
            data = self._fetch(part.shard, start, start + size)
        else:
            self._keep(part.shard, blocks)
            with self._copy(part.shard).open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), size, start)
        if len(data) != size:
            raise InputError(f"{self._path(part.shard)} ended after {start + len(data):,} bytes. {REMEDY}")
        return np.frombuffer(data, self.manifest.dtype)

    def _keep(self, shard: int, blocks: slice) -> None:
        """Fetch the missing ones of some blocks of a shard, runs of them at once."""
        first = int(self._first_blocks[shard])
        end = self._files[shard].size
        missing = [block for block in range(blocks.start, blocks.stop) if not self._is_kept[block]]
        for _, run in groupby(enumerate(missing), key=lambda pair: pair[1] - pair[0]):
            numbers = [block for _, block in run]
            start = (numbers[0] - first) * BLOCK_BYTES
            stop = min(end, (numbers[-1] + 1 - first) * BLOCK_BYTES)
            data = self._fetch(shard, start, stop)
            with wrap_write_errors(self.local), self._copy(shard).open("r+b", buffering=0) as file:
                os.pwrite(file.fileno(), data, start)
            self._is_kept[numbers[0] : numbers[-1] + 1] = 1

    def _copy(self, shard: int) -> Path:
        return self.local / f"{shard:06d}.part"

    def _fetch(self, shard: int, start: int, stop: int) -> bytes:
        """Return bytes of a .bin file, of the version that it had when the folder was opened."""
        path = self._path(shard)
        chunks = remote_store_of(path).chunks(path, start, stop)
        chunks.info = self._files[shard]
        try:
            return b"".join(chunks)
        except FileNotFoundError as error:
            raise InputError(f"{path} is gone. {REMEDY}") from error

    def _list_shards(self, sizes: Sequence[int]) -> list[FileInfo]:
        """Return the versions of the .bin files. Raises InputError where one is missing or has another size."""
        listed = list_folder(self.folder)
        files = []
        for shard, size in enumerate(sizes):
            path = self._path(shard)
            info = listed.get(path.name)
            if info is None or info.size != size:
                state = "is missing"
                if info is not None:
                    state = f"has {info.size:,} bytes"
                raise InputError(f"{path} {state}; {MANIFEST} says {size:,} bytes. {REMEDY}")
            files.append(info)
        return files

    def _prepare(self) -> None:
        """Make the local folder what it should be: of this version of the shards, and of this boot of the machine."""
        manifest = read_file(self.folder / MANIFEST)
        boot = _BOOT.read_text() if _BOOT.is_file() else ""
        key = hashlib.sha256(manifest + boot.encode() + repr(self._files).encode()).hexdigest()
        mark = self.local / "ready"
        if mark.is_file() and mark.read_text() == key:
            return
        shutil.rmtree(self.local, ignore_errors=True)
        self.local.mkdir(parents=True)
        for record in self.manifest.shards:
            for suffix, expected in ((".idx", record.idx_sha256), (SOURCES, record.sources_sha256)):
                self._copy_small_file(with_suffix(self.folder / record.name, suffix), expected)
        if is_file(self.folder / MASKS):
            atomic_write_bytes(self.local / MASKS, read_file(self.folder / MASKS))
            for record in self.manifest.shards:
                self._copy_small_file(with_suffix(self.folder / record.name, MASK), "")
        for path, copy in self._tokenizer_files():
            atomic_write_bytes(copy, read_file(path))
        for shard, info in enumerate(self._files):
            with self._copy(shard).open("wb") as file:
                file.truncate(info.size)
        with (self.local / _KEPT).open("wb") as file:
            file.truncate(max(1, int(self._first_blocks[-1])))
        atomic_write_bytes(self.local / MANIFEST, manifest)
        atomic_write_bytes(mark, key.encode())

    def _copy_small_file(self, path: Path, expected: str) -> None:
        """Copy a small file of a shard; one without a checksum need not be there."""
        if not expected and not is_file(path):
            return
        try:
            data = read_file(path)
        except FileNotFoundError as error:
            raise InputError(f"{path} is missing. {REMEDY}") from error
        digest = hashlib.sha256(data).hexdigest()
        if expected and digest != expected:
            raise InputError(
                f"{path} is damaged or from another run: its SHA-256 is {digest[:12]}…, and {MANIFEST} says "
                f"{expected[:12]}…. {REMEDY}"
            )
        atomic_write_bytes(self.local / path.name, data)

    def _tokenizer_files(self) -> Iterator[tuple[Path, Path]]:
        """Yield the files of the tokenizer, if it is there, each with the path of its copy."""
        record = self.manifest.tokenizer
        if not record.path:
            return
        for path in dict.fromkeys((resolved(self.folder / record.path), self.folder / Path(record.path).name)):
            if is_file(path):
                yield from copies_in(self.local, path).items()
                return


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _taken_bytes(folder: Path) -> int:
    """Return what sparse files take."""
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.part"))


def describe_cache(cache: ShardCache) -> str:
    """Return a line for a run's log: which part of a folder is kept on this machine."""
    size = sum(shard.tokens for shard in cache.manifest.shards) * cache.itemsize
    share = cache.kept_bytes / size if size else 1.0
    return spell_urls(f"{cache.folder}: {share:.0%} of {size / 1e9:,.2f} GB is kept in {cache.local} as it is read")
