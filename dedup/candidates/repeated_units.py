"""Repeated lines or paragraphs of a corpus: found by a sorted join of their digests, then left out of the documents.

`digest_units` writes the digest of each unit of a group of slices; `join_units` sorts one range of digests of all
groups and writes the units that are repeats; `split_repeats` gives each group its own; `write_without_repeats` leaves
them out.
A unit is named by its group and its number there, counted over the documents in order.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dedup.candidates.digest_join import DIGEST, is_repeated, sorted_records, with_group
from dedup.candidates.exact_copies import salt_of
from dedup.candidates.input_shards import Scope
from dedup.candidates.text_units import TextUnit, is_compared, split_units, without_units
from dedup.minhash.shingles import digest_texts
from gristmill.arguments import one_of
from gristmill.batches import batched
from gristmill.counts import Counts
from gristmill.engine.slices import SliceGroup, leaves_out_damaged
from gristmill.engine.task import FileSet, Result
from gristmill.errors import UsageError
from gristmill.io.artefacts import write_rows
from gristmill.io.external_sort import write_records
from gristmill.io.readers import read_documents
from gristmill.io.writers import Rejects, open_jsonl_writer
from gristmill.text import utf8_size

KeepUnit = Literal["first", "none"]
CountBy = Literal["occurrence", "document"]
EMPTIED = "all of it repeated"
GROUP_UNIT = np.dtype([*DIGEST, ("unit", "<u4"), ("document", "<u4")])  # numbers in the group
CORPUS_UNIT = with_group(GROUP_UNIT)
REPEAT = np.dtype([("group", "<u4"), ("unit", "<u4")])
SCHEMA = pa.schema(
    {
        "file": pa.string(),
        "row": pa.int64(),
        "units": pa.int64(),
        "bytes": pa.int64(),
        "of": pa.int64(),
        "removed": pa.bool_(),
    }
)
_BATCH_CHARACTERS = 4 << 20  # that are digested together
_BATCH_UNITS = 1 << 16  # that are digested together


def check_left_alone(leave_alone: Sequence[str], sources: Collection[str]) -> None:
    """Raise UsageError for a source that the corpus has not."""
    for name in leave_alone:
        if name not in sources:
            raise UsageError(
                f"--leave_alone: expected sources of the corpus, got {name!r}; {one_of(name, sorted(sources))}"
            )


@leaves_out_damaged
def digest_units(
    group: SliceGroup, unit: TextUnit, min_characters: int, scope: Scope, leave_alone: tuple[str, ...], output: Path
) -> Counts:
    """Task: write the GROUP_UNITs of a group of slices, of the units that are compared.

    Units of the sources in `leave_alone` are numbered, but not compared.
    """
    counts = Counts({}, [])
    salt = salt_of(group[0].source, scope)
    min_compared = None if group[0].source in leave_alone else min_characters
    compared = _iter_units(group, unit, min_compared, counts, Rejects(output))

    def records() -> Iterator[NDArray]:
        for batch in batched(compared, _BATCH_UNITS, _BATCH_CHARACTERS, lambda item: len(item[2])):
            units, documents, texts = zip(*batch, strict=True)
            digests = digest_texts(texts, "bytes", salt)
            block = np.empty(len(batch), GROUP_UNIT)
            block["high"] = digests[:, 0]
            block["low"] = digests[:, 1]
            block["unit"] = units
            block["document"] = documents
            yield block

    write_records(output, records())
    return counts


def _iter_units(
    group: SliceGroup, unit: TextUnit, min_characters: int | None, counts: Counts, rejects: Rejects
) -> Iterator[tuple[int, int, str]]:
    """Yield each unit to compare: its number in the group, that of its document, and its text.

    Without `min_characters` none is compared.
    """
    unit_number = 0
    document_number = 0
    for part in group:
        for document in read_documents(part, counts, rejects):
            counts.add(part.source, "digested", utf8_size(document.text))
            for text in split_units(document.text, unit)[::2]:
                if min_characters is not None and is_compared(text, min_characters):
                    yield unit_number, document_number, text.strip()
                unit_number += 1
            document_number += 1


def join_units(
    scattered: FileSet, min_count: int, keep: KeepUnit, count_by: CountBy, output: Path, memory: int
) -> None:
    """Task: write the REPEATs among the CORPUS_UNITs of a digest range, from files in corpus order."""
    units = sorted_records(scattered.paths, CORPUS_UNIT, ("high", "low"), output, memory)
    write_records(output, find_repeats(units, min_count, keep, count_by))


def find_repeats(
    blocks: Iterable[NDArray], min_count: int, keep: KeepUnit, count_by: CountBy = "occurrence"
) -> Iterator[NDArray]:
    """Yield REPEATs among CORPUS_UNITs sorted by digest: of `min_count` equal units or more all but the first, or all.

    Counted by document, units of one document count once, and the first document keeps all of its own.

    >>> units = np.zeros(6, CORPUS_UNIT)
    >>> units["low"], units["unit"] = [5, 5, 5, 6, 7, 7], [0, 3, 8, 1, 2, 4]
    >>> for keep in ("first", "none"):
    ...     [int(unit) for block in find_repeats([units[:2], units[2:]], 3, keep) for unit in block["unit"]]
    [3, 8]
    [0, 3, 8]
    """
    held = np.empty(0, CORPUS_UNIT)  # units of the last digest that wait until they are enough to be written
    before = 0  # units of the last digest that were counted, once they were written
    last = np.empty(0, CORPUS_UNIT)
    for block in blocks:
        if not is_repeated(np.concatenate([last, block[:1]]))[-1]:
            held = held[:0]
            before = 0
        records = np.concatenate([held, block])
        is_first = ~is_repeated(records)
        starts = np.flatnonzero(is_first)
        sizes = np.diff(np.append(starts, len(records)))
        is_counted = np.ones(len(records), bool)
        if count_by == "document":
            is_counted = is_first | _changes_document(records)
            is_counted[0] = not before or _changes_document(np.concatenate([last, records[:1]]))[-1]
        counted = np.cumsum(is_counted)
        ranks = counted - 1 - np.repeat(counted[starts] - is_counted[starts], sizes)
        ranks[: sizes[0]] += before
        totals = np.add.reduceat(is_counted, starts, dtype=np.int64)
        totals[0] += before
        chosen = np.repeat(totals >= min_count, sizes) & ((ranks > 0) | (keep == "none"))
        repeats = np.empty(int(chosen.sum()), REPEAT)
        repeats["group"] = records["group"][chosen]
        repeats["unit"] = records["unit"][chosen]
        yield repeats
        if totals[-1] >= min_count:  # the last digest's units were written
            held = records[:0]
            before = int(totals[-1])
        else:
            held = records[starts[-1] :]
            before = 0
        last = records[-1:]


def _changes_document(records: NDArray) -> NDArray[np.bool_]:
    """Return for each of the records (n) whether it is of another document than the one before it."""
    changes = np.ones(len(records), bool)
    same_group = records["group"][1:] == records["group"][:-1]
    changes[1:] = ~(same_group & (records["document"][1:] == records["document"][:-1]))
    return changes


def split_repeats(repeats: FileSet, outputs: tuple[Path, ...], memory: int) -> None:
    """Task: write the numbers of each group's REPEATs, ascending (uint32), to its file of `outputs`."""
    group = 0
    held = list[NDArray]()
    for block in sorted_records(repeats.paths, REPEAT, ("group", "unit"), outputs[0], memory):
        for units in np.split(block, np.flatnonzero(np.diff(block["group"])) + 1):
            while group < units["group"][0]:
                write_records(outputs[group], held)
                group = group + 1
                held = []
            held.append(units["unit"].copy())
    for output in outputs[group:]:
        write_records(output, held)
        held = []


