"""The items of benchmarks, the index of their n-grams, and the search for them in a text.

Items → words → n-grams, sorted by hash; a text's n-grams are looked up there, and words compared, so that a found
item is there: no filter that errs, and no hash that is trusted.
"""

import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gristmill.counts import MALFORMED, NO_FIELD, Counts
from gristmill.errors import InputError, wrap_read_errors
from gristmill.io.documents import ONE_SLICE, CorpusFile, slices_at, stem
from gristmill.io.external_sort import ExternalSorter
from gristmill.io.readers import read_documents
from gristmill.io.text_records import take_text
from gristmill.io.writers import Rejects
from gristmill.storage.local import atomic_write
from gristmill.urls import is_remote
from preprocessing.contamination.ngrams import ALONE, TextWords, find_keys, find_words, fold_table, hash_ngrams

ALL_FIELDS = "{*}"  # template: each field is a text of its own
EACH = "\0"  # between templates whose texts are looked for one by one
LENGTH = 13  # words of an n-gram
SHORTEST = 8  # words of an item that is looked for as a whole, if it has fewer than LENGTH
MOST_ITEMS = 50  # an n-gram of more items than this, as of an instruction, says nothing of any of them
_SHORT = np.uint64(0x5BD1E9955BD1E995)  # marks hashes of SHORTEST words
_BUCKET_BITS = 20  # 8 MB, and few keys of ten million in each

_SORT_MEMORY = 32 << 20  # bytes; more n-grams are sorted on disk
_BATCH = 1000  # items whose texts are written together

ENTRY = np.dtype([("item", "<u4"), ("word", "<u4")])
_NGRAM = np.dtype([("key", "<u8"), ("item", "<u4"), ("word", "<u4")])
_ITEMS = pa.schema({"benchmark": pa.string(), "item": pa.string(), "text": pa.string()})


class Match(NamedTuple):
    """A place of an item in a text: the item's number, its n-grams in all of the text, characters of the place."""

    item: int
    ngrams: int
    start: int
    end: int


class IndexSummary(NamedTuple):
    """What an index has of a benchmark: items, those shorter than SHORTEST words, and n-grams of too many items."""

    items: int
    too_short: int
    shared: int


class IndexFiles(NamedTuple):
    """Files of an index: keys of n-grams, ascending (uint64); of each, its item and word (ENTRY); the items' texts."""

    keys: Path
    entries: Path
    items: Path


def write_index(files: Sequence[CorpusFile], index: IndexFiles) -> dict[str, IndexSummary]:
    """Write the n-grams of all items and their texts; return what is in them. The n-grams are sorted on disk.

    Raises InputError for a record without the text, or if there is nothing to look for.
    """
    summary, firsts, count = dict[str, IndexSummary](), list[int](), 0
    with ExternalSorter(index.keys.with_suffix(".runs"), _NGRAM, _NGRAM.names or (), _SORT_MEMORY) as sorter:
        with atomic_write(index.items) as temporary, pa.ipc.new_file(temporary, _ITEMS) as writer:
            for file in files:
                name, items, short, rows = stem(file.name), 0, 0, list[tuple[str, str, str]]()
                firsts.append(count)
                for key, texts in _read_items(file, index.keys):
                    items, before = items + 1, count
                    for text in texts:
                        words = find_words(text).hashes
                        keys = _keys(words, LENGTH) if len(words) >= LENGTH else _keys(words, SHORTEST)[:1]
                        if len(keys):
                            found = np.empty(len(keys), _NGRAM)
                            found["key"], found["item"], found["word"] = keys, count, np.arange(len(keys))
                            sorter.add(found)
                            rows.append((name, key, text))
                            count += 1
                    short += count == before
                    if len(rows) >= _BATCH:
                        _write_rows(writer, rows)
                _write_rows(writer, rows)
                summary[name] = IndexSummary(items, short, 0)
        if not count:
            read, names = sum(it.items for it in summary.values()), ", ".join(summary)
            raise InputError(
                f"--against: expected items of {SHORTEST} words or more, got none in {names} ({read:,} records); "
                "try another --template"
            )
        shared = _write_ngrams(sorter, np.array(firsts), index)
    found_names = zip(summary.items(), shared.tolist(), strict=True)
    return {name: its._replace(shared=ngrams) for (name, its), ngrams in found_names}


