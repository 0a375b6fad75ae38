"""Signature shards: Arrow IPC files of row numbers and signatures, with the sketch's parameters in the metadata."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.ipc
from numpy.typing import NDArray

from dedup.minhash.matching_form import Unit
from dedup.minhash.schemes import Hash
from dedup.minhash.signatures import Sketch
from gristmill.errors import InputError, UsageError
from gristmill.io.files import list_finished
from gristmill.storage.files import HIDDEN
from gristmill.storage.local import atomic_write

Signatures = tuple[NDArray[np.int64], NDArray[np.uint32]]  # of one batch: rows (n), signatures (n × permutations)
SUFFIX = ".signatures.arrow"
MAX_ROWS = 1 << 40  # of a corpus file
_BUFFER_BYTES = 64 << 10  # written at once
SMALL_BYTES = 64 << 10  # of a shard that is read at once: pyarrow's readers of files take three times as long


class ShardHeader(msgspec.Struct, forbid_unknown_fields=True):
    """Metadata of a shard: the corpus file its rows belong to, and the sketch's parameters."""

    file: str
    hash: Hash
    seed: int
    permutations: Annotated[int, msgspec.Meta(ge=1)]
    unit: Unit
    width: int

    @classmethod
    def of(cls, file: str, sketch: Sketch) -> Self:
        """Return the header of a shard of `file`, with signatures made with `sketch`."""
        return cls(file, sketch.hash, sketch.seed, sketch.permutations, sketch.unit, sketch.width)

    @property
    def sketch(self) -> Sketch:
        """Return the sketch that signatures were made with."""
        return Sketch(self.hash, self.width, self.permutations, self.seed, self.unit)

    def describe(self) -> str:
        """Return the sketch's parameters in words, for messages; equal for shards that can be compared."""
        return (
            f"{self.hash} hashes of {self.width}-{self.unit} shingles, "
            f"{self.permutations} permutations, seed {self.seed}"
        )


@dataclass(frozen=True)
class OpenShard:
    """A shard that has been read, or mapped into memory if it is large."""

    path: Path
    header: ShardHeader
    batches: tuple[pa.RecordBatch, ...]

    def __len__(self) -> int:
        return sum(batch.num_rows for batch in self.batches)

    def rows(self) -> NDArray[np.int64]:
        """Return the rows of signed documents in the corpus file (documents, int64). InputError unless they ascend."""
        parts = [np.empty(0, np.int64)]
        for rows, _ in check_batches(self.path, self.batches):
            parts.append(rows)
        return np.concatenate(parts)

    def signatures(self) -> Iterator[NDArray[np.uint32]]:
        """Yield signatures batch by batch (documents × permutations, uint32), without a copy."""
        for _, values in check_batches(self.path, self.batches):
            yield values


@contextmanager
def write_shard(path: Path, file: str, sketch: Sketch) -> Iterator["ShardWriter"]:
    """Yield a writer of batches; the shard is published when the block ends without an error.

    `file` is the name of the corpus file within its corpus.
    """
    header = ShardHeader.of(file, sketch)
    signature = pa.list_(pa.uint32(), sketch.permutations)
    schema = pa.schema({"row": pa.int64(), "signature": signature}, {"gristmill": msgspec.json.encode(header)})
    with (
        atomic_write(path) as temporary,
        pa.output_stream(str(temporary), compression=None, buffer_size=_BUFFER_BYTES) as file,
        pa.ipc.new_file(file, schema) as writer,
    ):
        yield ShardWriter(writer, schema)


@dataclass(frozen=True)
class ShardWriter:
    """Appends batches to a shard."""

    writer: pa.ipc.RecordBatchFileWriter
    schema: pa.Schema

    def add(self, rows: Sequence[int] | NDArray[np.int64], signatures: NDArray[np.uint32]) -> None:
        """Append a batch: rows (n), signatures (n × permutations)."""
        flat = pa.array(signatures.reshape(-1), pa.uint32())
        column = pa.FixedSizeListArray.from_arrays(flat, signatures.shape[1])
        self.writer.write_batch(pa.record_batch([pa.array(rows, pa.int64()), column], schema=self.schema))