@leaves_out_damaged
def write_without_repeats(
    group: SliceGroup, outputs: tuple[Path, ...], unit: TextUnit, repeats: Path, rows: Path
) -> Result:
    """Task: write the documents of each slice without their repeats, and a table of what each lost.

    The value is how many units went, and out of how many documents.
    """
    counts = Counts({}, [])
    lost = list[tuple[str, int, int, int, int, bool]]()
    removed_units = 0
    first = 0  # number of the document's first unit in the group
    left_out = np.fromfile(repeats, np.uint32)
    for part, output in zip(group, outputs, strict=True):
        with open_jsonl_writer(output) as sink:
            for document in read_documents(part, counts, Rejects(output)):
                text = document.text
                size = utf8_size(text)
                pieces = split_units(text, unit)
                units = len(pieces) // 2 + 1
                start, end = np.searchsorted(left_out, [first, first + units])
                removed = {int(number) - first for number in left_out[start:end]}
                first += units
                is_emptied = False
                if removed:
                    text = without_units(pieces, removed)
                    is_emptied = not text.strip()
                    removed_units += len(removed)
                    lost.append((*document.key, len(removed), size - utf8_size(text), units, is_emptied))
                if is_emptied:
                    counts.add(part.source, EMPTIED, size)
                    continue
                document.replace_text(text)
                sink.write(document.to_json())
                counts.add_written(part.source, utf8_size(text), size)
    write_rows(rows, SCHEMA, lost)
    return Result(counts, (removed_units, len(lost)))
