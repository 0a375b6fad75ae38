"""Shuffle buckets: the intermediate files between the two passes of the shuffle, and their manifest.

Pass 1 writes a bucket file for each group of slices that a task reads. `NAME.jsonl.zst` holds the group's
documents grouped by the part of the output that they go to, one zstd frame for each part (more where the
writer's buffer filled up); any zstd tool reads it. `NAME.pile.arrow`, its index, has a row for each
document (shuffle position, holdout number, size) and in its metadata the frames. Pass 2 reads only the
frames of its own part from each file. `pass1.json`, the manifest, lists the bucket files.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import zstandard
from numpy.typing import NDArray

from gristmill.errors import InputError, UsageError, wrap_read_errors
from gristmill.io.files import atomic_write, atomic_write_bytes
from gristmill.io.writers import zstd_compressor

SUFFIX = ".jsonl.zst"
NOT_ELIGIBLE = 0xFFFFFFFFFFFFFFFF  # holdout number of a second or later copy, which is never held out
_INDEX_SUFFIX = ".pile.arrow"
_BUFFER_BYTES = 64 << 20


class BucketManifest(msgspec.Struct, forbid_unknown_fields=True):
    """The manifest `pass1.json`: the bucket files, for pass 2 to read, and the settings of pass 1."""

    parts: int  # number of parts that pass 2 writes
    seed: int
    bucket_files: dict[str, str] = msgspec.field(name="piles")  # path relative to the manifest's folder → source
    weights: dict[str, float]  # epochs of each source

    def save(self, path: Path) -> None:
        """Write pass1.json atomically."""
        atomic_write_bytes(path, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    @classmethod
    def load(cls, path: Path) -> "BucketManifest":
        """Read pass1.json; UsageError if there is none, InputError if it is damaged."""
        if not path.is_file():
            raise UsageError(f"{path.parent} holds no {path.name}: wanted the folder that pass1 wrote. Run pass1")
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is damaged ({error}): run pass1 again") from error


def manifest_path(folder: Path) -> Path:
    """Path of the manifest in the folder that pass 1 wrote."""
    return folder / "pass1.json"


class BucketDocument(NamedTuple):
    """One copy of a document in a bucket file."""

    line: bytes  # JSON, newline included
    order: int  # random number to sort its part by
    holdout: int  # random number to choose the holdout by, or NOT_ELIGIBLE
    size: int  # UTF-8 bytes of its text


class Frame(NamedTuple):
    """A zstd frame of a bucket file: documents of one part."""

    part: int
    offset: int  # bytes from the start of the file
    size: int  # compressed bytes
    documents: int
    first: int  # number of its first document in the file


@dataclass
class BucketWriter:
    """Groups documents by part in a buffer, and writes a zstd frame for each part when the buffer is full."""

    file: BinaryIO
    frames: list[Frame] = field(default_factory=list)
    columns: dict[str, list[int]] = field(default_factory=lambda: {"order": [], "holdout": [], "size": []})
    _buffer: dict[int, list[BucketDocument]] = field(default_factory=lambda: defaultdict(list))
    _buffered_bytes: int = 0

    def add(self, part: int, document: BucketDocument) -> None:
        """Buffer a document that goes to `part` of the output."""
        self._buffer[part].append(document)
        self._buffered_bytes += len(document.line)
        if self._buffered_bytes >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the buffer, in ascending order of parts."""
        for part in sorted(self._buffer):
            documents = self._buffer[part]
            data = zstd_compressor().compress(b"".join(document.line for document in documents))
            first = len(self.columns["order"])
            self.frames.append(Frame(part, self.file.tell(), len(data), len(documents), first))
            self.file.write(data)
            for name, values in self.columns.items():
                values.extend(getattr(document, name) for document in documents)
        self._buffer.clear()
        self._buffered_bytes = 0


@contextmanager
def write_bucket_file(path: Path, index: Path) -> Iterator[BucketWriter]:
    """Yield a writer; the bucket file and its index appear atomically when the block ends without an error."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        writer = BucketWriter(file)
        yield writer
        writer.flush()
    types = {"order": pa.uint64(), "holdout": pa.uint64(), "size": pa.int64()}
    schema = pa.schema(types, {"frames": msgspec.json.encode(writer.frames)})
    table = pa.table([pa.array(writer.columns[name], kind) for name, kind in types.items()], schema=schema)
    with atomic_write(index) as temporary, pa.ipc.new_file(str(temporary), table.schema) as columns:
        columns.write_table(table)


def index_path(path: Path) -> Path:
    """Path of a bucket file's index."""
    return path.with_name(path.name.removesuffix(SUFFIX) + _INDEX_SUFFIX)


@dataclass(frozen=True)
class BucketFile:
    """A bucket file open for reading: its frames, and the columns of its memory-mapped index (see BucketDocument)."""

    path: Path
    frames: list[Frame]
    order: NDArray[np.uint64]
    holdout: NDArray[np.uint64]
    size: NDArray[np.int64]

    @classmethod
    def open(cls, path: Path, index: Path) -> "BucketFile":
        """Memory-map the index of a bucket file; InputError if it is missing or damaged."""
        table, frames = _open_index(index)
        columns = {name: table.column(name).to_numpy() for name in ("order", "holdout", "size")}
        return cls(path, frames, **columns)

    def read_part(self, part: int) -> Iterator[BucketDocument]:
        """Every document of one part, in the order of the file. InputError if the file is damaged."""
        with wrap_read_errors(self.path), self.path.open("rb") as file:
            for frame in self.frames:
                if frame.part != part:
                    continue
                file.seek(frame.offset)
                lines = _decompress(self.path, file.read(frame.size))
                if len(lines) != frame.documents:
                    raise InputError(f"{self.path} is damaged: part {part} holds {len(lines)} documents, "
                                     f"wanted {frame.documents}. Run pass1 again")  # fmt: skip
                for i, line in enumerate(lines, frame.first):
                    yield BucketDocument(line, int(self.order[i]), int(self.holdout[i]), int(self.size[i]))


def read_holdout_numbers(index: Path) -> NDArray[np.uint64]:
    """The holdout number of each document of a bucket file; InputError if its index is missing or damaged."""
    return _open_index(index)[0].column("holdout").to_numpy()


def _open_index(path: Path) -> tuple[pa.Table, list[Frame]]:
    """Memory-map an index: its columns and its frames."""
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        return table, msgspec.json.decode(table.schema.metadata[b"frames"], type=list[Frame])
    except (pa.ArrowException, OSError, KeyError, msgspec.DecodeError) as error:
        raise InputError(f"{path} is not readable ({error}): run pass1 again") from error


def _decompress(path: Path, data: bytes) -> list[bytes]:
    try:
        text = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    except zstandard.ZstdError as error:
        raise InputError(f"{path} is damaged ({error}): run pass1 again") from error
    return [line + b"\n" for line in text.split(b"\n")[:-1]]
