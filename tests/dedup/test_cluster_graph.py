"""One cluster as a graph: its similarities are exact or say that they are not, whatever format it is read from."""

import pickle
import re
from collections.abc import Callable
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import networkx
import pyarrow as pa
import pytest

from dedup import generate_connected_components, to_hash
from dedup.cluster_graph import cluster_graph, show_cluster
from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, OutputError, UsageError
from gristmill.io.artefacts import write_table
from gristmill.text import matching_form
from tests.object_store import object_store

QUIET = RunOptions(workers=1, quiet=True)
A, B, C = "web/a.jsonl", "web/b.jsonl.zst", "wiki/c.jsonl"
CHAIN = [f"{A}@0", f"{A}@2", f"{B}@0", f"{B}@1", f"{C}@1"]
NAMES = ["first", "near", "nearer", "far", "copy"]
FORMATS = [".parquet", ".pickle"]


def shingles(text: str, width: int = 13) -> set[str]:
    form = matching_form(text)
    return {form[i : i + width] for i in range(len(form) - width + 1)}


def jaccard(one: str, other: str, width: int = 13) -> float:
    a, b = shingles(one, width), shingles(other, width)
    return len(a & b) / len(a | b)


@pytest.fixture(scope="module")
def texts(texts_of: Callable[[int, int], list[str]]) -> dict[str, str]:
    """A chain: each text shares half of its words with the next, so that the last shares none with the first."""
    words = " ".join(texts_of(4, 100)).split()
    chain = [" ".join(words[start : start + 400]) for start in (0, 100, 200, 450)]
    return dict(zip(CHAIN, ["<>\x0b" + chain[0], *chain[1:], chain[0] + "!"], strict=True))


@pytest.fixture(scope="module")
def folder(
    texts: dict[str, str], write: Callable, texts_of: Callable, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """NORM with the chain in three files, MINHASH, and DUP with the chain's cluster and another one."""
    folder = tmp_path_factory.mktemp("graph")
    other = texts_of(4, 900)
    write(folder / "NORM" / A, [texts[CHAIN[0]], other[0], texts[CHAIN[1]]])
    write(folder / "NORM" / B, [texts[CHAIN[2]], texts[CHAIN[3]], other[1]])
    write(folder / "NORM" / C, [other[2], texts[CHAIN[4]], other[3], "short"])
    (folder / "NORM/book").mkdir()
    (folder / "NORM/book/unreadable.jsonl.zst").write_bytes(b"no zstd")
    for source in ("web", "wiki"):
        to_hash(source, folder / "NORM", folder / "MINHASH" / source, 0, "0", 0, 99, options=QUIET)
    (folder / "DUP").mkdir()
    pairs = [*pairwise(CHAIN), (f"{B}@2", f"{C}@0")]
    (folder / "DUP/duplicate_pairs.txt").write_text("".join(f"{a} :: {b}\n" for a, b in pairs))
    for suffix in FORMATS:
        generate_connected_components(folder / "DUP", (folder / "DUP/clusters").with_suffix(suffix), options=QUIET)
    return folder


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 1.0])
def test_edges_are_pairs_of_exact_similarity(folder: Path, texts: dict, suffix: str, threshold: float) -> None:
    graph = cluster_graph(CHAIN[1], folder / f"DUP/clusters{suffix}", folder / "NORM", threshold=threshold)
    assert list(graph.nodes) == CHAIN
    exact = {(a, b): jaccard(texts[a], texts[b]) for i, a in enumerate(CHAIN) for b in CHAIN[i + 1 :]}
    wanted = {pair: value for pair, value in exact.items() if value >= threshold}
    assert {(a, b): weight for a, b, weight in graph.edges(data="weight")} == pytest.approx(wanted, abs=1e-6)
    assert not any(estimated for _, _, estimated in graph.edges(data="estimated"))
    assert [graph.nodes[key]["first_similarity"] for key in CHAIN] == pytest.approx(
        [1.0, *(exact[CHAIN[0], key] for key in CHAIN[1:])], abs=1e-6
    )
    assert [graph.nodes[key]["characters"] for key in CHAIN] == [len(texts[key]) for key in CHAIN]
    assert [graph.nodes[key]["source"] for key in CHAIN] == ["web"] * 4 + ["wiki"]
    assert exact[CHAIN[0], CHAIN[3]] < 0.02 < 0.3 < exact[CHAIN[0], CHAIN[1]] < 1.0 == exact[CHAIN[0], CHAIN[4]]


