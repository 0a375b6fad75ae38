"""What to remove, and which document was kept in its place: as records, as a table, as SlimPajama's pickle."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dedup.removal.keeping import INDEXED
from gristmill.counts import READ, Counts
from gristmill.io.documents import source_of
from gristmill.io.keys import stream_keys
from gristmill.io.parquet_tables import ROW_GROUP, open_table
from gristmill.io.pickles import stream_dict, write_stream

KEPT = "kept"
DUPLICATE = "duplicate"
SPARED = "spared"  # kept as it is not similar enough to any document that is kept before it in its cluster
_DOCUMENTS = [("file", "<i4"), ("row", "<i8"), ("kept_file", "<i4"), ("kept_row", "<i8")]
REMOVAL = np.dtype([*_DOCUMENTS, ("similarity", "<f8"), ("measured", "u1")])  # NaN and NOT where it was not measured
NOT, EXACT, ESTIMATED = 0, 1, 2  # how it was measured: on shingles, or on signatures as the text is not at hand
BY_KEY = ("file", "row")
_SCHEMA = pa.schema([
    ("file", pa.string()), ("row", pa.int64()), ("kept_file", pa.string()), ("kept_row", pa.int64()),
    ("similarity", pa.float64()), ("measured", pa.string()),
])  # fmt: skip
_MEASURED = pa.array([None, "exact", "estimated"], pa.string())  # NOT, EXACT, ESTIMATED


class Books:
    """Documents read, kept and removed, file by file."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.tallies = {reason: np.zeros(len(names), np.int64) for reason in (READ, KEPT, DUPLICATE, SPARED)}

    def add(self, reason: str, files: NDArray[np.int32]) -> None:
        """Count documents by the numbers of their files (n); those of an index are not ours to count."""
        found = np.bincount(files, minlength=len(self.names))
        self.tallies[READ] += found
        self.tallies[reason] += found

    def add_one(self, reason: str, file: int) -> None:
        self.tallies[READ][file] += 1
        self.tallies[reason][file] += 1

    def counts(self) -> Counts:
        counts = Counts({}, [])
        for reason, found in self.tallies.items():
            for file in np.flatnonzero(found):
                counts.add(source_of(self.names[file]), reason, 0, int(found[file]))
        return counts


def remove_all_but_first(blocks: Iterable[NDArray], books: Books) -> Iterator[NDArray]:
    """REMOVALs of everything but the first of each cluster, from MEMBERs in keep order; an index loses nothing."""
    first: NDArray | None = None  # of the cluster that the last block ended in
    for block in blocks:
        members = block if first is None else np.concatenate([first, block])
        starts = np.diff(members["cluster"], prepend=members["cluster"][0] - 1) != 0
        firsts = np.maximum.accumulate(np.where(starts, np.arange(len(members)), 0))
        ours = members["tier"] != INDEXED
        books.add(KEPT, members["file"][int(first is not None) :][(starts & ours)[int(first is not None) :]])
        first = members[firsts[-1:]]
        removed = ~starts & ours
        books.add(DUPLICATE, members["file"][removed])
        yield _unmeasured(members[removed], members[firsts[removed]])


def _unmeasured(removed: NDArray, kept: NDArray) -> NDArray:
    """REMOVALs from the records of documents (n) and of those kept in their places (n)."""
    found = np.empty(len(removed), REMOVAL)
    found["file"], found["row"] = removed["file"], removed["row"]
    found["kept_file"], found["kept_row"] = kept["file"], kept["row"]
    found["similarity"], found["measured"] = np.nan, NOT
    return found


def write_removals(out_file: Path, names: list[str], blocks: Iterable[NDArray]) -> None:
    """Write REMOVALs, ascending by key, as a .parquet table, and as a pickle if `out_file` is one."""
    table = out_file.with_suffix(".parquet")
    values = pa.array(names, pa.string())
    with open_table(table, _SCHEMA) as write:
        for group in _regrouped(blocks, ROW_GROUP):
            columns = {name: pa.array(group[name], from_pandas=True) for name in _SCHEMA.names}
            for name in ("file", "kept_file"):
                columns[name] = values.take(columns[name])
            columns["measured"] = _MEASURED.take(columns["measured"])
            write(columns)
    if out_file != table:
        _write_pickle(out_file, table)


def _regrouped(blocks: Iterable[NDArray], size: int) -> Iterator[NDArray]:
    """The same records in arrays of `size`, the last one shorter: a file's bytes depend on how it is cut."""
    held: list[NDArray] = []
    count = 0
    for block in blocks:
        while count + len(block) >= size:
            head, block = np.split(block, [size - count])
            yield np.concatenate([*held, head])
            held, count = [], 0
        held.append(block)
        count += len(block)
    if count:
        yield np.concatenate(held)


def _write_pickle(path: Path, table: Path) -> None:
    """SlimPajama's {file: {rows}}, from the table; one file's rows are in memory at a time."""
    write_stream(path, stream_dict((file, set(rows.tolist())) for file, rows in stream_keys(table)))
