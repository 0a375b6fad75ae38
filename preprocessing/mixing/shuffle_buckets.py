"""Piles: the files between the two passes of the shuffle, one for each file read, divided into parts.

`NAME.jsonl.zst` holds the documents that go on, part by part, one zstd frame for each part (more
where it was flushed in between); any zstd tool reads it. `NAME.pile.arrow` says for each of its
documents the part, its place in the shuffle, its draw for the holdout and its size, and in its
metadata where each frame stands. So pass 2 reads only its own part of each file.
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

from gristmill.errors import InputError, reading
from gristmill.io.files import atomic_write
from gristmill.io.writers import zstd_compressor

SUFFIX = ".jsonl.zst"
INDEX = ".pile.arrow"
FLUSH_BYTES = 64 << 20


class Frame(NamedTuple):
    """A zstd frame: its part, where it begins, its compressed size, its documents and the first one's number."""

    part: int
    offset: int
    size: int
    documents: int
    first: int


class Member(NamedTuple):
    """A document on its way: its JSON line, and its draws."""

    line: bytes
    order: int
    holdout: int
    size: int


@dataclass
class PileWriter:
    """Collects documents by part, and writes them a frame a part."""

    file: BinaryIO
    waiting: dict[int, list[Member]] = field(default_factory=lambda: defaultdict(list))
    frames: list[Frame] = field(default_factory=list)
    columns: dict[str, list[int]] = field(default_factory=lambda: {"order": [], "holdout": [], "size": []})
    pending: int = 0

    def add(self, part: int, member: Member) -> None:
        self.waiting[part].append(member)
        self.pending += len(member.line)
        if self.pending >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits, in the order of parts."""
        for part in sorted(self.waiting):
            members = self.waiting[part]
            data = zstd_compressor().compress(b"".join(member.line for member in members))
            self.frames.append(Frame(part, self.file.tell(), len(data), len(members), len(self.columns["order"])))
            self.file.write(data)
            for name, values in self.columns.items():
                values.extend(getattr(member, name) for member in members)
        self.waiting.clear()
        self.pending = 0


@contextmanager
def write_pile(path: Path) -> Iterator[PileWriter]:
    """Yield a writer; the pile and its index appear when the block ends well."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        pile = PileWriter(file)
        yield pile
        pile.flush()
    types = {"order": pa.uint64(), "holdout": pa.uint64(), "size": pa.int64()}
    schema = pa.schema(types, {"frames": msgspec.json.encode(pile.frames)})
    table = pa.table([pa.array(pile.columns[name], kind) for name, kind in types.items()], schema=schema)
    with atomic_write(index_path(path)) as temporary, pa.ipc.new_file(str(temporary), table.schema) as writer:
        writer.write_table(table)


def index_path(path: Path) -> Path:
    """The index of a pile."""
    return path.with_name(path.name.removesuffix(SUFFIX) + INDEX)


@dataclass(frozen=True)
class Pile:
    """An index, memory-mapped: draws and sizes of all documents of a pile, and its frames."""

    path: Path
    frames: list[Frame]
    order: NDArray[np.uint64]
    holdout: NDArray[np.uint64]
    size: NDArray[np.int64]

    def read_part(self, part: int) -> Iterator[tuple[bytes, int]]:
        """(line, number in the pile) of every document of a part. InputError if the pile is damaged."""
        with reading(self.path), self.path.open("rb") as file:
            for frame in self.frames:
                if frame.part != part:
                    continue
                file.seek(frame.offset)
                lines = _decompress(self.path, file.read(frame.size))
                if len(lines) != frame.documents:
                    raise InputError(f"{self.path} is damaged: part {part} holds {len(lines)} documents, "
                                     f"wanted {frame.documents}. Run pass1 again")  # fmt: skip
                yield from zip(lines, range(frame.first, frame.first + frame.documents), strict=True)


def open_pile(path: Path) -> Pile:
    """Map the index of a pile; InputError if it is damaged."""
    try:
        table = pa.ipc.open_file(pa.memory_map(str(index_path(path)))).read_all()
        frames = msgspec.json.decode(table.schema.metadata[b"frames"], type=list[Frame])
    except (pa.ArrowException, OSError, KeyError, msgspec.DecodeError) as error:
        raise InputError(f"{index_path(path)} is not readable ({error}): run pass1 again") from error
    columns = {name: table.column(name).to_numpy() for name in ("order", "holdout", "size")}
    return Pile(path, frames, **columns)


def _decompress(path: Path, data: bytes) -> list[bytes]:
    try:
        text = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    except zstandard.ZstdError as error:
        raise InputError(f"{path} is damaged ({error}): run pass1 again") from error
    return [line + b"\n" for line in text.split(b"\n")[:-1]]
