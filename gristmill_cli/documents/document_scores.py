"""Scores of documents of a data run, as its facts have them, by the tables [scores.NAME]."""

from collections.abc import Collection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gristmill.engine.execution.staging import local_copies
from gristmill.io.artefacts import open_table
from gristmill.io.documents import DocKey, source_of
from gristmill.io.facts import INDEX_FILE, read_index, written_by_file
from gristmill.storage.files import is_file
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.note_facts import ScoreAfterCopies
from preprocessing.scoring.score_choice import ScoreBands
from preprocessing.steps.model_score import After, have_bands, tables_after


def read_scores(config: RunConfig, keys: Collection[DocKey]) -> dict[str, dict[DocKey, float]]:
    """Return the scores of documents, by name and key in the clean corpus; none that the run did not note."""
    after_rules = tables_after("rules", config.scores)
    after_copies = tables_after("copies", config.scores)
    of_folders = {"facts": after_rules, ScoreAfterCopies.output: after_copies}
    scores = dict[str, dict[DocKey, float]]()
    for folder, tables in of_folders.items():
        scores |= _read_scores(config.out / folder, tables, keys)
    return scores


def _read_scores(facts: Path, tables: Collection[str], keys: Collection[DocKey]) -> dict[str, dict[DocKey, float]]:
    """Return the scores of documents that a folder of facts has, of these tables."""
    scores = dict[str, dict[DocKey, float]]()
    if not tables or not is_file(facts / INDEX_FILE):
        return scores
    rows_of = dict[str, list[int]]()
    for key in keys:
        rows_of.setdefault(key.file, []).append(key.row)
    with local_copies([facts / INDEX_FILE]) as (index,):
        files = read_index(index)
    for file in files:
        if rows_of.keys().isdisjoint(file.corpus_files):
            continue
        with local_copies([facts / file.path]) as (copy,):
            with open_table(copy) as table:
                noted = [fact for fact in table.schema_arrow.names if _score_of(fact) in tables]
            for name, rows in written_by_file(copy, noted):
                chosen = np.flatnonzero(np.isin(rows["row"].to_numpy(), rows_of.get(name, [])))
                scored = rows.take(chosen)
                for column in noted:
                    of_score = scores.setdefault(_score_of(column), {})
                    for row, score in zip(scored["row"].to_pylist(), scored[column].to_pylist(), strict=True):
                        of_score[DocKey(name, row)] = score
    return scores


def _score_of(fact: str) -> str:
    """Return the name of the score that a fact is: what is before `@` and the version of its model."""
    return fact.partition("@")[0]


def describe_scores(config: RunConfig, key: DocKey, after: After = "rules") -> str:
    """Return the scores of a document after rules or copies, and the band that it is in, if any; '' without scores."""
    tables = tables_after(after, config.scores)
    scores = dict[str, float]()
    for name, of_score in read_scores(config, [key]).items():
        if key in of_score and name in tables:
            scores[name] = of_score[key]
    said = [f"{name} {score:.4g}" for name, score in scores.items()]
    path = config.out / "score_bands.json"
    if not said or not have_bands(tables) or not is_file(path):
        return ", ".join(said)
    bands = ScoreBands.read(path)
    scores_of_bands = dict[str, NDArray[np.float32]]()  # by fact
    for fact in bands.facts:
        if _score_of(fact) in scores:
            scores_of_bands[fact] = np.array([scores[_score_of(fact)]], np.float32)
    if len(scores_of_bands) == len(bands.facts):
        number = int(bands.find(source_of(key.file), scores_of_bands)[0])
        said.append(f"in the band {bands.names[number]} of {bands.score}")
    return ", ".join(said)
