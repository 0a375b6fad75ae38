"""Signature shards to compare: those of a corpus, and those of indexes (corpora deduplicated before)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from numpy.typing import NDArray

from dedup.candidates.document_ids import DocumentIds, index_name, is_of_index, scope_of
from dedup.minhash.signature_shards import OpenShard, ShardHeader, list_shards, open_shard, shard_paths
from dedup.minhash.signatures import Sketch
from gristmill.errors import UsageError

Scope = Literal["global", "per-source"]


@dataclass(frozen=True)
class SignatureShard:
    """A shard's path, its corpus file, its number of documents and the row after its last."""

    path: Path
    file: str
    documents: int
    end: int

    def batches(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint32]]]:
        """Rows (n) and signatures (n × permutations), batch by batch."""
        with pa.OSFile(str(self.path)) as file:  # not mapped: pages that were read would count as memory in use
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                if batch.num_rows:  # none where no document could be signed
                    values = batch.column("signature").flatten().to_numpy()
                    yield batch.column("row").to_numpy(), values.reshape(batch.num_rows, -1)

    def salt(self, scope: Scope) -> int:
        """Salt for band digests (64 bits): equal for shards whose documents are compared."""
        if scope == "global":
            return 0
        return int.from_bytes(blake2b(scope_of(self.file).encode(), digest_size=8).digest(), "little")


def list_signature_shards(folder: Path | None, index: Sequence[str] = ()) -> tuple[list[SignatureShard], int]:
    """The shards of a corpus and its indexes in key order, and the number of permutations of their signatures.

    An index is a folder of shards, or NAME=FOLDER. Without a `folder`, the shards are those of the indexes alone.
    UsageError if shards cannot be compared.
    """
    indexes = parse_indexes(index)
    sketches: dict[Path, str] = {}
    shards = []
    for name, root in [*([("", folder)] if folder else []), *indexes]:
        for path in list_shards(root):
            shard = open_shard(path)
            sketches[path] = shard.header.describe()
            file = index_name(name, shard.header.file) if name else shard.header.file
            shards.append(SignatureShard(path, file, len(shard), _end(shard)))
    for one, other in pairwise(sketches):
        if sketches[one] != sketches[other]:
            raise UsageError(
                f"these signatures cannot be compared: {one} holds {sketches[one]}; {other} holds {sketches[other]}. "
                "Run to_hash with the options that the index was made with"
            )
    shards.sort(key=lambda shard: (not is_of_index(shard.file), shard.file, shard.end))
    return shards, open_shard(shards[0].path).header.permutations


def assign_ids(shards: Sequence[SignatureShard], rows: Mapping[str, int] | None = None) -> DocumentIds:
    """Assign ids to the documents of all shards and, if `rows` is given, of files with at least rows[file] rows."""
    rows = dict(rows or {})
    for shard in shards:
        rows[shard.file] = max(rows.get(shard.file, 0), shard.end)
    return DocumentIds.of(rows)


def check_index(index: Sequence[str], sketch: Sketch) -> None:
    """Raise UsageError unless each index is a folder of signature shards made with `sketch`.

    Reads the header of one shard of each; `list_signature_shards` checks all of them.
    """
    for name, folder in parse_indexes(index):
        path = shard_paths(folder)[0]
        found, wanted = open_shard(path).header.describe(), ShardHeader.of("", sketch).describe()
        if found != wanted:
            raise UsageError(
                f"--index {name}={folder} cannot be compared: {path} holds {found}; the options ask for {wanted}. "
                "Give the options that the index was made with"
            )


def parse_indexes(index: Sequence[str]) -> list[tuple[str, Path]]:
    """Name and folder of each index, given as NAME=FOLDER or FOLDER. Raises UsageError if two have one name."""
    indexes = [_parse_index(text) for text in index]
    if len({name for name, _ in indexes}) < len(indexes):
        raise UsageError(f"--index {' '.join(index)}: wanted a name of its own for each, such as 2023=FOLDER")
    return indexes


def _parse_index(text: str) -> tuple[str, Path]:
    """Split NAME=FOLDER at the first `=`, unless that follows a `/` and so is part of a folder's name.

    >>> _parse_index("old=/data/dump=2024-01/minhash"), _parse_index("/data/dump=2024-01/minhash")
    (('old', PosixPath('/data/dump=2024-01/minhash')), ('minhash', PosixPath('/data/dump=2024-01/minhash')))
    """
    name, equals, folder = text.partition("=")
    is_named = bool(equals) and "/" not in name
    path = Path(folder if is_named else text)
    name = name if is_named else path.resolve().name
    if not name or ":" in name:
        raise UsageError(f"--index {text}: wanted a folder of shards, or NAME=FOLDER with neither : nor / in the name")
    return name, path


def _end(shard: OpenShard) -> int:
    """The row after the shard's last, 0 for an empty shard."""
    last = next((batch for batch in reversed(shard.batches) if batch.num_rows), None)
    return int(last.column("row")[-1].as_py()) + 1 if last else 0
