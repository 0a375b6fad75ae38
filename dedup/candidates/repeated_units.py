"""Repeated lines or paragraphs of a corpus: found by a sorted join of their digests, then left out of the documents.

`digest_units` writes the digest of each unit of a group of slices; `join_units` sorts one range of digests of all
groups and writes the units that are repeats; `split_repeats` gives each group its own; `write_without` leaves them out.
A unit is named by its group and its number there, counted over the documents in order.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dedup.candidates.digest_join import DIGEST, is_repeated, sorted_records, with_group
from dedup.candidates.input_shards import Scope
from dedup.minhash.shingles import digest_texts
from gristmill.batches import batched
from gristmill.counts import Counts
from gristmill.engine.slices import SliceGroup, leaves_out_damaged
from gristmill.engine.task import FileSet, Result
from gristmill.io.artefacts import write_rows
from gristmill.io.external_sort import write_records
from gristmill.io.readers import Rejects, read_documents
from gristmill.io.writers import open_jsonl_writer
from gristmill.text import utf8_size

TextUnit = Literal["line", "paragraph"]
KeepUnit = Literal["first", "none"]
EMPTIED = "all of it repeated"
GROUP_UNIT = np.dtype([*DIGEST, ("unit", "<u4")])  # number in the group
CORPUS_UNIT = with_group(GROUP_UNIT)
REPEAT = np.dtype([("group", "<u4"), ("unit", "<u4")])
SCHEMA = pa.schema({"file": pa.string(), "row": pa.int64(), "units": pa.int64(), "bytes": pa.int64(), "of": pa.int64()})
_BATCH_CHARACTERS, _BATCH_UNITS = 4 << 20, 1 << 16  # digested together
_BREAKS = {"line": re.compile(r"\n"), "paragraph": re.compile(r"\n[ \t]*\n\s*")}
_JOINTS = {"line": "\n", "paragraph": "\n\n"}


def split_units(text: str, unit: TextUnit) -> list[str]:
    """The lines of a text, or its paragraphs, between which there is an empty line.

    >>> split_units("One.\\nTwo.\\n\\n\\nThree.", "paragraph")
    ['One.\\nTwo.', 'Three.']
    """
    return _BREAKS[unit].split(text)


def is_compared(unit: str, min_characters: int) -> bool:
    """Whether a unit is long enough, but for spaces around it."""
    return len(unit) >= min_characters and len(unit.strip()) >= max(1, min_characters)


@leaves_out_damaged
def digest_units(group: SliceGroup, unit: TextUnit, min_characters: int, scope: Scope, output: Path) -> Counts:
    """Task: write the GROUP_UNITs of a group of slices, of the units that are compared."""
    counts = Counts({}, [])
    salt = group[0].source.encode() + b"\0" if scope == "per-source" else b""
    found = _iter_units(group, unit, min_characters, counts, Rejects(output))

    def records() -> Iterator[NDArray]:
        for batch in batched(found, _BATCH_UNITS, _BATCH_CHARACTERS, lambda it: len(it[1])):
            numbers, texts = zip(*batch, strict=True)
            block = np.empty(len(batch), GROUP_UNIT)
            block["high"], block["low"] = digest_texts(texts, "bytes", salt).T
            block["unit"] = numbers
            yield block

    write_records(output, records())
    return counts


def _iter_units(
    group: SliceGroup, unit: TextUnit, min_characters: int, counts: Counts, rejects: Rejects
) -> Iterator[tuple[int, str]]:
    number = 0
    for part in group:
        for document in read_documents(part, counts, rejects):
            counts.add(part.source, "digested", utf8_size(document.text))
            for text in split_units(document.text, unit):
                if is_compared(text, min_characters):
                    yield number, text.strip()
                number += 1


def join_units(scattered: FileSet, least: int, keep: KeepUnit, output: Path, memory: int) -> None:
    """Task: write the REPEATs among the CORPUS_UNITs of a digest range, from files in corpus order."""
    units = sorted_records(scattered.paths, CORPUS_UNIT, ("high", "low"), output, memory)
    write_records(output, find_repeats(units, least, keep))


def find_repeats(blocks: Iterable[NDArray], least: int, keep: KeepUnit) -> Iterator[NDArray]:
    """The REPEATs among CORPUS_UNITs sorted by digest: all but the first, or all, of `least` equal units or more.

    >>> units = np.zeros(6, CORPUS_UNIT)
    >>> units["low"], units["unit"] = [5, 5, 5, 6, 7, 7], [0, 3, 8, 1, 2, 4]
    >>> for keep in ("first", "none"):
    ...     [int(unit) for block in find_repeats([units[:2], units[2:]], 3, keep) for unit in block["unit"]]
    [3, 8]
    [0, 3, 8]
    """
    held, before = np.empty(0, CORPUS_UNIT), 0  # of the last digest: units that wait, or the number that are written
    last = np.empty(0, CORPUS_UNIT)
    for block in blocks:
        if not is_repeated(np.concatenate([last, block[:1]]))[-1]:
            held, before = held[:0], 0
        records = np.concatenate([held, block])
        starts = np.flatnonzero(~is_repeated(records))
        sizes = np.diff(np.append(starts, len(records)))
        ranks = np.arange(len(records)) - np.repeat(starts, sizes)
        ranks[: sizes[0]] += before
        totals = sizes.copy()
        totals[0] += before
        chosen = np.repeat(totals >= least, sizes) & ((ranks > 0) | (keep == "none"))
        found = np.empty(int(chosen.sum()), REPEAT)
        found["group"], found["unit"] = records["group"][chosen], records["unit"][chosen]
        yield found
        is_written = totals[-1] >= least
        held, before = (records[:0], int(totals[-1])) if is_written else (records[starts[-1] :], 0)
        last = records[-1:]


def split_repeats(found: FileSet, outputs: tuple[Path, ...], memory: int) -> None:
    """Task: write the numbers of each group's REPEATs, ascending (uint32), to its file of `outputs`."""
    group, held = 0, list[NDArray]()
    for block in sorted_records(found.paths, REPEAT, ("group", "unit"), outputs[0], memory):
        for units in np.split(block, np.flatnonzero(np.diff(block["group"])) + 1):
            while group < units["group"][0]:
                write_records(outputs[group], held)
                group, held = group + 1, []
            held.append(units["unit"].copy())
    for output in outputs[group:]:
        write_records(output, held)
        held = []


