"""Signature shards: Arrow IPC files of row numbers and signatures, with the sketch's parameters in the metadata."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.ipc
from numpy.typing import NDArray

from dedup.minhash.signatures import Sketch
from gristmill.errors import InputError, UsageError
from gristmill.io.files import atomic_write, reject_unfinished, walk

SUFFIX = ".signatures.arrow"


class ShardHeader(msgspec.Struct, forbid_unknown_fields=True):
    """Metadata of a shard: the corpus file its rows belong to, and the sketch's parameters."""

    file: str
    hash: str
    seed: int
    permutations: int
    unit: str
    width: int

    @classmethod
    def of(cls, file: str, sketch: Sketch) -> Self:
        """The header of a shard of `file`, with signatures made with `sketch`."""
        return cls(file, sketch.hash, sketch.seed, sketch.permutations, sketch.unit, sketch.width)

    def describe(self) -> str:
        """The sketch's parameters in words, for messages; equal for shards that can be compared."""
        return (
            f"{self.hash} hashes of {self.width}-{self.unit} shingles, "
            f"{self.permutations} permutations, seed {self.seed}"
        )


@dataclass(frozen=True)
class OpenShard:
    """A shard opened by memory-mapping."""

    path: Path
    header: ShardHeader
    batches: tuple[pa.RecordBatch, ...]

    def __len__(self) -> int:
        return sum(batch.num_rows for batch in self.batches)

    def rows(self) -> NDArray[np.int64]:
        """The rows of the signed documents in the corpus file (documents, int64), ascending."""
        parts = [batch.column("row").to_numpy() for batch in self.batches]
        return np.concatenate([*parts, np.empty(0, np.int64)])

    def signatures(self) -> Iterator[NDArray[np.uint32]]:
        """Signatures batch by batch (documents × permutations, uint32), without a copy."""
        for batch in self.batches:
            yield batch.column("signature").flatten().to_numpy().reshape(batch.num_rows, self.header.permutations)


@contextmanager
def write_shard(path: Path, file: str, sketch: Sketch) -> Iterator["ShardWriter"]:
    """Yield a writer of batches; the shard is published when the block ends without an error.

    `file` is the name of the corpus file within its corpus.
    """
    header = ShardHeader.of(file, sketch)
    signature = pa.list_(pa.uint32(), sketch.permutations)
    schema = pa.schema({"row": pa.int64(), "signature": signature}, {"gristmill": msgspec.json.encode(header)})
    with atomic_write(path) as temporary, pa.ipc.new_file(str(temporary), schema) as writer:
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
    """Memory-map a shard. InputError if it is damaged or not a signature shard."""
    try:
        file = pa.ipc.open_file(pa.memory_map(str(path)))
        header = msgspec.json.decode((file.schema.metadata or {})[b"gristmill"], type=ShardHeader)
        return OpenShard(path, header, tuple(map(file.get_batch, range(file.num_record_batches))))
    except (pa.ArrowException, KeyError, msgspec.DecodeError) as error:
        raise InputError(f"{path} is not a readable signature shard ({error}): run to_hash again") from error


def shard_paths(folder: Path) -> list[Path]:
    """All shards below a folder, in name order. UsageError if there is none, InputError if to_hash has not finished."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: wanted the folder that to_hash wrote to, and there is none of that name")
    reject_unfinished(folder)
    paths = sorted(path for path in walk(folder) if path.name.endswith(SUFFIX))
    if not paths:
        raise UsageError(f"{folder} holds no signature shard (*{SUFFIX}): run to_hash first")
    return paths


def list_shards(folder: Path) -> list[Path]:
    """All shards below a folder, in name order. UsageError if there is none or sketches differ."""
    paths = shard_paths(folder)
    reject_mixed_sketches({path: open_shard(path).header for path in paths})
    return paths


def reject_mixed_sketches(headers: Mapping[Path, ShardHeader]) -> None:
    """Raise UsageError, naming two shards, if signatures were made with different sketches."""
    for (one, first), (other, found) in pairwise(headers.items()):
        if first.describe() != found.describe():
            raise UsageError(
                f"these signatures cannot be compared: {one} holds {first.describe()}; {other} holds "
                f"{found.describe()}. Run to_hash with the same options on all of them, those that the index was made "
                "with"
            )