def open_shard(path: Path) -> OpenShard:
    """Memory-map a shard, or read a small one. InputError if it is damaged or not a signature shard."""
    with _damage_reported(path):
        is_small = path.stat().st_size <= SMALL_BYTES
        source = pa.BufferReader(path.read_bytes()) if is_small else pa.memory_map(str(path))
        file = pa.ipc.open_file(source)
        header = msgspec.json.decode((file.schema.metadata or {})[b"gristmill"], type=ShardHeader)
        _check_types(file.schema, header)
        batches = tuple(map(file.get_batch, range(file.num_record_batches)))
        return OpenShard(path, header, batches)


@contextmanager
def _damage_reported(path: Path) -> Iterator[None]:
    """Turn what cannot be read in a shard into an InputError."""
    try:
        yield
    except (pa.ArrowException, OSError, KeyError, ValueError, msgspec.DecodeError) as error:
        raise InputError(f"{path} is not a readable signature shard ({error}): run to_hash again") from error


def check_batches(path: Path, batches: Iterable[pa.RecordBatch], end: int = MAX_ROWS) -> Iterator[Signatures]:
    """Yield the rows (n) and signatures (n × permutations) of each batch of a shard.

    InputError unless rows ascend from 0 and stay below `end`: kernels index arrays by them, unchecked.
    """
    last = -1
    with _damage_reported(path):
        for batch in batches:
            batch.validate(full=True)
            row = batch.column("row")
            signature = batch.column("signature")
            slots = signature.flatten()
            if row.null_count or signature.null_count or slots.null_count:
                raise ValueError("it has nulls")
            rows = row.to_numpy()
            if len(rows):
                if rows[0] <= last or rows[-1] >= end or not (rows[1:] > rows[:-1]).all():
                    raise ValueError(f"its rows do not ascend from 0 to less than {end:,}")
                last = int(rows[-1])
            yield rows, slots.to_numpy().reshape(len(rows), signature.type.list_size)


def _check_types(schema: pa.Schema, header: ShardHeader) -> None:
    """Raise ValueError unless the columns are as write_shard writes them."""
    expected = {"row": pa.int64(), "signature": pa.list_(pa.uint32(), header.permutations)}
    actual = {name: schema.field(name).type for name in expected}
    if actual != expected:
        raise ValueError(f"it holds {_in_words(actual)}: expected {_in_words(expected)}")


def _in_words(types: Mapping[str, pa.DataType]) -> str:
    return ", ".join(f"{name}: {kind}" for name, kind in types.items())


def shard_paths(folder: Path) -> list[Path]:
    """Return all shards below a folder, in name order. UsageError if there is none.

    InputError if to_hash has not finished, or one is no regular file, such as a dangling link.
    """
    files = list_finished(folder, "the folder that to_hash wrote to")
    visible = [file for file in files if file.reason != HIDDEN]
    shards = sorted(file for file in visible if file.path.name.endswith(SUFFIX))
    if not shards:
        raise UsageError(f"{folder} holds no signature shard (*{SUFFIX}): run to_hash first")
    for shard in shards:
        if shard.reason:
            raise InputError(f"{shard.path} is a dangling link or not a regular file: remove it, or run to_hash again")
    return [shard.path for shard in shards]


def shards_named(folder: Path, files: Collection[str]) -> list[Path]:
    """Return the shards below a folder, of all sources or of one, whose names are those of corpus files."""
    names = set[str]()
    for file in files:
        folders = file.split("/")
        for start in range(len(folders)):  # names below a source, or below all sources
            names.add("/".join(folders[start:]))
    paths = list[Path]()
    for path in shard_paths(folder):
        name, _, _ = path.relative_to(folder).as_posix().rpartition("+")
        if name in names:
            paths.append(path)
    return paths


def reject_mixed_sketches(headers: Mapping[Path, ShardHeader]) -> None:
    """Raise UsageError, naming two shards, if signatures were made with different sketches."""
    for (one, one_header), (other, other_header) in pairwise(headers.items()):
        if one_header.describe() != other_header.describe():
            raise UsageError(
                f"these signatures cannot be compared: {one} holds {one_header.describe()}; {other} holds "
                f"{other_header.describe()}. Run to_hash with the same options on all of them, those that the index "
                "was made with"
            )
