"""Token shards in Megatron's indexed dataset format (`.bin` + `.idx`), and the sources of their documents.

`NAME.bin` holds the tokens of all documents, concatenated. `NAME.idx` holds, little-endian:

    9 bytes   magic "MMIDIDX", two zero bytes
    u64       version, 1
    u8        dtype code: 8 = uint16, 4 = int32
    u64, u64  number of sequences S, length of the document index S + 1
    S × i32   tokens in each sequence
    S × i64   byte offset of each sequence in NAME.bin
    (S+1) × i64  document index: 0 … S, as each document is one sequence here

Megatron-LM, NeMo and GPT-NeoX read this format. `NAME.sources`, which is ours, holds the number of each document's
source as u16, or as u32 for more than 65,536 sources: its place among the `sources` of the shard's record. That record
is in `manifest.json` in the same folder (token_manifest.py), with documents, tokens, bytes and checksums of the shard.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from gristmill.errors import InputError, wrap_write_errors
from gristmill.io.token_manifest import (
    MANIFEST,
    REMEDY,
    SOURCES,
    Manifest,
    ShardRecord,
    read_errors,
    with_suffix,
)
from gristmill.storage.local import atomic_write_bytes, flush_to_disk, unique_partial_path

MAGIC = b"MMIDIDX\x00\x00"
IDX_HEADER = struct.Struct("<9sQBQQ")  # what precedes the lengths
_DTYPE_CODES: dict[int, np.dtype] = {4: np.dtype(np.int32), 8: np.dtype(np.uint16)}
_UINT16_SOURCES = 1 << 16
_CODES = {dtype: code for code, dtype in _DTYPE_CODES.items()}


@dataclass
class TokenShardWriter:
    """Writer of one shard, PREFIX.bin and PREFIX.idx; published when the `with` block ends without an error.

    >>> import tempfile
    >>> from gristmill.io.token_manifest import token_dtype
    >>> prefix = Path(tempfile.mkdtemp()) / "shard"
    >>> with TokenShardWriter(prefix, token_dtype(100)) as shard:
    ...     shard.add([5, 6, 7])
    ...     shard.add([8])
    >>> TokenShard(prefix)[0].tolist(), TokenShard(prefix).tokens.tolist()
    ([5, 6, 7], [5, 6, 7, 8])
    """

    prefix: Path
    dtype: np.dtype
    lengths: list[int] = field(default_factory=list)
    sha256: str = ""  # of the .bin, once it is published
    idx_sha256: str = ""

    def __enter__(self) -> Self:
        self._partial = unique_partial_path(self._bin)
        with wrap_write_errors(self._bin):
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self._partial.open("wb")
        self._digest = hashlib.sha256()
        return self

    def add(self, ids: NDArray[np.integer] | list[int]) -> None:
        """Append one document's ids, end-of-document included."""
        self.add_all(ids, [len(ids)])

    def add_all(self, ids: NDArray[np.integer] | list[int], lengths: list[int]) -> None:
        """Append several documents: their ids, concatenated, and the number of ids of each."""
        assert sum(lengths) == len(ids)
        self._write(ids)
        self.lengths += lengths

    def add_parts(self, parts: Iterable[NDArray[np.integer]]) -> int:
        """Append one document, whose ids come in parts, of which one at a time is in memory; return their number."""
        length = 0
        for ids in parts:
            self._write(ids)
            length += len(ids)
            del ids  # before the next are made
        self.lengths.append(length)
        return length

    def _write(self, ids: NDArray[np.integer] | list[int]) -> None:
        data = np.ascontiguousarray(ids, dtype=self.dtype).data
        with wrap_write_errors(self._bin):
            self._file.write(data)
        self._digest.update(data)

    def __exit__(self, kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        try:
            with wrap_write_errors(self._bin):
                self._file.close()
                if kind is None:
                    flush_to_disk(self._partial)
                    self._partial.replace(self._bin)
        finally:
            self._partial.unlink(missing_ok=True)
        if kind is None:
            self.sha256 = self._digest.hexdigest()
            index = _idx_bytes(np.array(self.lengths, dtype=np.int32), self.dtype)
            self.idx_sha256 = hashlib.sha256(index).hexdigest()
            atomic_write_bytes(with_suffix(self.prefix, ".idx"), index)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def _bin(self) -> Path:
        return with_suffix(self.prefix, ".bin")


class TokenShard:
    """A memory-mapped shard: `shard[i]` is the ids of document i, `shard.tokens` the ids of all documents (n).

    Raises InputError if the index or the .bin is damaged, or they disagree.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix, idx = prefix, with_suffix(prefix, ".idx")
        dtype, documents = _read_header(idx)
        with read_errors(idx):
            index = idx.read_bytes()
        self.lengths = np.frombuffer(index, np.int32, documents, IDX_HEADER.size)
        self.offsets = np.frombuffer(index, np.int64, documents, IDX_HEADER.size + 4 * documents)
        if index != _idx_bytes(self.lengths, dtype):
            raise InputError(
                f"{idx} is damaged: its lengths and offsets disagree; expected a sequence a document. {REMEDY}"
            )
        self.tokens = _memory_map(with_suffix(prefix, ".bin"), dtype)
        if len(self.tokens) != (expected := int(self.lengths.sum(dtype=np.int64))) or self.lengths.min(initial=0) < 0:
            raise InputError(f"{prefix}.bin holds {len(self.tokens):,} tokens; its .idx says {expected:,}. {REMEDY}")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> NDArray[np.integer]:
        start = int(self.offsets[i]) // self.tokens.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[i])]

    def __iter__(self) -> Iterator[NDArray[np.integer]]:
        return (self[i] for i in range(len(self)))


def map_shard(folder: Path, manifest: Manifest, record: ShardRecord) -> NDArray[np.integer]:
    """Memory-map the ids of one shard's documents: (n,). Of its .idx only the header is read.

    Raises InputError where its size, documents or dtype are not those of the manifest.
    """
    dtype, documents = _read_header(with_suffix(folder / record.name, ".idx"))
    path = with_suffix(folder / record.name, ".bin")
    tokens = _memory_map(path, dtype)
    found, expected = (len(tokens), documents, dtype.name), (record.tokens, record.documents, manifest.dtype)
    if found != expected:
        raise InputError(
            f"{path} and .idx hold {found[0]:,} tokens of {found[1]:,} documents as {found[2]}; {MANIFEST} says "
            f"{expected[0]:,} of {expected[1]:,} as {expected[2]}. They are damaged or of another run. {REMEDY}"
        )
    return tokens


def write_sources(prefix: Path, numbers: NDArray[np.integer], names: list[str]) -> str:
    """Write PREFIX.sources, atomically: for each document the number of its source in `names`. Return its SHA-256."""
    data = np.ascontiguousarray(numbers, _sources_dtype(names)).tobytes()
    atomic_write_bytes(with_suffix(prefix, SOURCES), data)
    return hashlib.sha256(data).hexdigest()


def read_sources(folder: Path, record: ShardRecord) -> NDArray[np.integer]:
    """The number in `record.sources` of each document's source: (documents,). InputError where they do not fit."""
    path = with_suffix(folder / record.name, SOURCES)
    with read_errors(path):
        data = path.read_bytes()
    dtype = _sources_dtype(record.sources)
    if len(data) != (expected := record.documents * dtype.itemsize):
        raise InputError(f"{path} is damaged: {len(data):,} bytes; expected {expected:,} for its documents. {REMEDY}")
    numbers = np.frombuffer(data, dtype)
    if numbers.max(initial=0) >= max(1, len(record.sources)):
        raise InputError(f"{path} is damaged: number {numbers.max()}; expected below {len(record.sources)}. {REMEDY}")
    return numbers


def _sources_dtype(names: list[str]) -> np.dtype:
    return np.dtype("<u2" if len(names) <= _UINT16_SOURCES else "<u4")


def open_shards(folder: Path) -> tuple[Manifest, list[TokenShard]]:
    """Open a folder's manifest, and its shards in the manifest's order. Raises UsageError or InputError."""
    manifest = Manifest.load(folder)
    return manifest, [TokenShard(folder / record.name) for record in manifest.shards]


def _read_header(path: Path) -> tuple[np.dtype, int]:
    """The dtype and the number of documents of an .idx file; raises InputError where its size does not fit them."""
    with read_errors(path), path.open("rb") as file:
        head, size = file.read(IDX_HEADER.size), path.stat().st_size
    if len(head) < IDX_HEADER.size or not head.startswith(MAGIC):
        found = f"{size:,} bytes from {head[:9]!r} on; expected {IDX_HEADER.size} or more, from {MAGIC!r} on"
        raise InputError(f"{path} is not a Megatron index: {found}. {REMEDY}")
    _, version, code, sequences, documents = IDX_HEADER.unpack(head)
    if version != 1 or code not in _DTYPE_CODES:
        raise InputError(f"{path} is damaged: version {version}, dtype {code}; expected 1, and 8 or 4. {REMEDY}")
    expected = IDX_HEADER.size + 12 * sequences + 8 * (sequences + 1)
    if documents != sequences + 1 or size != expected:
        raise InputError(
            f"{path} is damaged: {size:,} bytes; expected {expected:,} for {sequences:,} documents. {REMEDY}"
        )
    return _DTYPE_CODES[code], sequences


def _idx_bytes(lengths: NDArray[np.int32], dtype: np.dtype) -> bytes:
    """Contents of the .idx file for documents of these lengths, in tokens."""
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    pointers = np.concatenate([np.zeros(1, np.int64), ends])[: len(lengths)]
    documents = np.arange(len(lengths) + 1, dtype=np.int64)
    header = IDX_HEADER.pack(MAGIC, 1, _CODES[dtype], len(lengths), len(documents))
    return header + lengths.tobytes() + pointers.tobytes() + documents.tobytes()


def _memory_map(path: Path, dtype: np.dtype) -> NDArray[np.integer]:
    with read_errors(path):
        size = path.stat().st_size
        if size % dtype.itemsize:
            raise InputError(f"{path} is damaged: {size:,} bytes; expected {dtype.itemsize} a token. {REMEDY}")
        return np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)  # an empty file cannot be mapped
