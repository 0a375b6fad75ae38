"""What is compared: the signature shards of a corpus, and of indexes, the corpora deduplicated before it."""

from collections.abc import Iterator, Sequence
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
from dedup.minhash.signature_shards import OpenShard, list_shards, open_shard
from gristmill.errors import UsageError

Scope = Literal["global", "per-source"]


@dataclass(frozen=True)
class SignatureShard:
    """A shard: where it is, the file its documents stand in, how many they are, and the last one's row + 1."""

    path: Path
    file: str
    documents: int
    end: int

    def batches(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint32]]]:
        """Rows (n) and signatures (n × permutations), batch by batch."""
        with pa.OSFile(str(self.path)) as file:  # not mapped, as pages that were read would count as memory
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                values = batch.column("signature").flatten().to_numpy()
                yield batch.column("row").to_numpy(), values.reshape(batch.num_rows, -1)

    def salt(self, scope: Scope) -> int:
        """What keeps digests apart that are not to be compared."""
        if scope == "global":
            return 0
        return int.from_bytes(blake2b(scope_of(self.file).encode(), digest_size=8).digest(), "little")


def list_signature_shards(folder: Path, index: Sequence[str] = ()) -> tuple[list[SignatureShard], int]:
    """The shards of a corpus and of its indexes in key order, and how many permutations each has.

    Indexes are folders of shards, or NAME=FOLDER. UsageError where shards cannot be compared.
    """
    indexes = [_parse_index(text) for text in index]
    if len({name for name, _ in indexes}) < len(indexes):
        raise UsageError(f"--index {' '.join(index)}: wanted a name of its own for each, such as 2023=FOLDER")
    heads: dict[Path, str] = {}
    signed = []
    for name, place in [("", folder), *indexes]:
        for path in list_shards(place):
            shard = open_shard(path)
            heads[path] = shard.header.describe()
            file = index_name(name, shard.header.file) if name else shard.header.file
            signed.append(SignatureShard(path, file, len(shard), _end(shard)))
    for one, other in pairwise(heads):
        if heads[one] != heads[other]:
            raise UsageError(
                f"these signatures cannot be compared: {one} holds {heads[one]}; {other} holds {heads[other]}. "
                "Run to_hash with the options that the index was made with"
            )
    signed.sort(key=lambda shard: (not is_of_index(shard.file), shard.file, shard.end))
    return signed, open_shard(signed[0].path).header.permutations


def rows_of(shards: Sequence[SignatureShard]) -> dict[str, int]:
    """File → the number of rows that its shards tell of, for DocumentIds.of."""
    rows: dict[str, int] = {}
    for shard in shards:
        rows[shard.file] = max(rows.get(shard.file, 0), shard.end)
    return rows


def assign_ids(shards: Sequence[SignatureShard]) -> DocumentIds:
    """Numbers for the documents of all shards."""
    return DocumentIds.of(rows_of(shards))


def _parse_index(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    path = Path(folder if equals else text)
    name = name if equals else path.resolve().name
    if not name or ":" in name or "/" in name:
        raise UsageError(f"--index {text}: wanted a folder of shards, or NAME=FOLDER with neither : nor / in the name")
    return name, path


def _end(shard: OpenShard) -> int:
    last = next((batch for batch in reversed(shard.batches) if batch.num_rows), None)
    return int(last.column("row")[-1].as_py()) + 1 if last else 0
