"""The items of benchmarks, the index of their n-grams, and the search for them in a text.

Items → words → n-grams, sorted by hash; a text's n-grams are looked up there, and words compared, so that a found
item is there: no filter that errs, and no hash that is trusted. Shorter n-grams find near-duplicates of an item.
"""

import unicodedata
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gristmill.counts import MALFORMED, NO_FIELD, Counts
from gristmill.errors import InputError, wrap_read_errors
from gristmill.io.documents import ONE_SLICE, CorpusFile, slices_at, stem, total_size
from gristmill.io.external_sort import ExternalSorter
from gristmill.io.readers import read_documents
from gristmill.io.text_records import take_text
from gristmill.io.writers import Rejects
from gristmill.storage.local import atomic_write, atomic_write_bytes
from gristmill.storage.stores import store_of
from preprocessing.contamination.near import ITEM_SIZE, NEAR_LENGTH, NearPlace, NearSearch
from preprocessing.contamination.ngrams import TextWords, find_keys, find_words, hash_ngrams

ALL_FIELDS = "{*}"  # template: each field is a text of its own
EACH = "\0"  # between templates whose texts are looked for one by one
LENGTH = 13  # words of an n-gram
SHORTEST = 8  # words of an item that is looked for as a whole, if it has fewer than LENGTH
MAX_ITEMS = 50  # an n-gram of more items than this, as of an instruction, says nothing of any of them
_SALTS = {LENGTH: np.uint64(0), SHORTEST: np.uint64(0x5BD1E9955BD1E995), NEAR_LENGTH: np.uint64(0x9FB21C651E98DF25)}
_NEAR = 1 << 31  # bit of an n-gram's word while the index is made: one for near-duplicates
_BUCKET_BITS = 20  # 8 MB, and few keys of ten million in each

CHECKED_BYTES = 4 << 20  # of benchmarks that are read in full before a run: about a second
_SORT_MEMORY = 32 << 20  # bytes; more n-grams are sorted on disk
_BATCH = 1000  # items whose texts are written together
_WORDS_HELD = 1000  # items whose words are in memory

_NO_KEYS = np.empty(0, np.uint64)
ENTRY = np.dtype([("item", "<u4"), ("word", "<u4")])
_NGRAM = np.dtype([("key", "<u8"), ("item", "<u4"), ("word", "<u4")])
_ITEMS = pa.schema({"benchmark": pa.string(), "item": pa.string(), "text": pa.string()})


class Match(NamedTuple):
    """A place of an item in a text: the item's number, its n-grams in all of the text, characters of the place.

    `share` is that of the item's words in those n-grams. Of a near-duplicate both are of the place, and of short
    n-grams.
    """

    item: int
    ngrams: int
    start: int
    end: int
    share: float
    near: bool

    def is_within(self, other: "Match") -> bool:
        """Return whether another place has all characters of this one."""
        return other.start <= self.start and self.end <= other.end


class IndexSummary(NamedTuple):
    """Sums of an index for a benchmark: items, items shorter than SHORTEST words, and n-grams of too many items.

    The last are n-grams of LENGTH words or of whole items, and n-grams that find near-duplicates.
    """

    items: int
    too_short: int
    shared: int
    near_shared: int


class IndexFiles(NamedTuple):
    """Files of an index: keys of n-grams, ascending (uint64); of each, its item and word (ENTRY); the items' texts.

    `sizes` has how many words each item has, and how many of them are in n-grams that find near-duplicates (ITEM_SIZE).
    """

    keys: Path
    entries: Path
    items: Path
    sizes: Path

    @classmethod
    def in_folder(cls, folder: Path) -> "IndexFiles":
        """Return the paths of the index of a folder."""
        return cls(folder / "keys.bin", folder / "entries.bin", folder / "items.arrow", folder / "sizes.bin")


