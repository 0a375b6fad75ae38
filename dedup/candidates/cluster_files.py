"""Cluster files: a .parquet table, or SlimPajama's .pickle of (components, number of components, {id: key})."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dedup.candidates.document_ids import DocumentIds
from dedup.clustering.union_find import LABEL
from gristmill.io.external_sort import ExternalSorter, read_records
from gristmill.io.parquet_tables import is_table, open_table_writer
from gristmill.io.pickles import stream_dict, stream_list, stream_value, write_tuple

SCHEMA = pa.schema({"cluster": pa.int64(), "file": pa.string(), "row": pa.int64()})
_BLOCK = 1 << 16  # keys made together


def write_clusters(
    path: Path, labels: Iterable[NDArray], document_ids: DocumentIds, work: Path, memory: int
) -> list[int]:
    """Write clusters in order of their first document, members by id; return the number of members of each file.

    `labels` are blocks of LABELs in order of node. Needs about `memory` bytes; a reader of the
    pickle has to load all of it.
    """
    clustered = np.zeros(len(document_ids.names), np.int64)

    def counted() -> Iterator[NDArray]:
        for block in labels:
            files, _ = document_ids.split(block["node"])
            clustered[:] += np.bincount(files, minlength=len(clustered))
            yield block

    with ExternalSorter(work / "clusters", LABEL, ("root",), memory) as sorter:  # stable: members stay ordered by id
        write = _write_table if is_table(path) else _write_pickle
        write(path, counted(), document_ids, sorter)
    return clustered.tolist()


def _write_table(path: Path, labels: Iterable[NDArray], document_ids: DocumentIds, sorter: ExternalSorter) -> None:
    for block in labels:
        sorter.add(block)
    last_cluster, last_root = -1, None
    with open_table_writer(path, SCHEMA) as write:
        for block in sorter:
            roots = block["root"]
            is_new = np.append(roots[:1] != last_root, roots[1:] != roots[:-1])
            clusters = last_cluster + np.cumsum(is_new)
            last_cluster, last_root = int(clusters[-1]), roots[-1]
            files, rows = document_ids.split(block["node"])
            write({"cluster": pa.array(clusters), "file": document_ids.files(files), "row": pa.array(rows)})


def _write_pickle(path: Path, labels: Iterable[NDArray], document_ids: DocumentIds, sorter: ExternalSorter) -> None:
    """Members are numbered 0, 1, … in key order; a file holds their document ids until the dict is written."""
    sorter.folder.mkdir(parents=True, exist_ok=True)
    members, count = sorter.folder.parent / "members.bin", 0
    with members.open("wb") as file:
        for block in labels:
            file.write(np.ascontiguousarray(block["node"]).data)
            numbered = block.copy()
            numbered["node"] = np.arange(count, count + len(block))
            sorter.add(numbered)
            count += len(block)
    blocks = read_records(members, np.dtype("<u8"), _BLOCK)
    keys = (key for ids in blocks for key in document_ids.keys(ids).to_pylist())
    components = _Components(sorter)
    write_tuple(path, [stream_list(components), stream_value(lambda: components.count), stream_dict(enumerate(keys))])


class _Components:
    """Iterates over the members of each component as a list, given LABELs in order of root; counts components."""

    def __init__(self, labels: Iterable[NDArray]) -> None:
        self.labels, self.count = labels, 0

    def __iter__(self) -> Iterator[list[int]]:
        pending = np.empty(0, LABEL)
        for block in self.labels:
            pending = np.concatenate([pending, block])
            starts = np.flatnonzero(pending["root"][1:] != pending["root"][:-1]) + 1
            *complete, pending = np.split(pending, starts)
            self.count += len(complete)
            yield from (component["node"].tolist() for component in complete)
        if len(pending):
            self.count += 1
            yield pending["node"].tolist()
