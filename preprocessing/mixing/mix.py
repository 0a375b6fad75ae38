"""Pass 1: drop what is short or a duplicate, repeat or thin by weight, and scatter the rest over parts."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gristmill.batches import batched
from gristmill.counts import REPEATED, WRITTEN, Counts
from gristmill.engine.partition import partition_of
from gristmill.errors import InputError
from gristmill.io.documents import KEY_FIELD, DocKey, Document
from gristmill.io.files import atomic_write
from gristmill.io.keys import KeySet, is_table, read_keys, stream_keys, stream_table
from gristmill.io.readers import Slice, read_documents
from gristmill.io.writers import Rejects
from gristmill.text import utf8_size
from preprocessing.mixing.sampling import NEVER, Draws, draws
from preprocessing.mixing.shuffle_buckets import Member, PileWriter, write_pile

SHORT = "short"
DUPLICATE = "duplicate"
UNWEIGHTED = "left out by weight"
_BATCH = 512


@dataclass(frozen=True)
class Share:
    """How much of a source goes on: every document `whole` times, and those drawn up to `threshold` once more."""

    whole: int
    threshold: int | None = None

    def copies(self, drawn: Draws) -> NDArray[np.int64]:
        """How often each document is written."""
        copies = np.full(len(drawn), self.whole, np.int64)
        if self.threshold is not None:
            copies += drawn <= np.uint64(self.threshold)
        return copies


@dataclass(frozen=True)
class Drops:
    """The rows of one file that do not go on."""

    short: NDArray[np.int64]
    duplicate: NDArray[np.int64]

    @classmethod
    def load(cls, path: Path) -> "Drops":
        with np.load(path) as stored:
            return cls(stored["short"], stored["duplicate"])

    def reasons(self, rows: NDArray[np.int64]) -> list[str]:
        """Why each row does not go on; '' for those that do. Short comes first: no copy of it is missed."""
        short, duplicate = np.isin(rows, self.short), np.isin(rows, self.duplicate)
        return np.where(short, SHORT, np.where(duplicate, DUPLICATE, "")).tolist()


def write_drops(duplicates: Path | None, short_docs: Path | None, files: list[str], outputs: list[Path]) -> Counts:
    """Divide the key sets by file. A cluster whose kept document is short keeps its next one instead.

    Of sets in .parquet tables only the short documents' keys are in memory, 8 bytes each.
    Raises InputError if a set names a file that the corpus does not have.
    """
    short = read_keys(short_docs) if short_docs else {}
    heirs = find_heirs(duplicates, short) if duplicates else {}
    none, waiting = np.empty(0, np.int64), dict(zip(files, outputs, strict=True))
    _refuse_unknown(short_docs, set(short) - set(files), files)
    for file, rows in stream_keys(duplicates) if duplicates else []:
        _refuse_unknown(duplicates, {file} - set(waiting), files)
        _write_drops(waiting.pop(file), short.get(file, none), np.setdiff1d(rows, heirs.get(file, none)))
    for file, output in waiting.items():
        _write_drops(output, short.get(file, none), none)
    return Counts({}, [])


def _refuse_unknown(path: Path | None, unknown: set[str], files: list[str]) -> None:
    if unknown:
        raise InputError(
            f"{path} names {min(unknown)!r}, a file that the corpus does not have; it has {files[0]!r}, for example. "
            "Was it made from another folder? Names start with the source"
        )


def _write_drops(output: Path, short: NDArray[np.int64], duplicate: NDArray[np.int64]) -> None:
    with atomic_write(output) as temporary, temporary.open("wb") as stored:
        np.savez(stored, short=short, duplicate=duplicate)


def find_heirs(path: Path, short: KeySet) -> KeySet:
    """The duplicates to keep after all, given which documents are short.

    Where the provenance table says that the document kept for a cluster is short, the first of its
    duplicates that is not is spared: no cluster loses its last copy.
    """
    table_path = path.with_suffix(".parquet")
    if not short or (not is_table(path) and not _describes(table_path, read_keys(path))):
        return {}
    numbers, keys = {file: number for number, file in enumerate(sorted(short))}, _packed_keys(short)
    heirs: dict[DocKey, DocKey] = {}
    for table in stream_table(table_path, ["file", "row", "kept_file", "kept_row"]):
        is_short = [_is_among(keys, numbers, table, *names) for names in (("file", "row"), ("kept_file", "kept_row"))]
        for line in table.filter(pa.array(~is_short[0] & is_short[1])).to_pylist():
            key, kept = DocKey(line["file"], line["row"]), DocKey(line["kept_file"], line["kept_row"])
            heirs[kept] = min(key, heirs.get(kept, key))
    found: dict[str, list[int]] = defaultdict(list)
    for heir in heirs.values():
        found[heir.file].append(heir.row)
    return {file: np.array(sorted(rows), np.int64) for file, rows in found.items()}


def _packed_keys(keys: KeySet) -> NDArray[np.uint64]:
    """Keys as integers, ascending: the number of the file in name order above the row's 40 bits."""
    parts = [np.uint64(i << 40) + keys[file].astype(np.uint64) for i, file in enumerate(sorted(keys))]
    return np.concatenate([*parts, np.empty(0, np.uint64)])


