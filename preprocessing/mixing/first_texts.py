"""Texts as the first stage of a run wrote them, before later ones cut lines, spans or benchmarks out of them.

A list of documents to drop names texts. A document is dropped by its text in the end, and by the one that the first
stage wrote, which is the same whatever later stages do.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from gristmill.counts import Counts
from gristmill.engine.facts import plan_facts
from gristmill.engine.run import StageRun
from gristmill.engine.task import FileSet
from gristmill.io.artefacts import stream_table
from gristmill.io.facts import paths_of_facts
from gristmill.io.keys import KeySet, Rows, iter_keys, write_keys

_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True)
class FirstTexts:
    """The folder of the facts that the first stage noted, and what documents lost later.

    `losses` are the tables of the stages that wrote the corpus anew, in order, with columns file, row and removed.
    """

    facts: Path
    losses: tuple[Path, ...]

    def plan(self, run: StageRun) -> list[Path]:
        """Return the files of facts, which a step of the run reads."""
        files = [file for file in plan_facts(run, self.facts, "first facts") if file.slices]
        return paths_of_facts(self.facts, files)


def follow_keys(keys: FileSet, losses: tuple[Path, ...], output: Path) -> Counts:
    """Task: write the keys that documents have in the end, given sets of keys in what the first stage wrote."""
    rows_of = _join_keys(keys.paths)
    for table in losses:
        removed = _removed_rows(table, rows_of)
        for file, rows in rows_of.items():
            gone = removed.get(file, _NO_ROWS)
            kept = np.setdiff1d(rows, gone)
            rows_of[file] = kept - np.searchsorted(gone, kept)
    write_keys(output, rows_of)
    return Counts({}, [])


def _join_keys(paths: Iterable[Path]) -> KeySet:
    """Return the keys of several sets, rows ascending."""
    rows_of = dict[str, Rows]()
    for path in paths:
        for file, rows in iter_keys(path):
            rows_of[file] = np.union1d(rows_of.get(file, _NO_ROWS), rows)
    return rows_of


def _removed_rows(losses: Path, files: Iterable[str]) -> KeySet:
    """Return the rows that a stage removed of some files, ascending."""
    names = list(files)
    rows_of = dict[str, Rows]()
    for table in stream_table(losses, ["file", "row", "removed"]):
        table = table.filter(table.column("removed"))
        for name in set(names).intersection(pc.unique(table.column("file")).to_pylist()):
            of_file = table.filter(pc.equal(table.column("file"), name))
            rows = of_file.column("row").to_numpy()
            rows_of[name] = np.union1d(rows_of.get(name, _NO_ROWS), rows)
    return rows_of
