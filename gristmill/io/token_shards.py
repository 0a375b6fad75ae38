"""Token shards in Megatron's indexed dataset format (`.bin` + `.idx`): writer, memory-mapped reader.

`NAME.bin` holds the tokens of all documents, concatenated. `NAME.idx` holds, little-endian:

    9 bytes   magic "MMIDIDX", two zero bytes
    u64       version, 1
    u8        dtype code: 8 = uint16, 4 = int32
    u64, u64  number of sequences S, length of the document index S + 1
    S × i32   tokens in each sequence
    S × i64   byte offset of each sequence in NAME.bin
    (S+1) × i64  document index: 0 … S, as each document is one sequence here

Megatron-LM, NeMo and GPT-NeoX read this format. `manifest.json` in the same folder records the tokenizer, and
each shard's documents, tokens, bytes and checksums.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Annotated, BinaryIO, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from gristmill.errors import InputError, UsageError, wrap_write_errors
from gristmill.io.files import reject_unfinished
from gristmill.storage.files import is_file, read_file
from gristmill.storage.local import atomic_write_bytes, flush_to_disk, unique_partial_path

MAGIC = b"MMIDIDX\x00\x00"
MANIFEST = "manifest.json"
REMEDY = "Restore the file from a copy, or run tokenize_corpus again"
IDX_HEADER = struct.Struct("<9sQBQQ")  # what precedes the lengths
_DTYPE_CODES: dict[int, np.dtype] = {4: np.dtype(np.int32), 8: np.dtype(np.uint16)}
_CODES = {dtype: code for code, dtype in _DTYPE_CODES.items()}
_UINT16_VOCABULARY = 65_500  # Megatron chooses uint16 below this size
_VERSIONS = (1, 2)  # of the manifest; 1 has no checksums of the .idx files
Count = Annotated[int, msgspec.Meta(ge=0)]


class TokenizerRecord(msgspec.Struct, forbid_unknown_fields=True):
    """The tokenizer of the shards. `path` is relative to the manifest's folder; `end_of_document` is a token id."""

    path: str
    sha256: str
    vocab_size: Count
    end_of_document: Annotated[int, msgspec.Meta(ge=-1)]  # -1: unknown, of an imported model


class ShardRecord(msgspec.Struct, forbid_unknown_fields=True):
    """One shard: documents, tokens (end-of-document included), UTF-8 bytes of text; SHA-256 of its .bin and .idx."""

    name: str
    documents: Count
    tokens: Count
    bytes: Count
    sha256: str
    idx_sha256: str = ""  # empty in manifests of version 1