def _write_rows(writer: pa.ipc.RecordBatchFileWriter, rows: list[tuple[str, str, str]]) -> None:
    """Write rows of items, and forget them."""
    if rows:
        columns = zip(zip(*rows, strict=True), _ITEMS, strict=True)
        writer.write_batch(pa.record_batch([pa.array(it, field.type) for it, field in columns], schema=_ITEMS))
        rows.clear()


def _write_ngrams(blocks: Iterable[NDArray], firsts: NDArray[np.int64], index: IndexFiles) -> NDArray[np.int64]:
    """Write sorted n-grams but for those of too many items; how many these are, of each file, which has its first item.

    The n-grams of a key are looked at together: the last key of a block waits for the next one.
    """
    shared, held = np.zeros(len(firsts), np.int64), np.empty(0, _NGRAM)
    with ExitStack() as stack:
        keys, entries = (
            stack.enter_context(stack.enter_context(atomic_write(path)).open("wb"))
            for path in (index.keys, index.entries)
        )
        for block in chain(blocks, [None]):
            table = held if block is None else np.concatenate([held, block])
            end = len(table) if block is None else int(np.searchsorted(table["key"], table["key"][-1]))
            table, held = table[:end], table[end:].copy()
            table = table[_differs(table["key"]) | _differs(table["item"])]  # the first of an item's equal n-grams
            is_shared = _is_shared(table)
            numbers = np.searchsorted(firsts, table["item"][is_shared], "right") - 1
            shared += np.bincount(numbers, minlength=len(firsts))
            keys.write(np.ascontiguousarray(table["key"][~is_shared]).data)
            found = np.empty(int((~is_shared).sum()), ENTRY)
            found["item"], found["word"] = table["item"][~is_shared], table["word"][~is_shared]
            entries.write(found.view(np.uint8).data)
    return shared


def check_first_items(files: Sequence[CorpusFile]) -> None:
    """Raise InputError if the first record of a file has not the text; files in a bucket are not read."""
    with TemporaryDirectory() as folder:
        for file in (file for file in files if not is_remote(file.path)):
            next(_read_items(file, Path(folder) / "items"), None)


def _read_items(file: CorpusFile, output: Path) -> Iterator[tuple[str, list[str]]]:
    """The key of each record and its texts in NFC, as a corpus has them: that of the template, or of each field."""
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
        fields = "name the fields that there are, as in --template '{question} {choices}'"
        advice = fields if NO_FIELD in faults[0] else "mend or remove the record"
        raise InputError(f"--against: {counts.examples[0]}; {advice}")


def _keys(words: NDArray[np.uint64], length: int) -> NDArray[np.uint64]:
    hashes = hash_ngrams(words, length)
    return hashes ^ _SHORT if length == SHORTEST else hashes


def _is_shared(table: NDArray) -> NDArray[np.bool_]:
    """Of each entry whether more than MOST_ITEMS items have its key."""
    starts = np.flatnonzero(_differs(table["key"]))
    items = np.diff([*starts, len(table)])
    return np.repeat(items > MOST_ITEMS, items)


def _differs(sorted_values: NDArray) -> NDArray[np.bool_]:
    """Whether each value is another than the one before."""
    found = np.ones(len(sorted_values), bool)
    found[1:] = sorted_values[1:] != sorted_values[:-1]
    return found


