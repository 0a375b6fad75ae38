"""The documents' own ids: fetched with the members of clusters, and looked up by key when tables are written."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dedup.removal.clusters import Clusters
from gristmill.engine.task import FileSet
from gristmill.io.artefacts import open_table_writer
from gristmill.io.keys import Rows, pack_keys
from gristmill.storage.local import atomic_write

ID = np.dtype([("key", "<u8"), ("size", "<i8")])  # the packed key of a document that has an id, and the id's bytes
_COUNT = np.dtype("<i8")
_SCHEMA = pa.schema({"cluster": pa.int64(), "file": pa.string(), "row": pa.int64(), "id": pa.string()})


class FoundIds:
    """Ids found in a fetch task, written in blocks: their number, IDs and the ids themselves in UTF-8."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.total = file, 0
        self._held: list[bytes | None] = []

    def add(self, own_id: str | None) -> None:
        """Hold the id of the next document, None if it has none."""
        self._held.append(None if own_id is None else own_id.encode())

    def write(self, members: NDArray) -> None:
        """Write the ids held, those of the MEMBERs (n)."""
        sizes = np.array([-1 if own is None else len(own) for own in self._held], np.int64)
        has = members[sizes >= 0]
        found = np.empty(len(has), ID)
        found["key"], found["size"] = pack_keys(has["file"], has["row"]), sizes[sizes >= 0]
        for part in (np.array([len(found)], _COUNT), found):
            self.file.write(part.view(np.uint8).data)
        self.file.write(b"".join(own for own in self._held if own is not None))
        self.total += len(found)
        self._held.clear()


class IdFiles(NamedTuple):
    """Ids by key in files that are mapped: the packed keys, ascending, where each id ends, and all ids in UTF-8."""

    keys: Path
    ends: Path
    texts: Path


def join_ids(fetched: FileSet, keys: Path, ends: Path, texts: Path) -> None:
    """Task: write the IdFiles of what fetch tasks found; their files are in the order of the corpus."""
    last, end = -1, 0
    with (
        atomic_write(keys) as one, atomic_write(ends) as two, atomic_write(texts) as three,
        one.open("wb") as to_keys, two.open("wb") as to_ends, three.open("wb") as to_texts,
    ):  # fmt: skip
        to_ends.write(bytes(_COUNT.itemsize))
        for path in fetched.paths:
            for found, text in _read_found(path):
                packed = found["key"].astype(np.int64)
                assert (np.diff(packed, prepend=last) > 0).all(), path
                to_keys.write(found["key"].tobytes())
                to_ends.write((end + np.cumsum(found["size"])).tobytes())
                to_texts.write(text)
                last, end = int(packed[-1]), end + len(text)


def _read_found(path: Path) -> Iterator[tuple[NDArray, bytes]]:
    """The blocks that FoundIds wrote, without empty ones."""
    with path.open("rb") as file:
        while len(count := np.fromfile(file, _COUNT, 1)):
            found = np.fromfile(file, ID, int(count[0]))
            text = file.read(int(found["size"].sum()))
            if len(found):
                yield found, text


class OwnIds:
    """Looks ids up by key; memory holds those asked for alone."""

    def __init__(self, files: IdFiles) -> None:
        self.keys = np.memmap(files.keys, np.uint64, "r")
        ends, texts = np.memmap(files.ends, np.int64, "r"), np.empty(0, np.uint8)
        if files.texts.stat().st_size:
            texts = np.memmap(files.texts, np.uint8, "r")
        self.values = pa.LargeStringArray.from_buffers(len(self.keys), pa.py_buffer(ends), pa.py_buffer(texts))

    def of(self, files: NDArray[np.integer], rows: Rows) -> pa.StringArray:
        """The ids of documents, null without one, given the numbers of files (n) and rows (n)."""
        wanted = pack_keys(files, rows)
        places = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return self.values.take(pa.array(places, mask=self.keys[places] != wanted)).cast(pa.string())


def write_clusters(input_file: Path, ids: IdFiles, output: Path) -> None:
    """Task: write the table of all clusters with the documents' own ids."""
    clusters, own = Clusters.open(input_file), OwnIds(ids)
    names = pa.array(clusters.names, pa.string())
    with open_table_writer(output, _SCHEMA) as write:
        for block in clusters.blocks():
            columns = {"cluster": pa.array(block["cluster"]), "file": names.take(pa.array(block["file"]))}
            write(columns | {"row": pa.array(block["row"]), "id": own.of(block["file"], block["row"])})
