"""The members of one cluster: their keys, their texts, and how similar they are to one another."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numba as nb
import numpy as np
import pyarrow.compute
from numpy.typing import NDArray

from dedup.minhash.matching_form import Unit
from dedup.minhash.shingles import shingle_sets
from dedup.minhash.signature_shards import list_shards, open_shard
from gristmill.counts import Counts
from gristmill.errors import InputError, UsageError
from gristmill.io.documents import DocKey, list_corpus
from gristmill.io.parquet_tables import is_table, read_table
from gristmill.io.pickles import load_pickle
from gristmill.io.readers import plan_slices, read_documents
from gristmill.io.writers import Rejects

_UNKNOWN = np.nan
Similarities = NDArray[np.float32]  # members × members


def read_cluster(path: Path, key: DocKey, most: int) -> list[DocKey]:
    """The members of the cluster that holds `key`, in order. UsageError if none does, or it has more than `most`."""
    members = _read_from_table(path, key, most) if is_table(path) else _read_from_pickle(path, key, most)
    if not members:
        raise UsageError(
            f"{key} is in no cluster of {path}: no other document was found to be like it, "
            "or it is a key of another corpus"
        )
    return members


def read_texts(corpus: Path, keys: Sequence[DocKey]) -> Iterator[tuple[DocKey, str]]:
    """The texts of some documents; files are read as far as is needed. InputError if one is not there."""
    files = {file.name: file for file in list_corpus(corpus)}
    wanted: dict[str, set[int]] = defaultdict(set)
    for key in keys:
        wanted[key.file].add(key.row)
    for name, rows in wanted.items():
        if name not in files:
            raise InputError(f"{corpus} has no file {name!r}, and the cluster does: give the corpus it was made from")
        parts = plan_slices(files[name])
        chosen = {bisect_right([part.first_row for part in parts], row) - 1 for row in rows}
        for number in sorted(chosen):
            for document in read_documents(parts[number], Counts({}, []), _NoRejects()):
                if document.key.row in rows:
                    rows.remove(document.key.row)
                    yield document.key, document.text
                if not rows:
                    break
        if rows:
            raise InputError(f"{files[name].path} has no document in row {min(rows)}: it is not what was deduplicated")


def compare_texts(texts: Sequence[str | None], width: int, unit: Unit) -> Similarities:
    """Exact Jaccard similarities of sets of shingles (n × n); NaN where a text is None or has no shingle."""
    sets = [shingle_sets([text or ""], width, unit)[0] for text in texts]
    starts = np.cumsum([0, *map(len, sets)])
    distinct, members = np.unique(np.concatenate(sets), return_inverse=True)
    found = np.full((len(sets), len(sets)), _UNKNOWN, np.float32)
    _compare(members.astype(np.uint32), starts, np.zeros(len(distinct), np.uint8), found)
    return found


def compare_signatures(minhash: Path, keys: Sequence[DocKey]) -> tuple[Similarities, str]:
    """Similarities estimated from signatures (n × n; NaN where one has none), and how those were made."""
    places: dict[str, dict[int, int]] = defaultdict(dict)
    for place, key in enumerate(keys):
        places[key.file][key.row] = place
    signed: dict[int, NDArray] = {}
    for shard in map(open_shard, list_shards(minhash)):
        if shard.header.file in places:
            rows, of_file = shard.rows(), places[shard.header.file]
            values = np.concatenate(list(shard.signatures()))
            signed.update({of_file[row]: values[i].copy() for i, row in enumerate(rows.tolist()) if row in of_file})
        made_as = shard.header.describe()
    if not signed:
        raise InputError(f"{minhash} has a signature of no document of the cluster: it was made from another corpus")
    found = np.full((len(keys), len(keys)), _UNKNOWN, np.float32)
    for one, values in signed.items():
        for other, others in signed.items():
            found[one, other] = np.mean(values == others)
    return found, made_as


def _read_from_table(path: Path, key: DocKey, most: int) -> list[DocKey]:
    field = pyarrow.compute.field
    of_key = (field("file") == key.file) & (field("row") == key.row)
    for cluster in read_table(path, {"cluster", "file", "row"}, of_key)["cluster"].to_pylist():
        members = field("cluster") == cluster
        _check_size(read_table(path, {"cluster"}, members).num_rows, key, most)
        return [DocKey(row["file"], row["row"]) for row in read_table(path, {"file", "row"}, members).to_pylist()]
    return []


def _read_from_pickle(path: Path, key: DocKey, most: int) -> list[DocKey]:
    value = load_pickle(path)
    try:
        components, _, keys = value
        number = next((number for number, name in keys.items() if name == str(key)), None)
        names = next(([keys[member] for member in component] for component in components if number in component), [])
        members = [DocKey.parse(name) for name in names]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(
            f"{path} holds no (components, how many, keys): generate_connected_components writes it"
        ) from error
    _check_size(len(members), key, most)
    return members


def _check_size(size: int, key: DocKey, most: int) -> None:
    if size > most:
        raise UsageError(
            f"the cluster of {key} has {size:,} documents: {size * (size - 1) // 2:,} comparisons. "
            f"--most {most} allows {most:,} documents; give --most {size} to go on"
        )


@nb.njit(nogil=True, cache=True)
def _compare(members: np.ndarray, starts: np.ndarray, marks: np.ndarray, found: np.ndarray) -> None:
    """found[i, j] = the Jaccard similarity of sets i and j, each members[starts[i] : starts[i + 1]], indices of marks.

    One set's members are marked, and those of each other set that are marked are counted.
    """
    for one in range(len(found)):
        a = members[starts[one] : starts[one + 1]]
        for member in a:
            marks[member] = 1
        for other in range(one, len(found)):
            b = members[starts[other] : starts[other + 1]]
            shared = np.int64(0)
            for member in b:
                shared += marks[member]
            if len(a) and len(b):
                found[one, other] = found[other, one] = shared / (len(a) + len(b) - shared)
        for member in a:
            marks[member] = 0


class _NoRejects(Rejects):
    """Malformed records are of no interest here."""

    def __init__(self) -> None:
        pass

    def add(self, file: str, row: int, reason: str, record: bytes | dict[str, Any]) -> None:
        pass
