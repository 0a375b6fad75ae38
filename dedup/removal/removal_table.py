"""Removal table: each removed document, the one kept in its place, their similarity; also as SlimPajama's pickle.

Where documents have ids of their own, these are fetched with the members of clusters, and looked up by key when the
table, and one of all clusters, are written.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from numpy.typing import NDArray

from dedup.removal.clusters import Clusters, in_two_clusters, reject_repeated
from gristmill.engine.task import FileSet
from gristmill.io.artefacts import ROW_GROUP_SIZE, open_table_writer, stream_dict, write_stream
from gristmill.io.external_sort import ExternalSorter, read_records
from gristmill.io.files import STATE_DIR
from gristmill.io.keys import PackedKeys, Rows, pack_keys, stream_keys
from gristmill.storage.local import open_atomically

OWN_IDS = pa.schema({"key": pa.uint64(), "id": pa.string()})  # of documents that have an id; keys are packed
_CLUSTERS_SCHEMA = pa.schema({"cluster": pa.int64(), "file": pa.string(), "row": pa.int64(), "id": pa.string()})
KEPT = "kept"
DUPLICATE = "duplicate"
BELOW_THRESHOLD = "below threshold"  # kept, as it is not similar enough to any earlier kept document of its cluster
REASONS = (KEPT, DUPLICATE, BELOW_THRESHOLD)
# How a similarity was measured.
NOT_MEASURED = 0
EXACT = 1  # on sets of shingles
ESTIMATED = 2  # on the signatures of an index
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


class IdFiles(NamedTuple):
    """Ids by key in files that are mapped: the packed keys, ascending, where each id ends, and all ids in UTF-8."""

    keys: Path
    ends: Path
    texts: Path


def join_ids(fetched: FileSet, keys: Path, ends: Path, texts: Path) -> None:
    """Task: write the IdFiles of what fetch tasks found: streams of OWN_IDS in the order of the corpus."""
    last = -1
    end = 0
    with ExitStack() as stack:
        to_keys = stack.enter_context(open_atomically(keys))
        to_ends = stack.enter_context(open_atomically(ends))
        to_texts = stack.enter_context(open_atomically(texts))
        to_ends.write(bytes(8))
        for path in fetched.paths:
            with path.open("rb") as file:
                for batch in pa.ipc.open_stream(file):
                    packed = batch["key"].to_numpy()
                    assert (np.diff(packed.astype(np.int64), prepend=last) > 0).all(), path
                    ids = [own_id.encode() for own_id in batch["id"].to_pylist()]
                    ends_of_ids = end + np.cumsum([len(own_id) for own_id in ids])
                    to_keys.write(packed.tobytes())
                    to_ends.write(ends_of_ids.tobytes())
                    to_texts.write(b"".join(ids))
                    last = int(packed[-1])
                    end = int(ends_of_ids[-1])


class OwnIds:
    """Looks ids up by key; memory holds only the ids asked for."""

    def __init__(self, files: IdFiles) -> None:
        self.keys = np.memmap(files.keys, np.uint64, "r")
        ends = np.memmap(files.ends, np.int64, "r")
        texts = np.empty(0, np.uint8)
        if files.texts.stat().st_size:
            texts = np.memmap(files.texts, np.uint8, "r")
        self.values = pa.LargeStringArray.from_buffers(len(self.keys), pa.py_buffer(ends), pa.py_buffer(texts))

    def of(self, files: NDArray[np.integer], rows: Rows) -> pa.StringArray:
        """Return the ids of documents, null without one, given the numbers of files (n) and rows (n)."""
        keys = pack_keys(files, rows)
        positions = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        has_no_id = self.keys[positions] != keys
        return self.values.take(pa.array(positions, mask=has_no_id)).cast(pa.string())


def write_clusters(input_file: Path, ids: IdFiles, output: Path) -> None:
    """Task: write the table of all clusters with the documents' own ids."""
    clusters = Clusters.open(input_file)
    own = OwnIds(ids)
    names = pa.array(clusters.names, pa.string())
    with open_table_writer(output, _CLUSTERS_SCHEMA) as write:
        for block in clusters.blocks():
            columns = {
                "cluster": pa.array(block["cluster"]),
                "file": names.take(pa.array(block["file"])),
                "row": pa.array(block["row"]),
                "id": own.of(block["file"], block["row"]),
            }
            write(columns)


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
    own = OwnIds(ids) if ids else None
    schema = pa.schema([*_SCHEMA, *(_IDS if ids else [])])
    with ExternalSorter(runs, REMOVAL, ("file", "row"), memory) as sorter, open_table_writer(table, schema) as write:
        sorter.add_all(read_records(decided.paths, REMOVAL, ROW_GROUP_SIZE))
        for block in reject_repeated(sorter, names):
            for start in range(0, len(block), ROW_GROUP_SIZE):  # a block may be large: make columns of a part at a time
                write(_columns(block[start : start + ROW_GROUP_SIZE], values, own))
    if pickle:
        rows_of_files = ((file, set(rows.tolist())) for file, rows in stream_keys(table))
        write_stream(pickle, stream_dict(rows_of_files))


def _reject_removed(decided: FileSet, names: list[str], folder: Path, memory: int) -> None:
    """Raise InputError if a document is kept in place of others and removed, too: no copy might be left.

    `decided` are files of REMOVALs; `folder` is for work files.
    """
    keys = ((block["file"], block["row"]) for block in read_records(decided.paths, REMOVAL, ROW_GROUP_SIZE))
    with PackedKeys.of_numbered(keys, {}, folder, memory) as removed:
        for block in read_records(decided.paths, REMOVAL, ROW_GROUP_SIZE):
            is_removed = removed.contains(block["kept_file"], block["kept_row"])
            if is_removed.any():
                raise in_two_clusters(block[np.argmax(is_removed)], names, "kept_")


def _columns(removals: NDArray, names: pa.StringArray, own: OwnIds | None) -> dict[str, pa.Array]:
    """Return the columns of the table for REMOVALs (n), given the names of all files."""
    columns = {name: pa.array(removals[name], from_pandas=True) for name in _SCHEMA.names}
    for name in ("file", "kept_file"):
        columns[name] = names.take(columns[name])
    columns["measured"] = pa.array(_MEASURED, pa.string()).take(columns["measured"])
    if own:
        columns["id"] = own.of(removals["file"], removals["row"])
        columns["kept_id"] = own.of(removals["kept_file"], removals["kept_row"])
    return columns