def write_index(files: Sequence[CorpusFile], index: IndexFiles, near: bool) -> dict[str, IndexSummary]:
    """Write the n-grams of all items and their texts; return what is in them. The n-grams are sorted on disk.

    With `near` also the n-grams that find near-duplicates.

    Raises InputError for a record without the text, or if there is nothing to look for.
    """
    summary = dict[str, IndexSummary]()
    firsts = list[int]()
    lengths = array("I")
    with ExternalSorter(index.keys.with_suffix(".runs"), _NGRAM, _NGRAM.names or (), _SORT_MEMORY) as sorter:
        with atomic_write(index.items) as temporary, pa.ipc.new_file(temporary, _ITEMS) as writer:
            for file in files:
                name = stem(file.name)
                items = 0
                short = 0
                rows = list[tuple[str, str, str]]()
                firsts.append(len(lengths))
                for key, texts in _read_items(file, index.keys):
                    items = items + 1
                    before = len(lengths)
                    for text in texts:
                        words = find_words(text).hashes
                        keys = _exact_keys(words)
                        if len(keys):
                            sorter.add(_ngrams(keys, len(lengths)))
                            if near and len(words) >= LENGTH:
                                sorter.add(_ngrams(_keys(words, NEAR_LENGTH), len(lengths), _NEAR))
                            rows.append((name, key, text))
                            lengths.append(len(words))
                    short += len(lengths) == before
                    if len(rows) >= _BATCH:
                        _write_rows(writer, rows)
                _write_rows(writer, rows)
                summary[name] = IndexSummary(items, short, 0, 0)
        if not lengths:
            read = sum(of_benchmark.items for of_benchmark in summary.values())
            names = ", ".join(summary)
            raise InputError(
                f"--against: expected items of {SHORTEST} words or more, got none in {names} ({read:,} records); "
                "try another --template"
            )
        shared = _write_ngrams(sorter, np.array(firsts), np.array(lengths), index)
    named = zip(summary.items(), shared.tolist(), strict=True)
    with_shared = dict[str, IndexSummary]()
    for (name, item_summary), (shared_exactly, shared_nearly) in named:
        with_shared[name] = item_summary._replace(shared=shared_exactly, near_shared=shared_nearly)
    return with_shared


def _write_rows(writer: pa.ipc.RecordBatchFileWriter, rows: list[tuple[str, str, str]]) -> None:
    """Write rows of items, and forget them."""
    if rows:
        columns = list[pa.Array]()
        for values, field in zip(zip(*rows, strict=True), _ITEMS, strict=True):
            columns.append(pa.array(values, field.type))
        writer.write_batch(pa.record_batch(columns, schema=_ITEMS))
        rows.clear()


