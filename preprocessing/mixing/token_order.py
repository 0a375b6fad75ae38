"""Where each document of a mix is among its tokens, and which document is where.

The order is a function of the seed and the documents' keys, so nothing but decisions is read. Two documents of one part
with equal random numbers, one in 2^64 pairs, may change places.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gristmill.batches import partition_of
from gristmill.counts import HELD_OUT
from gristmill.engine.execution.staging import local_copies
from gristmill.errors import UsageError
from gristmill.io.artefacts import stream_table
from gristmill.io.documents import DocKey
from gristmill.storage.files import is_file
from preprocessing.mixing.decisions import HELD_OUT_COPY, DecidedFile, load_decisions
from preprocessing.mixing.mix_manifest import MixManifest
from preprocessing.mixing.sampling import random_numbers

TRAIN = "train"


@dataclass(frozen=True)
class TokenPlace:
    """A copy of a document: in the train set or the holdout, its number among all documents there, from 0."""

    set_name: str
    number: int


@dataclass(frozen=True)
class _Copies:
    """The copies (n) of one number of the documents of a corpus file that are in one set."""

    file: str
    rows: NDArray[np.int64]
    parts: NDArray[np.int64]
    orders: NDArray[np.uint64]


class DocumentPlaces:
    """The order of the documents of a mix in its token shards, which were shuffled in so many parts.

    `failed` is the table of the documents that have no tokens; there need not be one.
    """

    def __init__(self, mix_dir: Path, parts: int, failed: Path) -> None:
        """Raises UsageError if there is no mix, InputError if it or the table is damaged."""
        self._folder = mix_dir
        self._failed = _rows_by_file(failed) if is_file(failed) else {}
        self._manifest = MixManifest.load(mix_dir)
        self._parts = parts

    def places_of(self, key: DocKey) -> list[TokenPlace]:
        """Return where the copies of a document are; none of one that is not in the mix."""
        return self.places_of_all([key])[key]

    def places_of_all(self, keys: Collection[DocKey]) -> dict[DocKey, list[TokenPlace]]:
        """Return where the copies of documents are; the decisions are read once for all of them."""
        places = {key: list[TokenPlace]() for key in keys}
        rows_of = dict[str, set[int]]()
        for key in keys:
            rows_of.setdefault(key.file, set()).add(key.row)
        for set_name in (TRAIN, HELD_OUT):
            copies_of_keys = list[tuple[DocKey, int, np.uint64]]()  # with the part and the order in it
            for copies in self._copies(set_name, rows_of.keys()):
                rows = np.array(sorted(rows_of[copies.file]), np.int64)
                for at in np.flatnonzero(np.isin(copies.rows, rows)).tolist():
                    key = DocKey(copies.file, int(copies.rows[at]))
                    copies_of_keys.append((key, int(copies.parts[at]), copies.orders[at]))
            numbers = self._numbers_before(set_name, [(part, order) for _, part, order in copies_of_keys])
            for (key, _, _), number in zip(copies_of_keys, numbers, strict=True):
                places[key].append(TokenPlace(set_name, number))
        return places

    def key_at(self, place: TokenPlace) -> DocKey:
        """Return the key of the document at a place. Raises UsageError if there are not so many."""
        return self.keys_at(place.set_name, [place.number])[place.number]

    def keys_at(self, set_name: str, numbers: Iterable[int]) -> dict[int, DocKey]:
        """Return the keys of documents of a set by their numbers. Raises UsageError if there are not so many."""
        sizes = np.zeros(self._parts, np.int64)
        for copies in self._copies(set_name):
            sizes += np.bincount(copies.parts, minlength=self._parts)
        ends = np.cumsum(sizes)
        numbers_in = dict[int, list[int]]()  # by part
        for number in sorted(set(numbers)):
            if not 0 <= number < ends[-1]:
                raise UsageError(f"document {number:,} of {set_name}: expected one from 0 to {ends[-1] - 1:,}")
            numbers_in.setdefault(int(np.searchsorted(ends, number, side="right")), []).append(number)
        keys = {part: list[DocKey]() for part in numbers_in}
        orders = {part: [np.empty(0, np.uint64)] for part in numbers_in}
        for copies in self._copies(set_name):
            for part in np.intersect1d(copies.parts, list(numbers_in)).tolist():
                is_in_part = copies.parts == part
                orders[part].append(copies.orders[is_in_part])
                keys[part] += [DocKey(copies.file, row) for row in copies.rows[is_in_part].tolist()]
        key_of_number = dict[int, DocKey]()
        for part, of_part in numbers_in.items():
            order = np.argsort(np.concatenate(orders[part]), kind="stable")
            before = int(ends[part] - sizes[part])
            for number in of_part:
                key_of_number[number] = keys[part][int(order[number - before])]
        return key_of_number

    def _numbers_before(self, set_name: str, parts_and_orders: Sequence[tuple[int, np.uint64]]) -> list[int]:
        """Return, for parts and orders in them, how many copies in a set are in earlier parts or before in the part."""
        sizes = np.zeros(self._parts + 1, np.int64)
        positions = dict[int, list[int]]()
        for position, (part, _) in enumerate(parts_and_orders):
            positions.setdefault(part, []).append(position)
        if not parts_and_orders:
            return []
        orders = np.array([order for _, order in parts_and_orders], np.uint64)
        numbers = np.zeros(len(orders), np.int64)
        for copies in self._copies(set_name):
            sizes[1:] += np.bincount(copies.parts, minlength=self._parts)
            for part, of_part in positions.items():
                others = np.sort(copies.orders[copies.parts == part])
                numbers[of_part] += np.searchsorted(others, orders[of_part])
        before = np.cumsum(sizes)
        all_numbers: list[int] = (numbers + before[[part for part, _ in parts_and_orders]]).tolist()
        return all_numbers

    def _copies(self, set_name: str, names: Collection[str] | None = None) -> Iterator[_Copies]:
        """Yield the copies in a set, of corpus files of these names or of all, in the order of keys."""
        for decisions in self._manifest.files:
            if names is not None and all(written.file not in names for written in decisions.slices):
                continue
            with local_copies([self._folder / decisions.path]) as (copy,):
                decided_files = load_decisions(copy)
            for decided in decided_files.values():
                if names is None or decided.name in names:
                    yield from self._copies_of(decided, set_name)

    def _copies_of(self, decided: DecidedFile, set_name: str) -> Iterator[_Copies]:
        times = decided.train_copies
        if set_name == HELD_OUT:
            times = (decided.copies == HELD_OUT_COPY).astype(np.int64)
        if decided.name in self._failed:
            times[np.isin(decided.rows, self._failed[decided.name])] = 0
        for copy in range(int(times.max(initial=0))):
            rows = decided.rows[times > copy]
            draws = random_numbers(self._manifest.seed, f"part {copy}", decided.name, rows)
            orders = random_numbers(self._manifest.seed, f"order {copy}", decided.name, rows)
            yield _Copies(decided.name, rows, partition_of(draws, self._parts), orders)


def _rows_by_file(table: Path) -> dict[str, list[int]]:
    """Return the rows of each file that a table of removed documents lists."""
    rows = dict[str, list[int]]()
    with local_copies([table]) as (copy,):
        for some in stream_table(copy, ["file", "row"]):
            for file, row in zip(*some.to_pydict().values(), strict=True):
                rows.setdefault(file, []).append(row)
    return rows