@leaves_out_damaged
def write_without(group: SliceGroup, outputs: tuple[Path, ...], unit: TextUnit, repeats: Path, rows: Path) -> Result:
    """Task: write the documents of each slice without their repeats, and a table of what each lost.

    The value is how many units went, and out of how many documents.
    """
    counts, lost, number = Counts({}, []), list[tuple[str, int, int, int, int]](), 0
    left_out = np.fromfile(repeats, np.uint32)
    for part, output in zip(group, outputs, strict=True):
        with open_jsonl_writer(output) as sink:
            for document in read_documents(part, counts, Rejects(output)):
                units, size = split_units(document.text, unit), utf8_size(document.text)
                first, last = np.searchsorted(left_out, [number, number + len(units)])
                gone = {int(place) - number for place in left_out[first:last]}
                number += len(units)
                text = document.text
                if gone:
                    text = _JOINTS[unit].join(it for place, it in enumerate(units) if place not in gone).strip()
                    lost.append((*document.key, len(gone), size - utf8_size(text), len(units)))
                if gone and not text:
                    counts.add(part.source, EMPTIED, size)
                    continue
                document.replace_text(text)
                sink.write(document.to_json())
                counts.add_written(part.source, utf8_size(text), size)
    write_rows(rows, SCHEMA, lost)
    return Result(counts, (sum(row[2] for row in lost), len(lost)))
