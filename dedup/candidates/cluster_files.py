"""Files of clusters: SlimPajama's .pickle, (components, how many, {number: key}), or a .parquet table."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dedup.candidates.connected_components import LABEL
from dedup.candidates.document_ids import DocumentIds
from gristmill.io.external_sort import ExternalSorter, read_records
from gristmill.io.keys import is_table, open_table
from gristmill.io.pickles import stream_dict, stream_list, stream_value, write_tuple

SCHEMA = pa.schema({"cluster": pa.int64(), "file": pa.string(), "row": pa.int64()})
_BLOCK = 1 << 16


def write_clusters(
    path: Path, labels: Iterable[NDArray], document_ids: DocumentIds, work: Path, memory: int
) -> list[int]:
    """Write clusters, in order of their first document, each in order of document; how many documents of each file.

    `labels` are LABELs in order of node. Memory is bounded, for the pickle too, though not when it is read.
    """
    found = np.zeros(len(document_ids.names), np.int64)

    def counted() -> Iterator[NDArray]:
        for some in labels:
            files, _ = document_ids.split(some["node"])
            found[:] += np.bincount(files, minlength=len(found))
            yield some

    with ExternalSorter(work / "clusters", LABEL, ("root",), memory) as sorter:
        write = _write_table if is_table(path) else _write_pickle
        write(path, counted(), document_ids, sorter)
    return found.tolist()


def _write_table(path: Path, labels: Iterable[NDArray], document_ids: DocumentIds, sorter: ExternalSorter) -> None:
    for some in labels:
        sorter.add(some)
    clusters, last = -1, None
    with open_table(path, SCHEMA) as write:
        for some in sorter:
            roots = some["root"]
            new = np.append(roots[:1] != last, roots[1:] != roots[:-1])
            of = clusters + np.cumsum(new)
            clusters, last = int(of[-1]), roots[-1]
            files, rows = document_ids.split(some["node"])
            write({"cluster": pa.array(of), "file": document_ids.files(files), "row": pa.array(rows)})


def _write_pickle(path: Path, labels: Iterable[NDArray], document_ids: DocumentIds, sorter: ExternalSorter) -> None:
    """Members are numbered in key order: their keys are read from a file of them while the dict is written."""
    sorter.folder.mkdir(parents=True, exist_ok=True)
    members, count = sorter.folder.parent / "members.bin", 0
    with members.open("wb") as file:
        for some in labels:
            file.write(np.ascontiguousarray(some["node"]).data)
            ranked = some.copy()
            ranked["node"] = np.arange(count, count + len(some))
            sorter.add(ranked)
            count += len(some)
    keys = (
        key for some in read_records(members, np.dtype("<u8"), _BLOCK) for key in document_ids.keys(some).to_pylist()
    )
    components = _Grouped(sorter)
    write_tuple(path, [stream_list(components), stream_value(lambda: components.count), stream_dict(enumerate(keys))])


class _Grouped:
    """The nodes of each root as a list, from LABELs in order of root; and, at the end, how many roots there were."""

    def __init__(self, labels: Iterable[NDArray]) -> None:
        self.labels, self.count = labels, 0

    def __iter__(self) -> Iterator[list[int]]:
        held = np.empty(0, LABEL)
        for some in self.labels:
            held = np.concatenate([held, some])
            starts = np.flatnonzero(held["root"][1:] != held["root"][:-1]) + 1
            *whole, held = np.split(held, starts)
            self.count += len(whole)
            yield from (part["node"].tolist() for part in whole)
        if len(held):
            self.count += 1
            yield held["node"].tolist()
