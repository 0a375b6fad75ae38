"""Evaluation: precision and recall of the deduplication on a corpus, against exact Jaccard similarity of all pairs.

python benchmarks/eval_dedup.py NORM/ --range 13 8 --bands 9 14
"""

import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import msgspec
import numpy as np
import tyro
from numpy.typing import NDArray
from tyro.conf import Positional

from benchmarks.eval_tables import Documents, Truth, curve_table, digests_of, planted_table, removal_table
from benchmarks.exact_jaccard import similar_pairs
from benchmarks.sample_documents import read_documents_of
from dedup import Sketch, signatures
from dedup.clustering.lsh import check_bands
from dedup.minhash.matching_form import MAX_WORD, WIDTH_WITHOUT_WORDS
from dedup.minhash.shingles import Unit, shingle_sets
from dedup.minhash.signatures import Hash
from gristmill.command import run_with_exit_code
from gristmill.errors import InputError, UsageError, wrap_read_errors
from gristmill.io.text_records import decode_value
from gristmill.text import matching_form

_MAX_CHECKED_PAIRS = 200  # pairs whose similarity is checked against Python sets


def eval_dedup(
    inputs: Positional[tuple[Path, ...]],
    format: Literal["documents", "lines"] = "documents",
    truth: Path | None = None,
    hash: Hash = "xxh32",
    width: int = 13,
    unit: Unit = "character",
    permutations: int = 128,
    range: tuple[int, ...] = (13,),
    bands: tuple[int, ...] = (9,),
    threshold: float = 0.8,
    least: float = 0.5,
    seeds: int = 8,
    documents: int | None = None,
) -> None:
    """Measure detection, removal and missed duplicates, with the exact similarity of all pairs as ground truth.

    Args:
        inputs: Corpus folders or files (.jsonl, .jsonl.zst, …); with --format lines, text files.
        format: documents, or lines: `<id> <text…>` per line.
        truth: File of planted pairs, `<id> <id>` per line; a document's id is its field `id`, or <file>@<row>.
        hash: Hash family, as in to_hash.
        width: Units (characters or words) per shingle.
        unit: character or word.
        permutations: Length of a signature.
        range: Rows per band; several values are compared, each paired with a value of --bands.
        bands: Number of bands; as many values as --range.
        threshold: Minimum similarity of a duplicate.
        least: Minimum similarity of the pairs in the detection table.
        seeds: Number of seeds for detection, from 1; removal is measured with seed 1.
        documents: Sample this many documents, if the corpus is too large to compare all pairs; by default all.
    """
    if len(range) != len(bands) or seeds < 1 or not 0 < least <= threshold <= 1:
        raise UsageError(
            f"--range {range} --bands {bands} --seeds {seeds} --least {least} --threshold {threshold}: give a number "
            "of bands for each range, 1 seed or more, and 0 < least ≤ threshold ≤ 1"
        )
    for rows, many in zip(range, bands, strict=True):
        check_bands(rows, many, permutations)
    given = read_inputs(inputs, format, documents)
    planted = read_planted(truth, given.ids) if truth else None
    sketches = _sketches(Sketch(hash, width, permutations, 1, unit), seeds)
    known = _ground_truth(given, sketches[0], least)
    print(_describe(given, known, sketches[0]), flush=True)
    settings = list(zip(range, bands, strict=True))
    signed = [signatures(given.texts, sketch) for sketch in sketches]
    for rows, many in settings:
        print(curve_table(known, [digests_of(*one, rows, many) for one in signed], rows, many), flush=True)
    print(removal_table(given, known, sketches[0], settings, threshold), flush=True)
    if planted is not None:
        print(planted_table(known, sketches[0], signed[0], settings, planted, given), flush=True)


def _sketches(sketch: Sketch, seeds: int) -> list[Sketch]:
    return [replace(sketch, seed=seed) for seed in range(1, seeds + 1)]


def read_inputs(inputs: Sequence[Path], format: str, most: int | None) -> Documents:
    """Read the documents of all inputs in order, or a sample of `most` of them, drawn with a fixed seed."""
    rows = list(_read_lines(inputs) if format == "lines" else _read_records(inputs))
    if most is not None and most < len(rows):
        rows = [rows[i] for i in sorted(random.Random(0).sample(range(len(rows)), most))]
    if not rows:
        raise UsageError(f"{', '.join(map(str, inputs)) or 'nothing'}: no documents to compare: give a corpus")
    ids, texts = zip(*rows, strict=True)
    return Documents(list(texts), list(ids))


def _read_lines(inputs: Sequence[Path]) -> Iterator[tuple[str, str]]:
    for path in inputs:
        for line in _lines_of(path):
            name, _, text = line.partition(" ")
            yield name, text


def _lines_of(path: Path) -> list[str]:
    with wrap_read_errors(path):
        try:
            return [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8 text ({error}): convert it") from error


def _read_records(inputs: Sequence[Path]) -> Iterator[tuple[str, str]]:
    for document in read_documents_of(inputs):
        own = document.fields.get("id", document.key)
        yield str(decode_value(own) if isinstance(own, msgspec.Raw) else own), document.text


def read_planted(path: Path, ids: Sequence[str]) -> NDArray[np.int64]:
    """Pairs (n × 2) of document indices, from a file of `<id> <id>` lines."""
    number = {name: i for i, name in enumerate(ids)}
    found = []
    for line in _lines_of(path):
        names = line.split()
        if len(names) != 2 or not all(name in number for name in names):
            raise InputError(f"{path}: {line[:80]!r}: each line needs the ids of two documents of the corpus")
        found.append([number[name] for name in names])
    return np.array(found, np.int64).reshape(-1, 2)


def _ground_truth(given: Documents, sketch: Sketch, least: float) -> Truth:
    """Similarity of all pairs; a sample of them is checked against Python sets."""
    sets = shingle_sets(given.texts, sketch.width, sketch.unit)
    pairs, similarity = similar_pairs(sets, least)
    step = max(1, len(pairs) // _MAX_CHECKED_PAIRS)
    for (i, j), found in zip(pairs[::step].tolist(), similarity[::step].tolist(), strict=True):
        one, other = (plain_shingles(given.texts[k], sketch.width, sketch.unit) for k in (i, j))
        assert math.isclose(found, len(one & other) / len(one | other)), (given.ids[i], given.ids[j])
    return Truth(sets, pairs, similarity)


def plain_shingles(text: str, width: int, unit: str) -> set[str]:
    """Shingles of a text as Python strings: the reference implementation."""
    form = matching_form(text)
    units: Sequence[str] = form.split() if unit == "word" else form
    joint = " " if unit == "word" else ""
    if unit == "word" and sum(map(len, units)) > MAX_WORD * len(units):
        units, joint, width = form, "", WIDTH_WITHOUT_WORDS
    return {joint.join(units[i : i + width]) for i in range(len(units) - width + 1)}


def _describe(given: Documents, known: Truth, sketch: Sketch) -> str:
    none = sum(len(one) == 0 for one in known.sets)
    return (
        f"{len(given.texts):,} documents ({none:,} shorter than a shingle), shingles of {sketch.width} {sketch.unit}s, "
        f"{sketch.hash}, {sketch.permutations} slots: {len(known.pairs):,} pairs at or above the least similarity\n"
    )


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: tyro.cli(eval_dedup, use_underscores=True)))