@pytest.mark.parametrize(("width", "unit"), [(5, "character"), (3, "word")])
def test_other_shingles(folder: Path, texts: dict, width: int, unit: str) -> None:
    graph = cluster_graph(
        CHAIN[0],
        folder / "DUP/clusters.parquet",
        folder / "NORM",
        threshold=0,
        width=width,
        unit=unit,  # type: ignore[arg-type]
    )
    if unit == "character":
        expected = jaccard(texts[CHAIN[0]], texts[CHAIN[1]], width)
    else:
        sets = [matching_form(texts[key]).split() for key in CHAIN[:2]]
        a, b = ({tuple(words[i : i + width]) for i in range(len(words) - width + 1)} for words in sets)
        expected = len(a & b) / len(a | b)
    assert graph.edges[CHAIN[0], CHAIN[1]]["weight"] == pytest.approx(expected, abs=1e-6)
    assert f"{width}-{unit}" in graph.graph["similarity"]


def test_signatures_give_estimates_and_say_so(folder: Path, texts: dict) -> None:
    graph = cluster_graph(CHAIN[0], folder / "DUP/clusters.pickle", minhash=folder / "MINHASH", threshold=0.1)
    assert graph.edges[CHAIN[0], CHAIN[4]]["weight"] == 1.0
    for a, b, data in graph.edges(data=True):
        assert data["estimated"] and data["weight"] == pytest.approx(jaccard(texts[a], texts[b]), abs=0.2)
    assert graph.graph["similarity"].startswith("estimated") and "characters" not in graph.nodes[CHAIN[0]]
    assert graph.size() >= 4


def test_the_command_shows_and_writes_it(folder: Path, texts: dict, run: Callable, tmp_path: Path) -> None:
    out = tmp_path / "out.graphml"
    line = (
        f"python dedup/cluster_graph.py {CHAIN[2]} --clusters {folder}/DUP/clusters.parquet "
        f"--corpus {folder}/NORM --graph {out} --threshold 0.4"
    )
    shown = run(line).stdout
    chained = sum(jaccard(texts[CHAIN[0]], texts[key]) < 0.4 for key in CHAIN)
    for wanted in (
        r"members +5 documents of web, wiki", r"of 10 pairs at 0\.40 or more", rf"first +{re.escape(CHAIN[0])}",
        rf"chained +{chained} members .*: {re.escape(CHAIN[3])} \(0\.0", r"longest +.*characters", r"shortest +",
        rf"{re.escape(CHAIN[4])} +{len(texts[CHAIN[4]]):,} +1\.00",
    ):  # fmt: skip
        assert re.search(wanted, shown), (wanted, shown)
    written = networkx.read_graphml(out)
    graph = cluster_graph(CHAIN[2], folder / "DUP/clusters.parquet", folder / "NORM", threshold=0.4)
    assert dict(written.nodes(data=True)) == dict(graph.nodes(data=True))
    assert {frozenset(e[:2]): e[2] for e in written.edges(data=True)} == {
        frozenset(e[:2]): e[2] for e in graph.edges(data=True)
    }
    assert written.nodes[CHAIN[0]]["excerpt"].startswith("<> ")
    first = out.read_bytes()
    out.unlink()
    run(line, PYTHONHASHSEED="7")
    assert out.read_bytes() == first
    assert "expected a name that ends in .graphml" in run(line.replace("out.graphml", "out.png"), fails=2).stderr


def test_a_file_that_is_there_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.graphml"
    notes.write_text("mine")
    with pytest.raises(OutputError, match=r"notes\.graphml exists, and would be overwritten: give another --graph"):
        show_cluster(CHAIN[0], folder / "DUP/clusters.parquet", folder / "NORM", graph=notes)
    assert notes.read_text() == "mine"


def test_members_of_an_index_have_no_text(folder: Path, tmp_path: Path) -> None:
    files = ["index:2023:web/z.jsonl", A, B]
    write_table(
        tmp_path / "c.parquet", {"cluster": pa.array([4, 4, 4]), "file": pa.array(files), "row": pa.array([7, 0, 0])}
    )
    graph = cluster_graph(f"{B}@0", tmp_path / "c.parquet", folder / "NORM", threshold=0)
    old, *_ = graph.nodes
    assert (old, graph.nodes[old]["source"], graph.degree(old), graph.size()) == (f"{files[0]}@7", "web", 0, 1)
    assert "characters" not in graph.nodes[old]


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_large_cluster_is_refused(folder: Path, suffix: str) -> None:
    path = folder / f"DUP/clusters{suffix}"
    with pytest.raises(UsageError, match=r"5 documents: 10 comparisons\. --max_documents 4 .*give --max_documents 5"):
        cluster_graph(CHAIN[0], path, folder / "NORM", max_documents=4)
    assert len(cluster_graph(CHAIN[0], path, folder / "NORM", max_documents=5)) == 5