class SourceRecord(msgspec.Struct, forbid_unknown_fields=True):
    """Documents, tokens and UTF-8 bytes of one source, summed over all shards."""

    documents: Count = 0
    tokens: Count = 0
    bytes: Count = 0


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """`manifest.json`: the tokenizer, the shards of one folder in order, and totals per source."""

    tokenizer: TokenizerRecord
    dtype: str
    shards: list[ShardRecord]
    sources: dict[str, SourceRecord]
    lossy_documents: int = 0  # documents with U+2581, which SentencePiece decodes as a space
    version: int = max(_VERSIONS)

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
        """Read `folder/manifest.json`. UsageError if there is none, InputError if it is damaged or unfinished."""
        reject_unfinished(folder)
        path = folder / MANIFEST
        if not is_file(path):
            raise UsageError(f"no token shards in {folder}: wanted {path}; make it with tokenize_corpus")
        try:
            with _read_errors(path):
                manifest = msgspec.json.decode(read_file(path), type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is damaged ({error}). {REMEDY}") from error
        if fault := manifest.fault():
            raise InputError(f"{path} is damaged: {fault}. {REMEDY}")
        return manifest

    def fault(self) -> str:
        """What contradicts itself in the manifest, with what was wanted; empty if nothing does."""
        tokenizer, names = self.tokenizer, [shard.name for shard in self.shards]
        if self.version not in _VERSIONS:
            return f"its version is {self.version}; wanted {' or '.join(map(str, _VERSIONS))}"
        if self.version > 1 and not all(shard.idx_sha256 for shard in self.shards):
            return "a shard has no idx_sha256; wanted the SHA-256 of its .idx"
        if not 0 <= tokenizer.end_of_document < tokenizer.vocab_size:
            return f"end_of_document is {tokenizer.end_of_document}; wanted an id from 0 to {tokenizer.vocab_size - 1}"
        if self.dtype != (wanted := token_dtype(tokenizer.vocab_size).name):
            return f"dtype is {self.dtype!r}; wanted {wanted!r} for a vocabulary of {tokenizer.vocab_size:,}"
        repeated = [name for name, count in Counter(names).items() if count > 1]
        return f"it names shard {repeated[0]!r} twice; wanted each once" if repeated else ""


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
        data = np.ascontiguousarray(ids, dtype=self.dtype).data
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
        with _read_errors(idx):
            index = idx.read_bytes()
        self.lengths = np.frombuffer(index, np.int32, documents, IDX_HEADER.size)
        self.offsets = np.frombuffer(index, np.int64, documents, IDX_HEADER.size + 4 * documents)
        if index != _idx_bytes(self.lengths, dtype):
            raise InputError(
                f"{idx} is damaged: its lengths and offsets disagree; wanted a sequence a document. {REMEDY}"
            )
        self.tokens = _memory_map(with_suffix(prefix, ".bin"), dtype)
        if len(self.tokens) != (wanted := int(self.lengths.sum(dtype=np.int64))) or self.lengths.min(initial=0) < 0:
            raise InputError(f"{prefix}.bin holds {len(self.tokens):,} tokens; its .idx wants {wanted:,}. {REMEDY}")

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
    found, wanted = (len(tokens), documents, dtype.name), (record.tokens, record.documents, manifest.dtype)
    if found != wanted:
        raise InputError(
            f"{path} and .idx hold {found[0]:,} tokens of {found[1]:,} documents as {found[2]}; {MANIFEST} wants "
            f"{wanted[0]:,} of {wanted[1]:,} as {wanted[2]}. They are damaged or of another run. {REMEDY}"
        )
    return tokens


def open_shards(folder: Path) -> tuple[Manifest, list[TokenShard]]:
    """Open a folder's manifest, and its shards in the manifest's order. Raises UsageError or InputError."""
    manifest = Manifest.load(folder)
    return manifest, [TokenShard(folder / record.name) for record in manifest.shards]


def with_suffix(prefix: Path, suffix: str) -> Path:
    """A file of the shard `prefix`: its .bin or .idx; the name of a shard may have dots itself."""
    return prefix.with_name(prefix.name + suffix)


def _read_header(path: Path) -> tuple[np.dtype, int]:
    """The dtype and the number of documents of an .idx file; raises InputError where its size does not fit them."""
    with _read_errors(path), path.open("rb") as file:
        head, size = file.read(IDX_HEADER.size), path.stat().st_size
    if len(head) < IDX_HEADER.size or not head.startswith(MAGIC):
        found = f"{size:,} bytes from {head[:9]!r} on; wanted {IDX_HEADER.size} or more, from {MAGIC!r} on"
        raise InputError(f"{path} is not a Megatron index: {found}. {REMEDY}")
    _, version, code, sequences, documents = IDX_HEADER.unpack(head)
    if version != 1 or code not in _DTYPE_CODES:
        raise InputError(f"{path} is damaged: version {version}, dtype {code}; wanted 1, and 8 or 4. {REMEDY}")
    wanted = IDX_HEADER.size + 12 * sequences + 8 * (sequences + 1)
    if documents != sequences + 1 or size != wanted:
        raise InputError(f"{path} is damaged: {size:,} bytes; wanted {wanted:,} for {sequences:,} documents. {REMEDY}")
    return _DTYPE_CODES[code], sequences


def _idx_bytes(lengths: NDArray[np.int32], dtype: np.dtype) -> bytes:
    """Contents of the .idx file for documents of these lengths, in tokens."""
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    pointers = np.concatenate([np.zeros(1, np.int64), ends])[: len(lengths)]
    documents = np.arange(len(lengths) + 1, dtype=np.int64)
    header = IDX_HEADER.pack(MAGIC, 1, _CODES[dtype], len(lengths), len(documents))
    return header + lengths.tobytes() + pointers.tobytes() + documents.tobytes()


def _memory_map(path: Path, dtype: np.dtype) -> NDArray[np.integer]:
    with _read_errors(path):
        size = path.stat().st_size
        if size % dtype.itemsize:
            raise InputError(f"{path} is damaged: {size:,} bytes; wanted {dtype.itemsize} a token. {REMEDY}")
        return np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)  # an empty file cannot be mapped


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} is not readable ({error.strerror}). {REMEDY}") from error
