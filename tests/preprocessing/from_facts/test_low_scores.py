"""Documents are chosen by facts alone: limits equal NumPy's, ties and copies as documented, the same bytes anywhere."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from gristmill.counts import READ
from gristmill.engine.options import RunOptions
from gristmill.errors import InputError
from gristmill.io.keys import iter_keys
from gristmill.steps import Batch, DocumentStep, Outcome
from preprocessing.from_facts.low_scores import KEPT, list_low_scores
from preprocessing.prepare import prepare
from preprocessing.scoring.score_choice import ALL, Band, Choice, ScoreBands
from preprocessing.steps.text_digest import TextDigest


@dataclass(frozen=True)
class Stated(DocumentStep):
    """Note the numbers that a text consists of, as the scores a and b."""

    name = "stated"
    makes = {"a": "float32", "b": "float32"}  # noqa: RUF012

    def apply(self, batch: Batch) -> Outcome:
        numbers = np.array([text.split() for text in batch.texts], np.float32)
        return Outcome(facts={"a": numbers[:, 0], "b": numbers[:, 1]})


Scores = dict[str, np.ndarray]


@pytest.fixture
def scored(tmp_path: Path) -> tuple[Path, dict[str, Scores]]:
    """Facts of three sources in several files, and the scores of each; many are equal."""
    random = np.random.default_rng(7)
    expected: dict[str, Scores] = {}
    for source, count in (("book", 1), ("code", 7), ("web", 501)):
        a = np.round(random.normal(size=count), 2).astype(np.float32)
        b = random.random(count).astype(np.float32)
        expected[source] = {"a": a, "b": b}
        path = tmp_path / "corpus" / source / "0.jsonl"
        path.parent.mkdir(parents=True)
        lines = [json.dumps({"text": f"{x!r} {y!r}"}) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        path.write_text("\n".join(lines) + "\n")
    prepare(tmp_path / "corpus", None, tmp_path / "facts", [TextDigest(), Stated()], RunOptions(workers=1, quiet=True))
    return tmp_path / "facts", expected


def rows_in(path: Path) -> dict[str, list[int]]:
    return {file.partition("/")[0]: rows.tolist() for file, rows in iter_keys(path)}


def below(scores: np.ndarray, limit: float) -> list[int]:
    return np.flatnonzero(scores.astype(np.float64) < limit).tolist()


@pytest.mark.parametrize("quantile", [0.001, 0.25, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("of_all", [False, True])
def test_quantiles_are_numpys(tmp_path: Path, quiet, scored, quantile: float, of_all: bool) -> None:
    facts, scores = scored
    counts, cuts = list_low_scores(facts, tmp_path / "low.parquet", [Choice("edu", "a", None, quantile, of_all)], quiet)
    whole = np.concatenate([own["a"] for own in scores.values()]).astype(np.float64)
    limits = {source: np.quantile(own["a"].astype(np.float64), quantile) for source, own in scores.items()}
    expected = {ALL: np.quantile(whole, quantile)} if of_all else limits
    assert {cut.group: cut.limit for cut in cuts} == pytest.approx(expected, rel=1e-15)
    gone = {source: below(own["a"], expected[ALL if of_all else source]) for source, own in scores.items()}
    assert rows_in(tmp_path / "low.parquet") == {source: rows for source, rows in gone.items() if rows}
    assert counts.total("low edu").documents == sum(map(len, gone.values()))
    assert counts.total(READ).documents == 509 == counts.total(KEPT).documents + counts.total("low edu").documents


def test_a_document_at_the_limit_stays_and_goes_by_the_first_score_that_is_too_low(tmp_path, quiet, scored) -> None:
    facts, scores = scored
    limit = float(scores["web"]["a"][3])
    choices = [Choice("first", "a", limit), Choice("second", "b", 0.5), Choice("noted", "b")]
    counts, cuts = list_low_scores(facts, tmp_path / "low.pickle", choices, quiet)
    first = {source: set(below(own["a"], limit)) for source, own in scores.items()}
    second = {source: set(below(own["b"], 0.5)) - first[source] for source, own in scores.items()}
    assert 3 not in first["web"] and cuts == []
    assert counts.total("low first").documents == sum(map(len, first.values()))
    assert counts.total("low second").documents == sum(map(len, second.values()))
    gone = {source: sorted(first[source] | second[source]) for source in scores}
    assert rows_in(tmp_path / "low.pickle") == {source: rows for source, rows in gone.items() if rows}


def test_the_bytes_do_not_depend_on_workers_or_memory(tmp_path: Path, scored) -> None:
    facts, _ = scored
    found = []
    for number, options in enumerate([RunOptions(workers=1, quiet=True), RunOptions(2, "64MiB", quiet=True)]):
        path = tmp_path / f"{number}" / "low.parquet"
        list_low_scores(facts, path, [Choice("edu", "a", None, 0.5), Choice("web", "b", None, 0.1, True)], options)
        found.append(path.read_bytes())
    assert found[0] == found[1]


def test_facts_without_the_score_are_refused(tmp_path: Path, quiet, scored) -> None:
    with pytest.raises(InputError, match="has no column edu@12345678"):
        list_low_scores(scored[0], tmp_path / "low.parquet", [Choice("edu", "edu@12345678", 0.5)], quiet)


BANDS = (Band("low", 0.0), Band("medium", 1.0, None, 0.5), Band("high", 3.0, None, 0.9))


@pytest.mark.parametrize("of_all", [False, True])
def test_bands_are_numpys_quantiles_and_one_without_weight_goes(tmp_path: Path, quiet, scored, of_all: bool) -> None:
    facts, scores = scored
    choice = Choice("edu", "a", of_all=of_all, bands=BANDS)
    counts, _ = list_low_scores(facts, tmp_path / "low.parquet", [choice], quiet, tmp_path / "bands.json")
    bands = ScoreBands.read(tmp_path / "bands.json")
    assert bands.names == ("low", "medium", "high") and bands.weights == (0.0, 1.0, 3.0)
    whole = np.concatenate([own["a"] for own in scores.values()]).astype(np.float64)
    gone = {}
    for source, own in scores.items():
        values = own["a"].astype(np.float64)
        limits = np.quantile(whole if of_all else values, [0.5, 0.9])
        np.testing.assert_allclose(bands.limits[source], limits, rtol=1e-15)
        expected = (values >= limits[0]).astype(int) + (values >= limits[1])
        assert bands.find(source, {"a": own["a"]}).tolist() == expected.tolist()
        gone[source] = np.flatnonzero(expected == 0).tolist()
    assert rows_in(tmp_path / "low.parquet") == {source: rows for source, rows in gone.items() if rows}
    assert counts.total("low edu").documents == sum(map(len, gone.values()))


def test_a_curve_keeps_by_chance_and_the_same_texts_anywhere(tmp_path: Path, quiet, scored) -> None:
    facts, scores = scored
    choice = Choice("edu", "b", keep=((0.2, 0.0), (0.6, 0.8), (0.9, 1.0)))
    list_low_scores(facts, tmp_path / "low.parquet", [choice], quiet)
    web = scores["web"]
    gone = np.zeros(501, np.bool_)
    gone[rows_in(tmp_path / "low.parquet")["web"]] = True
    texts = [f"{x!r} {y!r}" for x, y in zip(web["a"].tolist(), web["b"].tolist(), strict=True)]
    draws = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") / 2**64 for text in texts]
    chances = np.interp(web["b"].astype(np.float64), [0.2, 0.6, 0.9], [0.0, 0.8, 1.0])
    assert gone.tolist() == [bool(draw >= chance) for draw, chance in zip(draws, chances, strict=True)]
    assert gone[web["b"] < 0.2].all() and not gone[web["b"] > 0.9].any()
    assert 0.2 < gone[(web["b"] > 0.3) & (web["b"] < 0.6)].mean() < 0.8


def plain_mean_of_ranks(values: list[np.ndarray], groups: list[np.ndarray]) -> np.ndarray:
    """The share of a group that scores lower, half of the equal ones counted, from all scores: exact."""
    ranks = []
    for own, group in zip(values, groups, strict=True):
        lower = (group[None, :] < own[:, None]).mean(axis=1)
        equal = (group[None, :] == own[:, None]).mean(axis=1)
        ranks.append(lower + equal / 2)
    return np.mean(ranks, axis=0)


@pytest.mark.parametrize("of_all", [False, True])
def test_an_ensemble_keeps_by_the_mean_of_ranks(tmp_path: Path, quiet, scored, of_all: bool) -> None:
    """Whatever the scales of its scores; within two thousandths, as ranks are those of a thousand quantiles."""
    facts, scores = scored
    choice = Choice("both", "", 0.5, None, of_all, members=("a", "b"))
    counts, _ = list_low_scores(facts, tmp_path / "low.parquet", [choice], quiet)
    gone = rows_in(tmp_path / "low.parquet")
    whole = [np.concatenate([own[name] for own in scores.values()]) for name in ("a", "b")]
    web = [scores["web"][name] for name in ("a", "b")]
    ranks = plain_mean_of_ranks(web, whole if of_all else web)
    is_gone = np.zeros(len(ranks), np.bool_)
    is_gone[gone["web"]] = True
    assert is_gone[ranks < 0.498].all() and not is_gone[ranks > 0.502].any()
    assert 150 < is_gone.sum() < 350 and counts.total("low both").documents == sum(map(len, gone.values()))
    again = tmp_path / "again" / "low.parquet"
    list_low_scores(facts, again, [choice], RunOptions(2, "64MiB", quiet=True))
    assert again.read_bytes() == (tmp_path / "low.parquet").read_bytes()


def test_bands_of_an_ensemble_are_found_again_by_the_mix(tmp_path: Path, quiet, scored) -> None:
    facts, scores = scored
    choice = Choice("both", "", bands=BANDS, members=("a", "b"))
    list_low_scores(facts, tmp_path / "low.parquet", [choice], quiet, tmp_path / "bands.json")
    bands = ScoreBands.read(tmp_path / "bands.json").of_source("web")
    found = bands.find("web", scores["web"])
    assert bands.facts == ("a", "b")
    assert np.flatnonzero(found == 0).tolist() == rows_in(tmp_path / "low.parquet")["web"]
    assert [round(float((found == band).mean()), 1) for band in range(3)] == [0.5, 0.4, 0.1]
