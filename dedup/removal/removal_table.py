"""Removal table: each removed document, the one kept in its place, their similarity; also as SlimPajama's pickle."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dedup.removal.clusters import in_two_clusters, reject_repeated
from dedup.removal.own_ids import IdFiles, OwnIds
from gristmill.engine.task import FileSet
from gristmill.io.artefacts import ROW_GROUP_SIZE, open_table_writer, stream_dict, write_stream
from gristmill.io.external_sort import ExternalSorter, read_records
from gristmill.io.files import STATE_DIR
from gristmill.io.keys import PackedKeys, stream_keys

KEPT = "kept"
DUPLICATE = "duplicate"
BELOW_THRESHOLD = "below threshold"  # kept, as it is not similar enough to any earlier kept document of its cluster
REASONS = (KEPT, DUPLICATE, BELOW_THRESHOLD)
NOT_MEASURED, EXACT, ESTIMATED = 0, 1, 2  # how: on shingle sets, or on signatures of an index
# The removed document and the one kept in its place, files by number; similarity is NaN if it was not measured.
# Of the documents that have the same one in their place, those of a lower rank precede in keep order.
REMOVAL = np.dtype([
    ("file", "<i4"), ("row", "<i8"), ("kept_file", "<i4"), ("kept_row", "<i8"), ("similarity", "<f8"),
    ("measured", "u1"), ("rank", "<i8"),
])  # fmt: skip
_SCHEMA = pa.schema([
    ("file", pa.string()), ("row", pa.int64()), ("kept_file", pa.string()), ("kept_row", pa.int64()),
    ("similarity", pa.float64()), ("measured", pa.string()),
    ("rank", pa.int64()),
])  # fmt: skip
_IDS = [pa.field("id", pa.string()), pa.field("kept_id", pa.string())]  # where documents have ids of their own
_MEASURED = (None, "exact", "estimated")  # NOT_MEASURED, EXACT, ESTIMATED


def write_removals(
    names: list[str], decided: FileSet, table: Path, pickle: Path | None, ids: IdFiles | None, memory: int
) -> None:
    """Task: write the REMOVALs of some files, sorted by key, as a .parquet table and as SlimPajama's pickle.

    The table has the documents' own ids, if there are some.

    `names` are the files that REMOVALs refer to by number. A pickle of an earlier run is removed first, so that at no
    time it lies next to a table that lists other documents.
    """
    if pickle:
        pickle.unlink(missing_ok=True)
    values = pa.array(names, pa.string())
    runs = table.parent / STATE_DIR / f"{table.name}.runs"
    _reject_removed(decided, names, runs, memory)
    own, schema = OwnIds(ids) if ids else None, pa.schema([*_SCHEMA, *(_IDS if ids else [])])
    with ExternalSorter(runs, REMOVAL, ("file", "row"), memory) as sorter, open_table_writer(table, schema) as write:
        for block in _blocks(decided):
            sorter.add(block)
        for block in reject_repeated(sorter, names):
            for start in range(0, len(block), ROW_GROUP_SIZE):  # a block may be large: make columns of a part at a time
                write(_columns(block[start : start + ROW_GROUP_SIZE], values, own))
    if pickle:
        write_stream(pickle, stream_dict((file, set(rows.tolist())) for file, rows in stream_keys(table)))


def _reject_removed(decided: FileSet, names: list[str], folder: Path, memory: int) -> None:
    """Raise InputError if a document is kept in place of others and removed, too: no copy might be left.

    `decided` are files of REMOVALs; `folder` is for work files.
    """
    keys = ((block["file"], block["row"]) for block in _blocks(decided))
    with PackedKeys.of_numbered(keys, {}, folder, memory) as removed:
        for block in _blocks(decided):
            is_removed = removed.contains(block["kept_file"], block["kept_row"])
            if is_removed.any():
                raise in_two_clusters(block[np.argmax(is_removed)], names, "kept_")


def _blocks(decided: FileSet) -> Iterator[NDArray]:
    """REMOVALs of all files, a block at a time."""
    return (block for path in decided.paths for block in read_records(path, REMOVAL, ROW_GROUP_SIZE))


def _columns(removals: NDArray, names: pa.StringArray, own: OwnIds | None) -> dict[str, pa.Array]:
    """Columns of the table for REMOVALs (n), given the names of all files."""
    columns = {name: pa.array(removals[name], from_pandas=True) for name in _SCHEMA.names}
    for name in ("file", "kept_file"):
        columns[name] = names.take(columns[name])
    columns["measured"] = pa.array(_MEASURED, pa.string()).take(columns["measured"])
    if own:
        columns |= {f"{side}id": own.of(removals[f"{side}file"], removals[f"{side}row"]) for side in ("", "kept_")}
    return columns
