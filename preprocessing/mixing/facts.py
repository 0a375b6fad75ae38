"""Facts of documents that a mix is decided by: the row, size and digest of each, and its tokens if they were counted.

They are read from the facts of a pass (gristmill.io.facts) with the step TextDigest, and TokenCount for amounts of
tokens.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gristmill.errors import InputError
from gristmill.io.documents import source_of
from gristmill.io.facts import SUFFIX, FactsFile, WrittenSlice, written_by_file
from gristmill.steps import TOKENS
from preprocessing.scoring.score_choice import ScoreBands
from preprocessing.steps.text_digest import DIGEST, TEXT_DIGEST, text_digests


@dataclass(frozen=True)
class MixFacts:
    """Facts of the documents (n) of one corpus file: row, UTF-8 bytes, tokens (0 if not counted), digest of text.

    `bands` is the number of the band of its score; 0 without bands.
    """

    name: str
    rows: NDArray[np.int64]
    sizes: NDArray[np.int64]
    tokens: NDArray[np.int64]
    digests: NDArray[np.bytes_]
    bands: NDArray[np.int64]


def load_facts(
    path: Path,
    names: Sequence[str],
    has_tokens: bool,
    bands: ScoreBands | None = None,
    scored: Sequence[Path] | None = None,
) -> list[MixFacts]:
    """Return the facts of the corpus files `names`, in this order, from a file of facts.

    Scores that bands are decided by are in it, or in the files of facts `scored`, with scores of some documents.
    Raises InputError if it has facts of another file, or no such facts.
    """
    columns = ["bytes", *TEXT_DIGEST]
    if has_tokens:
        columns.append(TOKENS)
    if bands and scored is None:
        columns.extend(bands.facts)
    tables = defaultdict[str, list[pa.Table]](list)
    for name, table in written_by_file(path, columns):
        if name not in names:
            raise InputError(f"{path} has facts of {name!r}; expected {', '.join(names)}: remove it, and run again")
        tables[name].append(table)
    scores = tables
    if bands and scored is not None:
        scores = _read_scores(scored, names, bands)
    facts = list[MixFacts]()
    for name in names:
        facts.append(_join(name, tables[name], has_tokens, bands, scores[name]))
    return facts


def _read_scores(scored: Sequence[Path], names: Sequence[str], bands: ScoreBands) -> defaultdict[str, list[pa.Table]]:
    """Return tables of the rows and scores of the documents of each corpus file, as far as files of facts have them."""
    tables = defaultdict[str, list[pa.Table]](list)
    for path in scored:
        for name, table in written_by_file(path, bands.facts):
            if name in names:
                tables[name].append(table)
    return tables


def _join(
    name: str,
    tables: Sequence[pa.Table],
    has_tokens: bool,
    bands: ScoreBands | None,
    scores: Sequence[pa.Table],
) -> MixFacts:
    if not tables:
        empty = np.empty(0, np.int64)
        return MixFacts(name, empty, empty, empty, np.empty(0, DIGEST), empty)
    table = pa.concat_tables(tables)
    rows = table.column("row").to_numpy()
    tokens = np.zeros(len(rows), np.int64)
    if has_tokens:
        tokens = table.column(TOKENS).to_numpy()
    of_bands = np.zeros(len(rows), np.int64)
    if bands and scores:
        scored = pa.concat_tables(scores)
        is_in_file = np.isin(scored.column("row").to_numpy(), rows)
        in_order = scored.filter(pa.array(is_in_file))
        noted = dict[str, NDArray[np.float32]]()
        for fact in bands.facts:
            noted[fact] = in_order.column(fact).to_numpy()
        is_scored = np.isin(rows, in_order.column("row").to_numpy())
        of_bands[is_scored] = bands.find(source_of(name), noted)
    return MixFacts(name, rows, table.column("bytes").to_numpy(), tokens, text_digests(table), of_bands)


@dataclass(frozen=True)
class GroupFacts:
    """The documents of one file of facts: their source and corpus files; where their facts and drops are."""

    label: str
    source: str
    names: tuple[str, ...]
    facts: Path
    drops: Path
    has_tokens: bool
    bands: ScoreBands | None = None
    scored: tuple[Path, ...] | None = None

    @classmethod
    def of(
        cls,
        file: FactsFile,
        facts_dir: Path,
        drops: Path,
        has_tokens: bool,
        bands: ScoreBands | None = None,
        scored: tuple[Path, ...] | None = None,
    ) -> "GroupFacts":
        """Return the documents of a file of facts; `scored`: see load_facts."""
        names = file.corpus_files
        label = file.path.removesuffix(SUFFIX)
        source = source_of(names[0])
        own_bands = bands.of_source(source) if bands else None
        return cls(label, source, names, facts_dir / file.path, drops, has_tokens, own_bands, scored)

    def load(self) -> list[MixFacts]:
        """Return the facts of each corpus file, in order."""
        return load_facts(self.facts, self.names, self.has_tokens, self.bands, self.scored)


class FactsByFile:
    """The files of facts in a folder, by the names of the corpus files that they have documents of."""

    def __init__(self, files: Sequence[FactsFile], folder: Path) -> None:
        self._of = dict[str, list[tuple[WrittenSlice, Path]]]()
        for file in files:
            for part in file.slices:
                self._of.setdefault(part.file, []).append((part, folder / file.path))

    def overlapping(self, file: FactsFile) -> tuple[Path, ...]:
        """Return the files, in order, with some of the documents that another file of facts has."""
        paths = dict[Path, None]()
        for part in file.slices:
            for other, path in self._of.get(part.file, []):
                if other.first < part.end and other.end > part.first:
                    paths[path] = None
        return tuple(paths)


def is_kept(facts: MixFacts, reasons: Sequence[str]) -> NDArray[np.bool_]:
    """Return whether each document (n) is kept, given the reason to drop it, or none."""
    return np.array([not reason for reason in reasons], np.bool_).reshape(len(facts.rows))
