"""Token shards in Megatron's indexed dataset format (`.bin` + `.idx`): writer, memory-mapped reader, check.

`NAME.bin` holds the tokens of all documents, concatenated. `NAME.idx` holds, little-endian:

    9 bytes   magic "MMIDIDX", two zero bytes
    u64       version, 1
    u8        dtype code: 8 = uint16, 4 = int32
    u64, u64  number of sequences S, length of the document index S + 1
    S × i32   tokens in each sequence
    S × i64   byte offset of each sequence in NAME.bin
    (S+1) × i64  document index: 0 … S, as each document is one sequence here

Megatron-LM, NeMo and GPT-NeoX read this format. `manifest.json` in the same folder records the tokenizer, and
each shard's documents, tokens, bytes and checksum.
"""

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from gristmill.errors import InputError, UsageError, wrap_write_errors
from gristmill.io.files import atomic_write_bytes, flush_to_disk, sha256_file, unique_partial_path

MAGIC = b"MMIDIDX\x00\x00"
MANIFEST = "manifest.json"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPE_CODES: dict[int, np.dtype] = {4: np.dtype(np.int32), 8: np.dtype(np.uint16)}
_CODES = {dtype: code for code, dtype in _DTYPE_CODES.items()}
_UINT16_VOCABULARY = 65_500  # Megatron chooses uint16 below this size


class TokenizerRecord(msgspec.Struct, forbid_unknown_fields=True):
    """The tokenizer of the shards. `path` is relative to the manifest's folder; `end_of_document` is a token id."""

    path: str
    sha256: str
    vocab_size: int
    end_of_document: int


class ShardRecord(msgspec.Struct, forbid_unknown_fields=True):
    """One shard: documents, tokens (end-of-document included), UTF-8 bytes of text, and SHA-256 of its .bin."""

    name: str
    documents: int
    tokens: int
    bytes: int
    sha256: str


class SourceRecord(msgspec.Struct, forbid_unknown_fields=True):
    """Documents, tokens and UTF-8 bytes of one source, summed over all shards."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """`manifest.json`: the tokenizer, the shards of one folder in order, and totals per source."""

    tokenizer: TokenizerRecord
    dtype: str
    shards: list[ShardRecord]
    sources: dict[str, SourceRecord]
    lossy_documents: int = 0  # documents with U+2581, which SentencePiece decodes as a space
    version: int = 1

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    def save(self, folder: Path) -> None:
        """Write `folder/manifest.json` atomically."""
        atomic_write_bytes(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Read `folder/manifest.json`. Raises UsageError if there is none, InputError if it is damaged."""
        path = folder / MANIFEST
        if not path.is_file():
            raise UsageError(f"no token shards in {folder}: wanted {path}; make it with tokenize_corpus")
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is damaged ({error}): run tokenize_corpus again") from error


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 for vocabularies below 65,500 ids, else int32, as Megatron chooses."""
    return np.dtype(np.uint16) if vocab_size < _UINT16_VOCABULARY else np.dtype(np.int32)


@dataclass
class TokenShardWriter:
    """Writer of one shard, PREFIX.bin and PREFIX.idx; published when the `with` block ends without an error.

    >>> import tempfile
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
    sha256: str = ""

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
        data = np.asarray(ids, dtype=self.dtype).tobytes()
        with wrap_write_errors(self._bin):
            self._file.write(data)
        self._digest.update(data)
        self.lengths += lengths

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
            atomic_write_bytes(self.prefix.with_name(self.prefix.name + ".idx"), index)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def _bin(self) -> Path:
        return self.prefix.with_name(self.prefix.name + ".bin")


class TokenShard:
    """A memory-mapped shard: `shard[i]` is the ids of document i, `shard.tokens` the ids of all documents (n).

    Raises InputError if the index or the .bin is damaged, or they disagree.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        index = _read_bytes(prefix.with_name(prefix.name + ".idx"))
        if len(index) < _HEADER.size or not index.startswith(MAGIC):
            raise InputError(f"{prefix}.idx is not a Megatron index: run tokenize_corpus again")
        _, _, code, sequences, documents = _HEADER.unpack_from(index)
        if code not in _DTYPE_CODES or len(index) != _HEADER.size + 12 * sequences + 8 * documents:
            raise InputError(
                f"{prefix}.idx is damaged, or its dtype is neither uint16 nor int32: run tokenize_corpus again"
            )
        self.lengths = np.frombuffer(index, np.int32, sequences, _HEADER.size)
        self.offsets = np.frombuffer(index, np.int64, sequences, _HEADER.size + 4 * sequences)
        if index != _idx_bytes(self.lengths, _DTYPE_CODES[code]):
            raise InputError(
                f"{prefix}.idx is damaged, or has documents of several sequences: run tokenize_corpus again"
            )
        self.tokens = _memory_map(prefix.with_name(prefix.name + ".bin"), _DTYPE_CODES[code])
        if len(self.tokens) != int(self.lengths.sum()):
            raise InputError(f"{prefix}.bin and .idx disagree on the number of tokens: run tokenize_corpus again")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> NDArray[np.integer]:
        start = int(self.offsets[i]) // self.tokens.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[i])]

    def __iter__(self) -> Iterator[NDArray[np.integer]]:
        return (self[i] for i in range(len(self)))


def open_shards(folder: Path) -> tuple[Manifest, list[TokenShard]]:
    """Open a folder's manifest, and its shards in the manifest's order. Raises UsageError or InputError."""
    manifest = Manifest.load(folder)
    return manifest, [TokenShard(folder / record.name) for record in manifest.shards]


def verify_shards(folder: Path) -> Manifest:
    """Check every shard of a folder against its manifest: checksum, documents, tokens, end-of-document ids.

    Raises InputError that names the first shard that differs.
    """
    manifest, shards = open_shards(folder)
    for record, shard in zip(manifest.shards, shards, strict=True):
        bin_path = folder / f"{record.name}.bin"
        found = (len(shard), len(shard.tokens), sha256_file(bin_path))
        last = shard.tokens[np.cumsum(shard.lengths, dtype=np.int64) - 1]
        ended = bool((last == manifest.tokenizer.end_of_document).all())
        if found != (record.documents, record.tokens, record.sha256) or not ended:
            raise InputError(f"{bin_path} differs from its record in {MANIFEST}: run tokenize_corpus again")
    return manifest


def _idx_bytes(lengths: NDArray[np.int32], dtype: np.dtype) -> bytes:
    """Contents of the .idx file for documents of these lengths, in tokens."""
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    pointers = np.concatenate([np.zeros(1, np.int64), ends])[: len(lengths)]
    documents = np.arange(len(lengths) + 1, dtype=np.int64)
    header = _HEADER.pack(MAGIC, 1, _CODES[dtype], len(lengths), len(documents))
    return header + lengths.tobytes() + pointers.tobytes() + documents.tobytes()


def _memory_map(path: Path, dtype: np.dtype) -> NDArray[np.integer]:
    try:
        size = path.stat().st_size
        return np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)  # an empty file cannot be mapped
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not readable ({error}): run tokenize_corpus again") from error


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} is not readable ({error}): run tokenize_corpus again") from error