def _exact_keys(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the keys of an item's exact n-grams; of a short item that of its beginning, as it is found as a whole."""
    if len(words) >= LENGTH:
        return _keys(words, LENGTH)
    return _keys(words, SHORTEST)[:1]


def _ngrams(keys: NDArray[np.uint64], item: int, mark: int = 0) -> NDArray:
    """Return the n-grams of an item for the sorter, by the words where they begin."""
    ngrams = np.empty(len(keys), _NGRAM)
    ngrams["key"] = keys
    ngrams["item"] = item
    ngrams["word"] = np.arange(len(keys)) | mark
    return ngrams


def _write_ngrams(
    blocks: Iterable[NDArray], firsts: NDArray[np.int64], lengths: NDArray[np.uint32], index: IndexFiles
) -> NDArray[np.int64]:
    """Write sorted n-grams, without n-grams of too many items, and the sizes of items, which have `lengths` words.

    Return how many n-grams of each file, exact and near, are left out (files, 2); `firsts` are the files' first items.
    The n-grams of a key are looked at together: the last key of a block waits for the next one.
    """
    shared = np.zeros((len(firsts), 2), np.int64)
    held = np.empty(0, _NGRAM)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    covered = np.zeros(int(lengths.sum()), np.uint8)  # of each word of all items, whether a near n-gram has it
    with (
        atomic_write(index.keys) as keys_path,
        keys_path.open("wb") as keys,
        atomic_write(index.entries) as entries_path,
        entries_path.open("wb") as entries,
    ):
        for block in chain(blocks, [None]):
            table = held
            end = len(held)
            if block is not None:
                table = np.concatenate([held, block])
                end = int(np.searchsorted(table["key"], table["key"][-1]))
            held = table[end:].copy()
            table = table[:end]
            table = table[_differs(table["key"]) | _differs(table["item"])]  # the first of an item's equal n-grams
            is_shared = _is_shared(table)
            is_near = table["word"] >= _NEAR
            table["word"] &= np.uint32(_NEAR - 1)
            numbers = np.searchsorted(firsts, table["item"][is_shared], "right") - 1
            np.add.at(shared, (numbers, is_near[is_shared].astype(np.int64)), 1)
            places = starts[table["item"]] + table["word"]
            for word in range(NEAR_LENGTH):
                covered[places[is_near & ~is_shared] + word] = 1
            keys.write(np.ascontiguousarray(table["key"][~is_shared]).data)
            written = np.empty(int((~is_shared).sum()), ENTRY)
            written["item"] = table["item"][~is_shared]
            written["word"] = table["word"][~is_shared]
            entries.write(written.view(np.uint8).data)
    sizes = np.empty(len(lengths), ITEM_SIZE)
    sizes["words"] = lengths
    sizes["covered"] = np.add.reduceat(covered, starts, dtype=np.uint32)
    atomic_write_bytes(index.sizes, sizes.tobytes())
    return shared


def check_items(files: Sequence[CorpusFile]) -> None:
    """Raise the InputError that write_index would, before a run starts.

    Of benchmarks of more than CHECKED_BYTES, or of which one is in a bucket, only the first record of each local file
    is read.
    """
    with TemporaryDirectory() as folder:
        local = [file for file in files if not store_of(file.path).needs_copies]
        if total_size(files) <= CHECKED_BYTES and len(local) == len(files):
            write_index(files, IndexFiles.in_folder(Path(folder)), near=False)
            return
        for file in local:
            next(_read_items(file, Path(folder) / "items"), None)


def _read_items(file: CorpusFile, output: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the key of each record and its texts in NFC, as a corpus has them: of the template, or of each field."""
    counts = Counts({}, [])
    (part,) = slices_at(file, ONE_SLICE)
    for document in read_documents(part, counts, Rejects(output)):
        _reject_malformed(counts)
        templates = file.text_column.split(EACH)
        if file.text_column == ALL_FIELDS:
            templates = [f"{{{name}}}" for name in document.fields if name != ALL_FIELDS]
        texts = [take_text(document.fields, template) for template in templates]
        yield str(document.key), [unicodedata.normalize("NFC", text) for text in texts]
    _reject_malformed(counts)


def _reject_malformed(counts: Counts) -> None:
    faults = [reason for reason in counts.reasons if reason.startswith(MALFORMED)]
    if faults:
        advice = "fix or remove the record"
        if NO_FIELD in faults[0]:
            advice = "name the fields that there are, as in --template '{question} {choices}'"
        raise InputError(f"--against: {counts.examples[0]}; {advice}")


def _keys(words: NDArray[np.uint64], length: int) -> NDArray[np.uint64]:
    return hash_ngrams(words, length) ^ _SALTS[length]


def _is_shared(table: NDArray) -> NDArray[np.bool_]:
    """Return for each entry whether more than MAX_ITEMS items have its key."""
    starts = np.flatnonzero(_differs(table["key"]))
    items = np.diff([*starts, len(table)])
    return np.repeat(items > MAX_ITEMS, items)


def _differs(sorted_values: NDArray) -> NDArray[np.bool_]:
    """Return whether each value is another than the one before."""
    differs = np.ones(len(sorted_values), bool)
    differs[1:] = sorted_values[1:] != sorted_values[:-1]
    return differs


class Benchmarks:
    """An index, mapped: all workers share its pages.

    `common` are keys that are not looked for, `common_items` items whose near-duplicates are not. A near-duplicate has
    `near` of an item's words or more; 0: none is looked for.
    """

    def __init__(
        self,
        index: IndexFiles,
        near: float,
        common: NDArray[np.uint64] = _NO_KEYS,
        common_items: NDArray[np.uint64] = _NO_KEYS,
    ) -> None:
        self.keys = _mapped(index.keys, np.dtype("<u8"))
        self.entries = _mapped(index.entries, ENTRY)
        edges = np.arange(1 << _BUCKET_BITS, dtype=np.uint64) << np.uint64(64 - _BUCKET_BITS)
        first_keys = np.searchsorted(self.keys, edges)
        self.buckets = np.append(first_keys, len(self.keys)).astype(np.int64)
        mapped_items = pa.memory_map(str(index.items))
        self.items = pa.ipc.open_file(mapped_items).read_all()
        self.common = common
        self.near: NearSearch | None = None
        if near:
            sizes = _mapped(index.sizes, ITEM_SIZE)
            self.near = NearSearch(self.keys, self.entries, sizes, near, LENGTH, common_items)
        self.words_of = lru_cache(_WORDS_HELD)(self._words_of)

    def keys_in(self, words: TextWords) -> NDArray[np.uint64]:
        """Return the different keys of exact n-grams of the index that a text has, ascending."""
        hits = [hashes[at] for _, hashes, at, _ in self._hits(words)]
        return np.unique(np.concatenate([_NO_KEYS, *hits]))

    def find(self, words: TextWords, min_ngrams: int = 1) -> list[Match]:
        """Return the places of items in the order of the text.

        An item has a place if the text has `min_ngrams` different n-grams of it; near-duplicates are not within such a
        place of their item.
        """
        matches = list(self.find_exact(words, min_ngrams))
        exact_matches = defaultdict[int, list[Match]](list)
        for match in matches:
            exact_matches[match.item].append(match)
        for near in self.find_near(words):
            if not any(near.is_within(exact) for exact in exact_matches[near.item]):
                matches.append(near)
        return sorted(matches, key=lambda match: (match.start, match.item))

    def find_exact(self, words: TextWords, min_ngrams: int) -> Iterator[Match]:
        """Yield the runs of items of which a text has `min_ngrams` different n-grams or more."""
        positions_of_runs = defaultdict[tuple[int, int, int], list[int]](list)
        ngrams = defaultdict[int, set[int]](set)
        for length, _, positions, firsts in self._hits(words):
            for position, first in zip(positions.tolist(), firsts.tolist(), strict=True):
                key = self.keys[first]
                entry = first
                while entry < len(self.keys) and self.keys[entry] == key:
                    item, word = self.entries[entry].item()
                    positions_of_runs[item, position - word, length].append(position)
                    entry += 1
        spans = defaultdict[int, list[tuple[int, int]]](list)
        covered = defaultdict[int, set[int]](set)
        for (item, shift, length), at in positions_of_runs.items():
            for start, end in _runs(at):
                first = start - shift
                count = end - start
                last = end + length - 1
                if length == SHORTEST:  # an item that is too short for an n-gram is looked for as a whole
                    last = start + len(self.words_of(item))
                if self.words_of(item)[first : last - shift] == words.spell(start, last):
                    ngrams[item].update(range(first, first + count))
                    covered[item].update(range(first, last - shift))
                    begin = int(words.starts[start])
                    spans[item].append((begin, int(words.ends[last - 1])))
        for item, spans_of_item in spans.items():
            if len(ngrams[item]) < min_ngrams:
                continue
            share = len(covered[item]) / len(self.words_of(item))
            for span in _joined(spans_of_item):
                yield Match(item, len(ngrams[item]), *span, share, near=False)

    def find_near(self, words: TextWords) -> Iterator[Match]:
        """Yield the near-duplicates of items in a text."""
        if self.near is None:
            return
        for near in self.near.find(self._look_up(_keys(words.hashes, NEAR_LENGTH))):
            ngrams, covered = self._shared_words(near, words.spell(near.best_first, near.best_last))
            if covered >= near.covered:  # fewer only if hashes of different words are equal
                start = int(words.starts[near.first])
                end = int(words.ends[near.last - 1])
                share = near.covered / int(self.near.sizes["covered"][near.item])
                yield Match(near.item, ngrams, start, end, share, near=True)

    def _shared_words(self, near: NearPlace, spelled: list[str]) -> tuple[int, int]:
        """Return how many n-grams of an item are in the best window of a place, and how many words they cover."""
        words = self.words_of(near.item)
        starts_of_ngrams = dict[tuple[str, ...], int]()  # the first of each
        for start in range(len(words) - NEAR_LENGTH + 1):
            starts_of_ngrams.setdefault(tuple(words[start : start + NEAR_LENGTH]), start)
        shared = set[int]()
        covered = set[int]()
        for at in range(len(spelled) - NEAR_LENGTH + 1):
            start_in_item = starts_of_ngrams.get(tuple(spelled[at : at + NEAR_LENGTH]))
            if start_in_item is not None:
                shared.add(start_in_item)
                covered.update(range(start_in_item, start_in_item + NEAR_LENGTH))
        return len(shared), len(covered)

    def _hits(self, words: TextWords) -> Iterator[tuple[int, NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]]:
        """Yield a length of exact n-grams, a text's keys, the positions of those in the index, and their entries."""
        for length in (LENGTH, SHORTEST):
            keys = _keys(words.hashes, length)
            entries = self._look_up(keys)
            entries[np.isin(keys, self.common)] = -1
            (positions,) = np.nonzero(entries >= 0)
            if len(positions):
                yield length, keys, positions, entries[positions]

    def _look_up(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return for each key its first entry in the index, or −1."""
        entries = np.empty(len(keys), np.int64)
        find_keys(keys, self.keys, self.buckets, 64 - _BUCKET_BITS, entries)
        return entries

    def _words_of(self, item: int) -> list[str]:
        text = self.items.column("text")[item].as_py()
        words = find_words(text)
        return words.spell(0, len(words))


def _mapped(path: Path, dtype: np.dtype) -> NDArray:
    """Return the records of a file, whose pages all processes share."""
    with wrap_read_errors(path):
        if not path.stat().st_size:
            return np.empty(0, dtype)
        return np.asarray(np.memmap(path, dtype, "c"))


def _runs(positions: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs of consecutive numbers of an ascending list: the first of each, and the one after its last."""
    start = positions[0]
    for one, following in zip(positions, [*positions[1:], -1], strict=True):
        if following != one + 1:
            yield start, one + 1
            start = following


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans in order; spans that overlap are joined."""
    joined = list[tuple[int, int]]()
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