def _is_among(
    keys: NDArray[np.uint64], numbers: dict[str, int], table: pa.Table, file: str, row: str
) -> NDArray[np.bool_]:
    """Whether the key in two columns of each line is one of sorted packed `keys`."""
    encoded = table.column(file).combine_chunks().dictionary_encode()
    places = np.array([numbers.get(name, len(numbers)) for name in encoded.dictionary.to_pylist()], np.uint64)
    wanted = (places[encoded.indices.to_numpy()] << np.uint64(40)) + table.column(row).to_numpy().astype(np.uint64)
    at = np.searchsorted(keys, wanted)
    return (at < len(keys)) & (keys[np.minimum(at, len(keys) - 1)] == wanted)


def survey_slice(part: Slice, drops: Path, seed: int, output: Path) -> Counts:
    """Write the weight draws of the documents that are not dropped, to find how far an exact fraction reaches."""
    pieces = [
        draws(seed, "weight", part.name, rows)[[not reason for reason in reasons]]
        for _, rows, reasons in _read(part, drops, Counts({}, []), Rejects(output))
    ]
    with atomic_write(output) as temporary, temporary.open("wb") as file:
        np.save(file, np.concatenate([*pieces, np.empty(0, np.uint64)]))
    return Counts({}, [])


def mix_slice(part: Slice, drops: Path, share: Share, parts: int, seed: int, output: Path) -> Counts:
    """Write the pile of one slice: every document that goes on, as often as its weight asks."""
    counts = Counts({}, [])
    with write_pile(output) as pile:
        for documents, rows, reasons in _read(part, drops, counts, Rejects(output)):
            copies = share.copies(draws(seed, "weight", part.name, rows))
            for document, reason, many in zip(documents, reasons, copies.tolist(), strict=True):
                _count(counts, part.source, utf8_size(document.text), reason, many)
            copies[[bool(reason) for reason in reasons]] = 0
            _scatter(pile, part.name, documents, rows, copies, parts, seed)
    return counts


def _scatter(
    pile: PileWriter,
    file: str,
    documents: list[Document],
    rows: NDArray[np.int64],
    copies: NDArray[np.int64],
    parts: int,
    seed: int,
) -> None:
    """Put copy 0, 1, … of each document into the part and the place that its key draws."""
    for copy in range(int(copies.max(initial=0))):
        part = partition_of(draws(seed, f"part {copy}", file, rows), parts).tolist()
        order = draws(seed, f"order {copy}", file, rows).tolist()
        # Only the first copy may be held out; dedup_train then drops the others from the train set.
        holdout = draws(seed, "holdout", file, rows).tolist() if copy == 0 else [int(NEVER)] * len(rows)
        for i in np.flatnonzero(copies > copy):
            document = documents[i]
            document.fields[KEY_FIELD] = str(document.key)
            pile.add(part[i], Member(document.to_json(), order[i], holdout[i], utf8_size(document.text)))


def _read(
    part: Slice, drops: Path, counts: Counts, rejects: Rejects
) -> Iterator[tuple[list[Document], NDArray[np.int64], list[str]]]:
    """Batches of documents, their rows, and why each does not go on."""
    loaded = Drops.load(drops)
    for documents in batched(read_documents(part, counts, rejects), _BATCH):
        rows = np.array([document.key.row for document in documents], np.int64)
        yield documents, rows, loaded.reasons(rows)


def _count(counts: Counts, source: str, size: int, reason: str, copies: int) -> None:
    if reason or copies == 0:
        counts.add(source, reason or UNWEIGHTED, size)
        return
    counts.add(source, WRITTEN, size * copies, copies)
    if copies > 1:
        counts.add(source, REPEATED, size * (copies - 1), copies - 1)


def _describes(table: Path, removed: KeySet) -> bool:
    """Whether a provenance table lists exactly these duplicates."""
    if not table.is_file():
        return False
    listed = read_keys(table)
    return listed.keys() == removed.keys() and all(np.array_equal(listed[file], removed[file]) for file in removed)


def group_by_source(slices: list[Slice]) -> dict[str, list[Slice]]:
    """Slices of each source, in order."""
    found: dict[str, list[Slice]] = defaultdict(list)
    for part in slices:
        found[part.source].append(part)
    return found


class PassOne(msgspec.Struct, forbid_unknown_fields=True):
    """`pass1.json`: what pass 2 needs to know of pass 1."""

    parts: int
    seed: int
    piles: dict[str, str]  # the pile's path below the folder → its source
    weights: dict[str, float]