@pytest.mark.parametrize("suffix", FORMATS)
def test_what_cannot_be_shown(folder: Path, tmp_path: Path, suffix: str) -> None:
    path, norm = folder / f"DUP/clusters{suffix}", folder / "NORM"
    for key in (f"{A}@1", f"{A}@99", "web/none.jsonl@0"):
        with pytest.raises(UsageError, match="is in no cluster"):
            cluster_graph(key, path, norm)
    with pytest.raises(UsageError, match="not a document's key"):
        cluster_graph("a.jsonl", path, norm)
    with pytest.raises(UsageError, match="--minhash has no effect with --corpus"):
        cluster_graph(f"{A}@1", path, norm, folder / "MINHASH")
    with pytest.raises(UsageError, match="have no effect on signatures"):
        cluster_graph(f"{A}@1", path, minhash=folder / "MINHASH", width=5)
    with pytest.raises(UsageError, match="nothing to compare"):
        cluster_graph(CHAIN[0], path)
    with pytest.raises(UsageError, match="a similarity from 0 to 1"):
        cluster_graph(CHAIN[0], path, norm, threshold=50)
    for width in (0, 65_536, 1 << 70):
        with pytest.raises(UsageError, match="shingles of 1 to 65,535 characters"):
            cluster_graph(CHAIN[0], path, norm, width=width)
    with pytest.raises(UsageError, match=r"none\..*run the stage that writes it"):
        cluster_graph(CHAIN[0], tmp_path / f"none{suffix}", norm)
    with pytest.raises(InputError, match="give the corpus it was made from"):
        cluster_graph(CHAIN[0], path, norm / "wiki")


def test_what_is_no_cluster_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.pickle").write_bytes(pickle.dumps({"a": {1}}))
    (tmp_path / "b.pickle").write_bytes(pickle.dumps(([[0, 1]], 1, {0: CHAIN[0]})))
    write_table(tmp_path / "a.parquet", {"file": pa.array(["a"]), "row": pa.array([1])})
    for name in ("a.pickle", "b.pickle", "a.parquet"):
        with pytest.raises(InputError, match=name):
            cluster_graph(CHAIN[0], tmp_path / name, folder / "NORM")


def test_a_cluster_in_a_bucket(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same graph; only files of the cluster are fetched, and errors name the objects."""
    bucket = Path("s3://bucket/graph")
    with object_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        store.upload_tree(folder, "graph")
        for source in ({"corpus": "NORM"}, {"minhash": "MINHASH"}, {"minhash": "MINHASH/web"}):
            here, there = (
                cluster_graph(
                    CHAIN[1], root / "DUP/clusters.parquet", threshold=0.1, **{k: root / v for k, v in source.items()}
                )
                for root in (folder, bucket)
            )
            assert (here.graph, dict(here.nodes), list(here.edges)) == (
                there.graph,
                dict(there.nodes),
                list(there.edges),
            )
        fetched = {path.partition("?")[0] for verb, path in store.requests if verb == "GET"}
        assert not [path for path in fetched if "unreadable" in path]
        show_cluster(CHAIN[1], folder / "DUP/clusters.pickle", bucket / "NORM", graph=bucket / "out.graphml")
        assert len(networkx.read_graphml(BytesIO(store.tree("graph")["out.graphml"]))) == len(CHAIN)
        with pytest.raises(OutputError, match=r"out\.graphml exists"):
            show_cluster(CHAIN[1], folder / "DUP/clusters.pickle", bucket / "NORM", graph=bucket / "out.graphml")
        with pytest.raises(InputError, match=r"^cannot read s3://bucket/graph/none\.parquet: there is no such object"):
            cluster_graph(CHAIN[1], bucket / "none.parquet", bucket / "NORM")
        store.put("graph/DUP/damaged.parquet", b"damaged")
        with pytest.raises(InputError, match=r"^s3://bucket/graph/DUP/damaged\.parquet is not a readable"):
            cluster_graph(CHAIN[1], bucket / "DUP/damaged.parquet", bucket / "NORM")
