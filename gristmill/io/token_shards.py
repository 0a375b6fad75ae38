"""Token shards in Megatron's indexed dataset format (`.bin` + `.idx`), the sources of their documents, their manifest.

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
is in `manifest.json` in the same folder, with documents, tokens, bytes and checksums of the shard. It also has the
tokenizer, and totals per source.
"""

import hashlib
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
from gristmill.storage.files import is_file, list_names, read_file
from gristmill.storage.local import atomic_write_bytes, flush_to_disk, sha256_file, unique_partial_path

MANIFEST = "manifest.json"
SOURCES = ".sources"
SHARD_SUFFIXES = (".bin", ".idx", SOURCES)  # of the files of a shard
REMEDY = "Restore the file from a copy, or run tokenize_corpus again"
_UINT16_VOCABULARY = 65_500  # Megatron chooses uint16 below this size
_VERSION = 3  # of the manifest
Count = Annotated[int, msgspec.Meta(ge=0)]
MAGIC = b"MMIDIDX\x00\x00"
IDX_HEADER = struct.Struct("<9sQBQQ")  # what precedes the lengths
_DTYPE_CODES: dict[int, np.dtype] = {4: np.dtype(np.int32), 8: np.dtype(np.uint16)}
_UINT16_SOURCES = 1 << 16
_CODES = {dtype: code for code, dtype in _DTYPE_CODES.items()}


