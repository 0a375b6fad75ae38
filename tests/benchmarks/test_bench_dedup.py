"""bench_dedup: each contender by itself, and a real run with the installed ones."""

import json
import os
import random
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks import slimpajama
from benchmarks.bench_dedup import EDGE_CASES, bench_dedup, random_edges, synthetic_signatures
from benchmarks.peers_graph import BANDS, ROWS, GraphContender, graph_contenders
from benchmarks.peers_minhash import Contender, assert_equal_to_datasketch, contenders
from benchmarks.sample_documents import draw_sample, make_pairs
from dedup import Sketch, signatures
from gristmill.errors import GristmillError

ROOT = Path(__file__).resolve().parents[2]
WORDS = (ROOT / "tests" / "gristmill_cli" / "words.txt").read_text(encoding="utf-8").split()
BRIEFLY = ("--rounds", 1, "--seconds", 0)
INSTALLED = [line for line in contenders() if line.installed()]
GRAPHS = [(table, line) for table in ("lsh", "components") for line in graph_contenders(table) if line.installed()]


def essay(seed: int, words: int = 300) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "book").mkdir()
    lines = [json.dumps({"text": text}) for text in [*map(essay, range(8)), "ὈΔΥΣΣΕΎΣ, naïve café " * 20, "short"]]
    (folder / "book" / "book.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def bench(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_dedup.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


def rows_of(printed: str) -> dict[str, list[str]]:
    """The cells of every row, by the contender's name and for graphs its size."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows}


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@example(EDGE_CASES[3])
@example(EDGE_CASES[5])
@example(essay(0))
def test_slimpajamas_algorithm_equals_our_sha1(text: str) -> None:
    values, _ = signatures([unicodedata.normalize("NFC", text)], Sketch("sha1"))
    assert np.array_equal(slimpajama.sign(text), values[0])


def test_our_signatures_equal_datasketchs() -> None:
    checked = assert_equal_to_datasketch([*EDGE_CASES, essay(1)])
    assert {"xxh32 with datasketch 2", "sha1 with datasketch 2", "sha1 with SlimPajama's algorithm"} <= set(checked)


def test_pairs_cover_all_similarities_and_are_deterministic() -> None:
    texts = list(map(essay, range(5)))
    pairs = make_pairs(texts, 60)
    assert pairs == make_pairs(texts, 60)
    shingles = [[set(slimpajama.shingles(text)) for text in pair] for pair in pairs]
    similar = [len(one & other) / len(one | other) for one, other in shingles]
    assert min(similar) < 0.6 and max(similar) > 0.9


@pytest.mark.parametrize("line", INSTALLED, ids=lambda line: line.name)
def test_every_contender_estimates_jaccard_of_its_shingles(line: Contender) -> None:
    ones, others = zip(*make_pairs(list(map(essay, range(5))), 30), strict=True)
    sets = [[line.shingles(text) for text in pair] for pair in zip(ones, others, strict=True)]
    exact = [len(one & other) / len(one | other) for one, other in sets]
    errors = np.array(line.make().estimate(ones, others)) - exact
    assert len(errors) == 30 and np.sqrt(np.mean(errors**2)) < 0.1


@pytest.mark.parametrize("table, line", GRAPHS, ids=lambda value: getattr(value, "name", ""))
def test_every_contender_counts_the_same_components(table: str, line: GraphContender) -> None:
    graph = networkx.Graph()
    graph.add_nodes_from(range(600))
    if table == "components":
        given = random_edges(500, 600)
        graph.add_edges_from(given.tolist())
    else:
        given = synthetic_signatures(600)
        bands = [given[:, band * ROWS : band * ROWS + ROWS] for band in range(BANDS)]
        same = [np.argwhere((rows[:, None] == rows[None]).all(2)).tolist() for rows in bands]
        graph.add_edges_from(pair for pairs in same for pair in pairs)
    wanted = networkx.number_connected_components(graph)
    assert line.make()(given, 600) == wanted < 580


def test_a_run_lists_measured_and_missing_contenders(corpus: Path) -> None:
    only = ("ours, xxh32-m", "datasketch 2, xxh32, legacy", "text-dedup, adapted")
    done = bench(corpus, *BRIEFLY, "--sample", "12KB", "--pairs", 8, "--signatures", 0, "--edges", 0, "--only", *only)
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    ours, theirs = rows["**ours, xxh32-mersenne**"], rows["datasketch 2, xxh32, legacy (2.0.0)"]
    assert float(ours[0].replace(",", "")) > float(theirs[0])
    assert ours[-2:] == theirs[-2:], "equal values have equal errors"
    assert 0 < float(ours[-2]) < 0.1
    assert rows["SlimPajama's algorithm (datasketch 2) (2.0.0)"][3] == "1"
    assert "xxh32 with datasketch 2" in done.stdout
    assert "SlimPajama's algorithm (datasketch 1): not installed" in done.stdout
    if "text-dedup, adapted" not in {line.name for line in INSTALLED}:
        assert "text-dedup, adapted: not installed (pip install" in done.stdout


def test_a_run_has_the_graph_tables_and_notes_a_broken_peer(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "gaoya-9.9.dist-info").mkdir()
    (tmp_path / "gaoya-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: gaoya\nVersion: 9.9\n")
    (tmp_path / "gaoya.py").write_text("raise ImportError('built for another machine')\n")
    sizes = ("--sample", "2KB", "--pairs", 0, "--signatures", 2000, "--edges", 2000)
    only = ("gaoya", "ours: tables", "ours: union", "NetworkX")
    done = bench(corpus, *BRIEFLY, *sizes, "--only", *only, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "gaoya, with its index: failed, exit code 1" in done.stdout and "another machine" in done.stdout
    rows = rows_of(done.stdout)
    assert rows["**ours: tables in cache, union-find**"][0] == "2,000"
    assert rows[f"NetworkX ({networkx.__version__})"][0] == "200"


@pytest.mark.parametrize(
    "options, said",
    [
        ({"inputs": ()}, "no document with text"),
        ({"rounds": 0}, "--rounds 0"),
        ({"signatures": 3}, "--signatures 3"),
        ({"sample": "none"}, "none"),
        ({"python": (Path("no/python"),)}, "no/python"),
    ],
)
def test_invalid_options_are_rejected(corpus: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(GristmillError, match=said) as error:
        bench_dedup(**{"inputs": (corpus,), **options})
    assert error.value.exit_code == 2


def test_a_wrong_option_is_a_line_and_an_exit_code() -> None:
    done = bench("nowhere")
    assert done.returncode == 2 and "nowhere" in done.stderr and "Traceback" not in done.stderr


def test_the_sample_covers_all_files_and_is_deterministic(corpus: Path) -> None:
    texts = draw_sample([corpus], 6000)
    assert texts == draw_sample([corpus], 6000)
    assert 4000 < sum(len(text.encode()) for text in texts) < 7200
    assert texts != draw_sample([corpus], 10_000_000) and len(draw_sample([corpus], 10_000_000)) == 10