class Benchmarks:
    """An index, mapped: all workers share its pages. `common` are keys that are not looked for."""

    def __init__(self, index: IndexFiles, common: NDArray[np.uint64] | None = None) -> None:
        self.keys, self.entries = _mapped(index.keys, np.dtype("<u8")), _mapped(index.entries, ENTRY)
        edges = np.arange(1 << _BUCKET_BITS, dtype=np.uint64) << np.uint64(64 - _BUCKET_BITS)
        self.buckets = np.append(np.searchsorted(self.keys, edges), len(self.keys)).astype(np.int64)
        self.items = pa.ipc.open_file(pa.memory_map(str(index.items))).read_all()
        self.common = np.empty(0, np.uint64) if common is None else common
        self.words_of = cache(self._words_of)

    def keys_in(self, words: TextWords) -> NDArray[np.uint64]:
        """The different keys of the index that a text has, ascending."""
        hits = [hashes[at] for _, hashes, at, _ in self._hits(words)]
        return np.unique(np.concatenate([np.empty(0, np.uint64), *hits]))

    def find(self, text: str, words: TextWords, least: int = 1) -> list[Match]:
        """The runs of items of which a text has `least` different n-grams or more, in the order of the text."""
        found, ngrams = defaultdict[tuple[int, int, int], list[int]](list), defaultdict[int, set[int]](set)
        for length, _, positions, firsts in self._hits(words):
            for position, first in zip(positions.tolist(), firsts.tolist(), strict=True):
                key, entry = self.keys[first], first
                while entry < len(self.keys) and self.keys[entry] == key:
                    item, word = self.entries[entry].item()
                    found[item, position - word, length].append(position)
                    entry += 1
        spans = defaultdict[int, list[tuple[int, int]]](list)
        for (item, shift, length), at in found.items():
            for start, end in _runs(at):
                first, count = start - shift, end - start
                # an item that is too short for an n-gram is looked for as a whole
                last = start + len(self.words_of(item)) if length == SHORTEST else end + length - 1
                if self.words_of(item)[first : last - shift] == _spell(text, words, start, last):
                    ngrams[item].update(range(first, first + count))
                    spans[item].append((int(words.starts[start]), int(words.ends[last - 1])))
        kept = [item for item in spans if len(ngrams[item]) >= least]
        matches = [Match(item, len(ngrams[item]), *span) for item in kept for span in _joined(spans[item])]
        return sorted(matches, key=lambda match: (match.start, match.item))

    def _hits(self, words: TextWords) -> Iterator[tuple[int, NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]]:
        """For each length of n-grams: it, the text's keys, where it has one of the index, and that one's entry."""
        for length in (LENGTH, SHORTEST):
            keys = _keys(words.hashes, length)
            found = np.empty(len(keys), np.int64)
            find_keys(keys, self.keys, self.buckets, 64 - _BUCKET_BITS, found)
            found[np.isin(keys, self.common)] = -1
            (positions,) = np.nonzero(found >= 0)
            if len(positions):
                yield length, keys, positions, found[positions]

    def _words_of(self, item: int) -> list[str]:
        text = self.items.column("text")[item].as_py()
        words = find_words(text)
        return _spell(text, words, 0, len(words))


def _mapped(path: Path, dtype: np.dtype) -> NDArray:
    """The records of a file, whose pages all processes share."""
    with wrap_read_errors(path):
        return np.asarray(np.memmap(path, dtype, "c")) if path.stat().st_size else np.empty(0, dtype)


def _runs(positions: list[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers of an ascending list: the first of each, and the one after its last."""
    start = positions[0]
    for one, following in zip(positions, [*positions[1:], -1], strict=True):
        if following != one + 1:
            yield start, one + 1
            start = following


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, those that overlap as one."""
    joined = list[tuple[int, int]]()
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _spell(text: str, words: TextWords, first: int, last: int) -> list[str]:
    """Words of a text as they are compared."""
    table, spans = fold_table(), zip(words.starts[first:last].tolist(), words.ends[first:last].tolist(), strict=True)
    return ["".join(chr(int(table[ord(letter)]) & (ALONE - 1)) for letter in text[start:end]) for start, end in spans]