class TokenizerRecord(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The tokenizer of the shards. `path` is relative to the manifest's folder; it and `sha256` are empty if unknown.

    `end_of_document` and `begin_of_document` are the ids that end and begin each document; -1: none, or, of an imported
    model, unknown.
    """

    path: str
    sha256: str
    vocab_size: Count
    end_of_document: Annotated[int, msgspec.Meta(ge=-1)]
    begin_of_document: Annotated[int, msgspec.Meta(ge=-1)] = -1


class ShardRecord(msgspec.Struct, forbid_unknown_fields=True):
    """One shard: documents, tokens (end-of-document included), UTF-8 bytes of text, 0 if unknown; SHA-256 of its files.

    `sources` are the names that the numbers in its .sources file stand for; without such a file (an empty
    `sources_sha256`) nothing is known of which document is of which source.
    """

    name: str
    documents: Count
    tokens: Count
    bytes: Count
    sha256: str
    idx_sha256: str = ""
    sources: list[str] = []
    sources_sha256: str = ""


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
    version: int = _VERSION

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """Return a hash of the shards' checksums: it names the data set, wherever its folder lies."""
        checksums = [shard.sha256 for shard in self.shards]
        return hashlib.sha256(msgspec.json.encode(checksums)).hexdigest()[:16]

    @property
    def source_names(self) -> list[str]:
        """Return the sources of the documents; none where a shard with documents does not say which are of which."""
        names = set[str]()
        for shard in self.shards:
            if shard.documents and not shard.sources_sha256:
                return []
            names.update(shard.sources)
        return sorted(names)

    def save(self, folder: Path) -> None:
        """Write `folder/manifest.json` atomically."""
        atomic_write_bytes(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Read `folder/manifest.json`. UsageError if there is none, InputError if it is damaged or unfinished."""
        reject_unfinished(folder)
        path = folder / MANIFEST
        if not is_file(path):
            folders_within = [folder / name for name in sorted(list_names(folder))]
            with_shards = [str(inner) for inner in folders_within if is_file(inner / MANIFEST)]
            hint = "make them with gristmill run, or gristmill tokenize"
            if with_shards:
                hint = f"try {' or '.join(with_shards)}"
            raise UsageError(f"no token shards in {folder}: expected {path}; {hint}")
        try:
            with read_errors(path):
                manifest = msgspec.json.decode(read_file(path), type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is damaged ({error}). {REMEDY}") from error
        fault = manifest.fault()
        if fault:
            raise InputError(f"{path} is damaged: {fault}. {REMEDY}")
        return manifest

    def fault(self) -> str:
        """Return what contradicts itself in the manifest, with what was expected; empty if nothing does."""
        if self.version != _VERSION:
            return f"its version is {self.version}; expected {_VERSION}"
        if not all(shard.idx_sha256 for shard in self.shards):
            return "a shard has no idx_sha256; expected the SHA-256 of its .idx"
        for shard in self.shards:
            for name in shard.sources:
                if name not in self.sources:
                    return f"a shard has documents of {name!r}; expected one of its sources: {', '.join(self.sources)}"
        of_sources = sum(record.tokens for record in self.sources.values())
        if self.source_names and of_sources != self.tokens:
            return f"its sources have {of_sources:,} tokens; expected {self.tokens:,}, those of its shards"
        return self._fault_of_ids() or self._fault_of_names()

    def _fault_of_ids(self) -> str:
        """Return what contradicts itself in the vocabulary, the ids that end or begin documents, and the dtype."""
        tokenizer = self.tokenizer
        special = max(tokenizer.end_of_document, tokenizer.begin_of_document)
        if special >= tokenizer.vocab_size:
            ids = f"0 to {tokenizer.vocab_size - 1}"
            return f"a document ends or begins with {special}; expected an id from {ids}, or -1"
        if not holds_ids(self.dtype, tokenizer.vocab_size):
            expected = token_dtype(tokenizer.vocab_size).name
            return f"dtype is {self.dtype!r}; expected {expected!r} for a vocabulary of {tokenizer.vocab_size:,}"
        return ""

    def _fault_of_names(self) -> str:
        counts = Counter(shard.name for shard in self.shards)
        for name, count in counts.items():
            if count > 1:
                return f"it names shard {name!r} twice; expected each once"
        return ""


def token_dtype(vocab_size: int) -> np.dtype:
    """Return uint16 for vocabularies below 65,500 ids, else int32, as Megatron chooses."""
    return np.dtype(np.uint16 if vocab_size < _UINT16_VOCABULARY else np.int32)


def holds_ids(dtype: str, vocab_size: int) -> bool:
    """Return whether shards may be of this dtype: one that an .idx can name, and that holds all ids."""
    dtypes = {known.name: known for known in _CODES}
    return dtype in dtypes and vocab_size <= np.iinfo(dtypes[dtype]).max + 1


def with_suffix(prefix: Path, suffix: str) -> Path:
    """Return a file of the shard `prefix`: its .bin, .idx or .sources; the name of a shard may have dots itself."""
    return prefix.with_name(prefix.name + suffix)


def shard_files(prefix: Path, suffixes: Sequence[str] = SHARD_SUFFIXES) -> tuple[Path, ...]:
    """Return the files of the shard `prefix`, the .bin first."""
    return tuple(with_suffix(prefix, suffix) for suffix in suffixes)


def verify_checksums(folder: Path, record: ShardRecord) -> None:
    """Read one shard and raise InputError where the SHA-256 of one of its files is not the recorded one."""
    expected_of = {".bin": record.sha256, ".idx": record.idx_sha256, SOURCES: record.sources_sha256}
    for suffix, expected in expected_of.items():
        path = with_suffix(folder / record.name, suffix)
        with read_errors(path):
            actual = sha256_file(path) if expected else ""
        if actual != expected:
            raise InputError(
                f"{path} is damaged or from another run: its SHA-256 is {actual[:12]}…, and {MANIFEST} says "
                f"{expected[:12]}…. {REMEDY}"
            )


def require_known_ids(tokens: NDArray[np.integer], manifest: Manifest, prefix: Path) -> None:
    """Raise InputError where an id is not of the tokenizer; `prefix` is the shard they were read from."""
    size = manifest.tokenizer.vocab_size
    smallest = int(tokens.min(initial=0))
    largest = int(tokens.max(initial=0))
    if smallest < 0 or largest >= size:
        wrong = smallest if smallest < 0 else largest
        raise InputError(f"{prefix}.bin is damaged: it holds id {wrong}; expected ids from 0 to {size - 1}. {REMEDY}")


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of reading `path` into an InputError that says how to get the file back."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} is not readable ({error.strerror}). {REMEDY}") from error


@dataclass
class TokenShardWriter:
    """Writer of one shard, PREFIX.bin and PREFIX.idx; published when the `with` block ends without an error.

    >>> import tempfile
    >>> from gristmill.io.token_shards import token_dtype
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
        """Append one document from parts of its ids, one in memory at a time; nothing at an error. Return its size."""
        length = 0
        digest = self._digest.copy()
        try:
            for ids in parts:
                self._write(ids)
                length += len(ids)
                del ids  # before the next are made
        except BaseException:
            with wrap_write_errors(self._bin):
                self._file.seek(-length * self.dtype.itemsize, os.SEEK_CUR)
                self._file.truncate()
            self._digest = digest
            raise
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
            index = idx_bytes(np.array(self.lengths, dtype=np.int32), self.dtype)
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
        self.prefix = prefix
        idx = with_suffix(prefix, ".idx")
        dtype, documents = _read_header(idx)
        with read_errors(idx):
            index = idx.read_bytes()
        self.lengths = np.frombuffer(index, np.int32, documents, IDX_HEADER.size)
        self.offsets = np.frombuffer(index, np.int64, documents, IDX_HEADER.size + 4 * documents)
        if index != idx_bytes(self.lengths, dtype):
            raise InputError(
                f"{idx} is damaged: its lengths and offsets disagree; expected a sequence a document. {REMEDY}"
            )
        self.tokens = _memory_map(with_suffix(prefix, ".bin"), dtype)
        expected = int(self.lengths.sum(dtype=np.int64))
        if len(self.tokens) != expected or self.lengths.min(initial=0) < 0:
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

    Raises InputError where its size, documents or dtype differ from the manifest's.
    """
    dtype, documents = _read_header(with_suffix(folder / record.name, ".idx"))
    path = with_suffix(folder / record.name, ".bin")
    tokens = _memory_map(path, dtype)
    if (len(tokens), documents, dtype.name) != (record.tokens, record.documents, manifest.dtype):
        raise InputError(
            f"{path} and .idx hold {len(tokens):,} tokens of {documents:,} documents as {dtype.name}; {MANIFEST} says "
            f"{record.tokens:,} of {record.documents:,} as {manifest.dtype}. They are damaged or from another run. "
            f"{REMEDY}"
        )
    return tokens


def write_sources(prefix: Path, numbers: NDArray[np.integer], names: list[str]) -> str:
    """Write PREFIX.sources, atomically: for each document the number of its source in `names`. Return its SHA-256."""
    data = np.ascontiguousarray(numbers, _sources_dtype(names)).tobytes()
    atomic_write_bytes(with_suffix(prefix, SOURCES), data)
    return hashlib.sha256(data).hexdigest()


def read_sources(folder: Path, record: ShardRecord) -> NDArray[np.integer]:
    """Return the number in `record.sources` of each document's source (documents). InputError where they do not fit."""
    path = with_suffix(folder / record.name, SOURCES)
    with read_errors(path):
        data = path.read_bytes()
    dtype = _sources_dtype(record.sources)
    expected = record.documents * dtype.itemsize
    if len(data) != expected:
        raise InputError(f"{path} is damaged: {len(data):,} bytes; expected {expected:,} for its documents. {REMEDY}")
    numbers = np.frombuffer(data, dtype)
    if numbers.max(initial=0) >= max(1, len(record.sources)):
        raise InputError(f"{path} is damaged: number {numbers.max()}; expected below {len(record.sources)}. {REMEDY}")
    return numbers


def _sources_dtype(names: list[str]) -> np.dtype:
    return np.dtype("<u2" if len(names) <= _UINT16_SOURCES else "<u4")


def open_shards(folder: Path | str) -> tuple[Manifest, list[TokenShard]]:
    """Open a folder's manifest, and its shards in the manifest's order. Raises UsageError or InputError."""
    folder = Path(folder)
    manifest = Manifest.load(folder)
    return manifest, [TokenShard(folder / record.name) for record in manifest.shards]


def _read_header(path: Path) -> tuple[np.dtype, int]:
    """Return the dtype and the number of documents of an .idx file.

    Raises InputError where its size does not fit them.
    """
    with read_errors(path), path.open("rb") as file:
        head = file.read(IDX_HEADER.size)
        size = path.stat().st_size
    if len(head) < IDX_HEADER.size or not head.startswith(MAGIC):
        reason = f"{size:,} bytes from {head[:9]!r} on; expected {IDX_HEADER.size} or more, from {MAGIC!r} on"
        raise InputError(f"{path} is not a Megatron index: {reason}. {REMEDY}")
    _, version, code, sequences, documents = IDX_HEADER.unpack(head)
    if version != 1 or code not in _DTYPE_CODES:
        raise InputError(f"{path} is damaged: version {version}, dtype {code}; expected 1, and 8 or 4. {REMEDY}")
    expected = IDX_HEADER.size + 12 * sequences + 8 * (sequences + 1)
    if documents != sequences + 1 or size != expected:
        reason = f"{size:,} bytes; expected {expected:,} for {sequences:,} documents"
        raise InputError(f"{path} is damaged: {reason}. {REMEDY}")
    return _DTYPE_CODES[code], sequences


def idx_bytes(lengths: NDArray[np.int32], dtype: np.dtype) -> bytes:
    """Return the contents of the .idx file for documents of these lengths, in tokens."""
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    pointers = np.concatenate([np.zeros(1, np.int64), ends])[: len(lengths)]
    documents = np.arange(len(lengths) + 1, dtype=np.int64)
    header = IDX_HEADER.pack(MAGIC, 1, _CODES[dtype], len(lengths), len(documents))
    return header + lengths.tobytes() + pointers.tobytes() + documents.tobytes()


def _memory_map(path: Path, dtype: np.dtype) -> NDArray[np.integer]:
    with read_errors(path):
        size = path.stat().st_size
        if size % dtype.itemsize:
            raise InputError(f"{path} is damaged: {size:,} bytes; expected {dtype.itemsize} per token. {REMEDY}")
        return np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)  # an empty file cannot be mapped
