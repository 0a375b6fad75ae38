"""eval_dedup: exact similarities equal brute force, and the tables are right for planted pairs."""

import json
import random
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import exact_jaccard
from benchmarks.eval_dedup import eval_dedup, plain_shingles
from benchmarks.eval_tables import Truth, candidates, duplicates, wilson_interval
from benchmarks.exact_jaccard import jaccard_of, similar_pairs
from dedup.minhash.shingles import shingle_sets
from gristmill.errors import GristmillError, UsageError

ROOT = Path(__file__).resolve().parents[2]
WORDS = (ROOT / "tests" / "gristmill_cli" / "words.txt").read_text(encoding="utf-8").split()


def essay(seed: int, words: int = 120) -> list[str]:
    return random.Random(seed).choices(WORDS, k=words)


def planted_corpus() -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Ten essays; copies of three of them in which few words differ; and a copy of a copy."""
    texts = {f"t{i}": essay(i) for i in range(10)}
    pairs = []
    for i, changed in enumerate((1, 2, 3)):
        copy = list(texts[f"t{i}"])
        copy[10 : 10 + changed] = essay(100 + i, changed)
        texts[f"copy{i}"] = copy
        pairs.append((f"t{i}", f"copy{i}"))
    texts["again"] = texts["copy0"][:-2]
    return {name: " ".join(words) for name, words in texts.items()}, pairs


def evaluate(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "eval_dedup.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def table_of(printed: str, title: str) -> list[list[str]]:
    """The rows of a table, without its head."""
    part = printed.partition(f"### {title}")[2].partition("### ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"][2:]


@given(
    st.lists(st.text("ab ,", max_size=14), max_size=12),
    st.integers(1, 3),
    st.sampled_from(["character", "word"]),
    st.sampled_from([0.01, 0.3, 0.5, 1.0]),
    st.sampled_from([3, 1 << 20]),
)
def test_exact_pairs_equal_brute_force(texts: list[str], width: int, unit: str, least: float, part: int) -> None:
    sets = [plain_shingles(text, width, unit) for text in texts]
    wanted = {
        (j, i): len(one & other) / len(one | other)
        for (i, one), (j, other) in combinations(enumerate(sets), 2)
        if one and other and len(one & other) / len(one | other) >= least
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_jaccard, "_PART", part)  # ranges of hashes, however many, change nothing
        hashes = shingle_sets(texts, width, unit)  # type: ignore[arg-type]
        pairs, similarity = similar_pairs(hashes, least)
    assert {tuple(pair): value for pair, value in zip(pairs.tolist(), similarity.tolist(), strict=True)} == wanted
    assert jaccard_of(hashes, pairs).tolist() == similarity.tolist()


def test_a_corpus_too_large_is_rejected_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"20,001 documents.*--documents 5000"):
        similar_pairs([np.empty(0, np.uint64)] * 20_001, 0.5)
    monkeypatch.setattr(exact_jaccard, "MAX_STEPS", 1000)
    with pytest.raises(UsageError, match=r"1,250 steps.*--documents 5000"):
        similar_pairs([np.arange(25, dtype=np.uint64)] * 10, 0.5)
    with pytest.raises(UsageError, match="above 0"):
        similar_pairs([], 0.0)


def test_candidates_are_all_pairs_that_share_a_band() -> None:
    digests = np.array([[1, 2, 1, 3, 1], [4, 5, 6, 5, 7]], np.uint64)
    assert candidates(digests).tolist() == [[2, 0], [3, 1], [4, 0], [4, 2]]


def test_a_document_similar_only_to_a_duplicate_is_kept() -> None:
    known = Truth([], np.array([[1, 0], [2, 1], [3, 1], [3, 0]]), np.array([0.9, 0.9, 0.9, 0.7]))
    assert duplicates(known, 0.8, 4).tolist() == [False, True, False, False]
    assert duplicates(known, 0.6, 4).tolist() == [False, True, False, True]


def test_the_interval_is_wilsons_and_wider_for_correlated_pairs() -> None:
    low, high = wilson_interval(np.ones((1, 10), bool))
    assert low == pytest.approx(0.7225, abs=1e-3) and high == pytest.approx(1)
    alone = np.random.default_rng(0).random((20, 50)) < 0.5
    together = np.repeat(alone[:, :1], 50, axis=1)
    (low, high), (lower, higher) = wilson_interval(alone), wilson_interval(together)
    assert high - low < 0.1 < 0.3 < higher - lower


@pytest.mark.parametrize("form", ["lines", "documents"])
def test_a_run_reports_detection_removal_and_planted_pairs(tmp_path: Path, form: str) -> None:
    texts, pairs = planted_corpus()
    corpus = tmp_path / ("corpus.txt" if form == "lines" else "corpus.jsonl")
    lines = [
        f"{name} {text}" if form == "lines" else json.dumps({"id": name, "text": text}) for name, text in texts.items()
    ]
    corpus.write_text("\n".join(lines) + "\n")
    (tmp_path / "truth").write_text("".join(f"{one} {other}\n" for one, other in pairs))
    done = evaluate(
        corpus, "--format", form, "--truth", tmp_path / "truth", "--range", 4, 30, "--bands", 30, 1, "--seeds", 4
    )
    assert done.returncode == 0, done.stderr
    sets = {name: plain_shingles(text, 13, "character") for name, text in texts.items()}
    similar = [len(sets[a] & sets[b]) / len(sets[a] | sets[b]) for a, b in combinations(sets, 2)]
    curve = table_of(done.stdout, "Detection, 30 bands of 4 rows, 4 seeds")
    assert sum(int(row[1]) for row in curve) == sum(value >= 0.5 for value in similar) == 5
    assert {row[-1] for row in curve} == {"yes"} and float(curve[-1][2]) == int(curve[-1][1])
    removal = table_of(done.stdout, "Removal")
    assert [row[1] for row in removal] == ["off", "jaccard"] * 2
    verified = removal[1]
    assert verified[5:] == ["4", "1.0000", "1.0000", "0"]
    planted = table_of(done.stdout, "Planted pairs")
    assert planted[0][:4] == ["30 × 4", "3", "3", "3"]
    assert int(planted[1][2]) < 3, "one band of 30 rows finds hardly any"


def test_invalid_options_are_rejected(tmp_path: Path) -> None:
    corpus, truth = tmp_path / "corpus.txt", tmp_path / "truth"
    corpus.write_text("a one text\nb another\n")
    truth.write_text("a c\n")
    lines = {"format": "lines"}
    for options, said in [
        (lines | {"truth": truth}, "'a c'"),
        (lines | {"range": (4, 5)}, "--bands (9,)"),
        (lines | {"bands": (99,)}, "99"),
        (lines | {"least": 0.9}, "--least 0.9"),
        ({}, "corpus.txt"),
    ]:
        with pytest.raises(GristmillError, match=re.escape(said)):
            eval_dedup((corpus,), **options)  # type: ignore[arg-type]
    done = evaluate(tmp_path / "none", "--format", "lines")
    assert done.returncode == 1 and "none" in done.stderr and "Traceback" not in done.stderr
