"""What is removed, and for which document, against a plain walk over the clusters; killed and resumed."""

import json
import pickle
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup import generate_duplicates_dict, jaccard, signatures, to_hash
from dedup.removal.gather import PLACED
from gristmill.engine.stage import RunOptions
from gristmill.errors import InputError, TooManyMalformed, UsageError
from gristmill.io.keys import write_keys
from gristmill.text import matching_form

QUIET = RunOptions(workers=1, quiet=True)
COMMAND = "python dedup/generate_duplicates_dict.py --input_file {clusters} --out_file {out} {options}"
Key = tuple[str, int]
Removed = dict[Key, tuple[Key, float | None]]


def write_table(path: Path, clusters: Iterable[list[Key]]) -> Path:
    rows = [(number, *key) for number, cluster in enumerate(clusters) for key in cluster]
    columns = [[row[i] for row in rows] for i in range(3)]
    types = [pa.int64(), pa.string(), pa.int64()]
    table = pa.table([pa.array(c, t) for c, t in zip(columns, types, strict=True)], names=["cluster", "file", "row"])
    pyarrow.parquet.write_table(table, path, row_group_size=5)
    return path


def write_pickle(path: Path, clusters: list[list[Key]]) -> Path:
    keys = [f"{file}@{row}" for cluster in clusters for file, row in cluster]
    number = {key: i for i, key in enumerate(keys)}
    components = [[number[f"{file}@{row}"] for file, row in cluster] for cluster in clusters]
    path.write_bytes(pickle.dumps((components, len(components), dict(enumerate(keys)))))
    return path


def read_removed(path: Path) -> Removed:
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert rows == sorted(rows, key=lambda row: (row["file"], row["row"]))
    return {(r["file"], r["row"]): ((r["kept_file"], r["kept_row"]), r["similarity"]) for r in rows}


CLUSTERS = [[("a/x", 0), ("a/x", 7), ("b/y", 1)], [("a/x", 2), ("c/z", 0)], [("b/y", 3), ("b/y", 12), ("c/z", 5)]]


def removed_by(tmp_path: Path, clusters: list[list[Key]], **options: Any) -> dict[Key, Key]:
    table = write_table(tmp_path / "c.parquet", clusters)
    generate_duplicates_dict(table, tmp_path / "d.parquet", QUIET, **options)
    return {key: kept for key, (kept, _) in read_removed(tmp_path / "d.parquet").items()}


def test_all_but_the_first_whether_pickle_or_table(tmp_path: Path) -> None:
    inputs = [write_pickle(tmp_path / "c.pickle", CLUSTERS), write_table(tmp_path / "c.parquet", CLUSTERS)]
    for path in inputs:
        out = tmp_path / path.suffix[1:] / "d.pickle"
        counts = generate_duplicates_dict(path, out, QUIET)
        assert pickle.loads(out.read_bytes()) == {"a/x": {7}, "b/y": {1, 12}, "c/z": {0, 5}}
        assert read_removed(out.with_suffix(".parquet")) == {
            key: (cluster[0], None) for cluster in CLUSTERS for key in cluster[1:]
        }
        assert (counts.total("read").documents, counts.total("kept").documents) == (8, 3)
        assert counts.total("duplicate", "c").documents == 2
    one, other = ((tmp_path / kind / "d.parquet").read_bytes() for kind in ("pickle", "parquet"))
    assert one == other


def test_sources_in_a_declared_order(tmp_path: Path) -> None:
    found = removed_by(tmp_path, CLUSTERS, keep="source:c,b")
    assert found == {
        ("a/x", 0): ("b/y", 1), ("a/x", 7): ("b/y", 1), ("a/x", 2): ("c/z", 0),
        ("b/y", 3): ("c/z", 5), ("b/y", 12): ("c/z", 5),
    }  # fmt: skip


def test_a_source_that_no_cluster_has_is_pointed_out(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    table = write_table(tmp_path / "c.parquet", CLUSTERS)
    generate_duplicates_dict(table, tmp_path / "d.parquet", RunOptions(workers=1), keep="source:bb,c")
    assert "note: no cluster has a document of bb; a, b, c have" in capfd.readouterr().err


def test_no_cluster_loses_its_last_copy(tmp_path: Path) -> None:
    """What another stage drops comes last, whatever the policy; SlimPajama's pickle and our table say so alike."""
    (tmp_path / "short.pickle").write_bytes(pickle.dumps({"a/x": {0, 2}, "never/seen": {1}}))
    write_keys(tmp_path / "bad.parquet", {"c/z": [0]})
    dropped = (tmp_path / "short.pickle", tmp_path / "bad.parquet")
    found = removed_by(tmp_path, CLUSTERS, dropped=dropped)
    assert found[("a/x", 0)] == found[("b/y", 1)] == ("a/x", 7)
    assert found[("c/z", 0)] == ("a/x", 2)  # all of that cluster is dropped anyway
    assert removed_by(tmp_path, CLUSTERS, dropped=dropped, keep="source:a")[("a/x", 0)] == ("a/x", 7)


def test_documents_of_an_index_are_kept_and_not_counted(tmp_path: Path) -> None:
    old, older = "index:2022:a/x", "index:2023:b/y"
    clusters = [[(old, 3), (older, 1), ("a/x", 0)], [(old, 4), (older, 9)], [("a/x", 5), ("b/y", 5)]]
    assert removed_by(tmp_path, clusters, keep="source:b") == {("a/x", 0): (old, 3), ("a/x", 5): ("b/y", 5)}
    counts = generate_duplicates_dict(tmp_path / "c.parquet", tmp_path / "again.parquet", QUIET)
    assert [counts.total(reason).documents for reason in ("read", "kept", "duplicate")] == [3, 1, 2]


_KEYS = st.tuples(st.sampled_from(["a/x", "a/é@1", "b/y", "index:o:a/x"]), st.integers(0, 30))


@settings(max_examples=40)
@given(keys=st.lists(_KEYS, unique=True, max_size=60), cuts=st.sets(st.integers(2, 58)), drop=st.sets(_KEYS))
def test_equals_a_plain_walk(
    tmp_path_factory: pytest.TempPathFactory, keys: list[Key], cuts: set[int], drop: set[Key]
) -> None:
    folder = tmp_path_factory.mktemp("walk")
    ends = [0, *sorted(cuts), len(keys)]
    clusters = [sorted(keys[i:j]) for i, j in pairwise(ends) if keys[i:j]]
    (folder / "drop.pickle").write_bytes(pickle.dumps({file: {r for f, r in drop if f == file} for file, _ in drop}))
    expected = {}
    for cluster in clusters:
        indexed = {key for key in cluster if key[0].startswith("index:")}  # no stage of ours can drop those
        order = sorted(cluster, key=lambda key: (key not in indexed, key in drop - indexed, key))
        expected |= {key: order[0] for key in order[1:] if key not in indexed}
    assert removed_by(folder, clusters, dropped=(folder / "drop.pickle",)) == expected


def write_corpus(root: Path, files: dict[str, list[Any]]) -> None:
    """Files of records; a text alone is a record."""
    for name, records in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [record if isinstance(record, dict) else {"text": record} for record in records]
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pa.Table.from_pylist(lines), path)
        else:
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def shingles(text: str, width: int = 13) -> set[str]:
    form = matching_form(text)
    return {form[i : i + width] for i in range(len(form) - width + 1)}


def reference(files: dict[str, list[str]], clusters: list[list[Key]], measure: str, threshold: float) -> Removed:
    found: Removed = {}
    for cluster in clusters:
        kept: list[Key] = []
        for key in cluster:
            one = shingles(files[key[0]][key[1]])
            for other_key in kept:
                other = shingles(files[other_key[0]][other_key[1]])
                similarity = len(one & other) / len(one if measure == "containment" else one | other)
                if similarity >= threshold:
                    found[key] = other_key, similarity
                    break
            else:
                kept.append(key)
    return found


@pytest.fixture(scope="module")
def chained(texts_of: Callable[[int, int], list[str]]) -> tuple[dict[str, list[str]], list[list[Key]]]:
    """Texts of several sources, and clusters of them that only chains of near-duplicates join."""
    names = ["arxiv/a.jsonl", "book/b é.jsonl", "wiki/c.parquet"]
    files: dict[str, list[str]] = {name: [] for name in names}
    clusters = []
    for number in range(12):
        words, others = (text.split() for text in texts_of(2, 2 * number))
        members = []
        for i in range(0, 60, 3):
            name = names[(i + number) % 3]
            members.append((name, len(files[name])))
            files[name].append(" ".join(others[: i * number // 3] + words[i * number // 3 :]))
            files[name].append("in no cluster")
        clusters.append(sorted(members))
    return files, clusters


@pytest.fixture(scope="module")
def norm(chained: tuple, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verified") / "NORM"
    write_corpus(root, chained[0])
    return root


@pytest.mark.parametrize(("measure", "threshold"), [("jaccard", 0.8), ("jaccard", 0.5), ("containment", 0.9)])
def test_verified_removals_equal_the_reference(
    chained: tuple, norm: Path, tmp_path: Path, measure: Any, threshold: float
) -> None:
    files, clusters = chained
    table = write_table(tmp_path / "c.parquet", clusters)
    counts = generate_duplicates_dict(
        table, tmp_path / "d.pickle", QUIET, verify=measure, threshold=threshold, corpus=norm
    )
    expected = reference(files, clusters, measure, threshold)
    assert read_removed(tmp_path / "d.parquet") == expected
    assert {
        (file, row) for file, rows in pickle.loads((tmp_path / "d.pickle").read_bytes()).items() for row in rows
    } == set(expected)
    assert not {kept for kept, _ in expected.values()} & set(expected)
    went = [counts.total(reason).documents for reason in ("read", "kept", "duplicate", "spared")]
    assert went == [240, 12, len(expected), 240 - 12 - len(expected)]
    assert len(expected) < 228


def test_neither_memory_nor_workers_nor_the_hash_seed_change_a_byte(
    chained: tuple, norm: Path, tmp_path: Path, run: Callable, contents: Callable
) -> None:
    table = write_table(tmp_path / "c.parquet", chained[1])
    found = []
    for number, resources in enumerate(["--workers 1 --memory 1K", "--workers 2 --memory 1GiB"]):
        out = tmp_path / str(number)
        options = f"--verify jaccard --threshold 0.7 --corpus '{norm}' {resources}"
        ended = run(COMMAND.format(clusters=table, out=out / "d.pickle", options=options), PYTHONHASHSEED=str(number))
        assert "verified 228 candidates: " in ended.stderr
        assert "MB of text in" in ended.stderr
        found.append(contents(out))
        assert not [path for path in out.rglob("*") if path.suffix in (".bin", ".text", ".index", ".partial")]
    assert found[0] == found[1]
    assert len(found[0]) == 2


def test_killed_anywhere_and_started_again(
    chained: tuple, norm: Path, tmp_path: Path, run: Callable, start: Callable, contents: Callable
) -> None:
    table = write_table(tmp_path / "c.parquet", chained[1])
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = f"--verify jaccard --keep longest --corpus '{norm}' --workers 2 --memory 1K"
    line = COMMAND.format(clusters=table, out=killed / "d.pickle", options=options)
    run(line.replace(str(killed), str(whole)))
    for pattern in ("members.bin", "*.index", "judged/*"):
        process = start(line)
        end = time.monotonic() + 60
        while process.poll() is None and not list(killed.rglob(pattern)) and time.monotonic() < end:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not (killed / "d.pickle").exists()
    (judged,) = killed.rglob("judged")
    (judged / "000000.later").write_bytes(bytes(3 * PLACED.itemsize))  # as a kill in the middle of a round leaves it
    run(line)
    assert contents(killed) == contents(whole)
    assert "done already" in run(line).stderr
    assert not list(killed.rglob("*.text"))


@pytest.fixture(scope="module")
def indexed(chained: tuple, norm: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Key]]]:
    """Signatures of the same texts as a corpus of years ago, and clusters that every third of those joins."""
    folder = tmp_path_factory.mktemp("index") / "2022"
    to_hash("all", norm, folder, 0, "0", 0, 99, options=QUIET)
    old = [[(f"index:2022:{file}", row) for file, row in cluster[1::3]] for cluster in chained[1]]
    return folder, [sorted(some) + cluster for some, cluster in zip(old[:-2], chained[1], strict=False)] + chained[1][
        -2:
    ]


@pytest.mark.parametrize("options", [QUIET, RunOptions(workers=2, memory="8K", quiet=True)])
def test_of_an_index_the_signatures_are_compared(
    chained: tuple, norm: Path, indexed: tuple, tmp_path: Path, options: RunOptions
) -> None:
    files, (folder, clusters) = chained[0], indexed
    table = write_table(tmp_path / "c.parquet", clusters)
    counts = generate_duplicates_dict(
        table,
        tmp_path / "d.parquet",
        options,
        verify="jaccard",
        threshold=0.7,
        corpus=norm,
        index=(f"2022={folder}",),
    )
    expected = {}
    for cluster in clusters:
        kept: list[Key] = []
        for key in cluster:
            found = None if key[0].startswith("index:") else first_like(files, key, kept)
            if found:
                expected[key] = found
            else:
                kept.append(key)
    rows = pyarrow.parquet.read_table(tmp_path / "d.parquet").to_pylist()
    assert {(r["file"], r["row"]): ((r["kept_file"], r["kept_row"]), r["similarity"]) for r in rows} == expected
    assert {r["measured"] for r in rows} == {"exact", "estimated"}
    assert all((r["measured"] == "estimated") == r["kept_file"].startswith("index:") for r in rows)
    went = [counts.total(reason).documents for reason in ("read", "kept", "duplicate", "spared")]
    assert went == [240, 2, len(expected), 238 - len(expected)]


def first_like(files: dict[str, list[str]], key: Key, kept: list[Key]) -> tuple[Key, float] | None:
    text = files[key[0]][key[1]]
    for other in kept:
        file = other[0].removeprefix("index:2022:")
        if file != other[0]:
            values, _ = signatures([text, files[file][other[1]]])
            similarity = jaccard(values[0], values[1])
        else:
            one, two = shingles(text), shingles(files[file][other[1]])
            similarity = len(one & two) / len(one | two)
        if similarity >= 0.7:
            return other, similarity
    return None


def test_an_index_that_cannot_be_compared(chained: tuple, norm: Path, indexed: tuple, tmp_path: Path) -> None:
    folder, clusters = indexed
    options = {"verify": "jaccard", "corpus": norm}
    for change, message in [
        ({}, "documents of an index, such as those of 'index:2022:arxiv/a.jsonl': give --index"),
        ({"index": (f"2021={folder}",)}, "give --index as"),
        ({"index": (str(folder),), "verify": "containment"}, "the Jaccard similarity alone"),
        ({"index": (str(folder),), "width": 5, "unit": "word"}, "wanted --width 13 --unit character"),
        ({"index": (str(tmp_path / "none"),)}, "wanted the folder that to_hash wrote to"),
    ]:
        with pytest.raises(UsageError, match=message):
            removed_by(tmp_path, clusters, **(options | change))
    with pytest.raises(UsageError, match=r"holds signatures of \d+ of the \d+ documents that clusters name"):
        missing = [("index:2022:arxiv/a.jsonl", 99999), ("arxiv/a.jsonl", 0)]
        removed_by(tmp_path, [missing], **options, index=(str(folder),))


DATED: dict[str, list[Any]] = {
    "a/x.jsonl": [
        {"text": "one " * 9, "meta": {"date": "2021-05-01"}},
        {"text": "two " * 9, "meta": {"date": "2023-05-01T10:00:00Z"}},
        {"text": "three " * 9, "meta": {}},
        {"text": "four", "meta": {"date": "soon"}},
    ],
    "b/y.parquet": [{"text": "five", "meta": {"date": "2022-01-01"}}, {"text": "six", "meta": {"date": "2024-01-01"}}],
}


def test_the_newest_by_a_field_of_the_record(tmp_path: Path, run: Callable) -> None:
    write_corpus(tmp_path / "NORM", DATED)
    a, b = "a/x.jsonl", "b/y.parquet"
    clusters = [[(a, 0), (a, 1), (b, 0)], [(a, 2), (a, 3), (b, 1)]]
    found = removed_by(tmp_path, clusters, keep="newest:meta.date", corpus=tmp_path / "NORM")
    assert found == {(a, 0): (a, 1), (b, 0): (a, 1), (a, 2): (b, 1), (a, 3): (b, 1)}
    options = f"--keep newest:meta.date --corpus {tmp_path}/NORM"
    ended = run(COMMAND.format(clusters=tmp_path / "c.parquet", out=tmp_path / "e.pickle", options=options))
    assert "note: meta.date is missing in 1 of 6 documents, and neither a number nor a date in 1" in ended.stderr
    assert "a/x.jsonl@3: 'soon'" in ended.stderr


def test_the_longest_text(tmp_path: Path) -> None:
    write_corpus(tmp_path / "NORM", {"a/x.jsonl": ["ab", "日本語", "abc", "äöüß", "12345678"]})
    clusters = [[("a/x.jsonl", row) for row in range(4)]]
    found = removed_by(tmp_path, clusters, keep="longest", corpus=tmp_path / "NORM")
    assert found == {("a/x.jsonl", row): ("a/x.jsonl", 3) for row in range(3)}
    assert removed_by(tmp_path, [clusters[0][:3]], keep="longest", corpus=tmp_path / "NORM") == {
        ("a/x.jsonl", 0): ("a/x.jsonl", 1), ("a/x.jsonl", 2): ("a/x.jsonl", 1),
    }  # fmt: skip


def test_a_large_file_is_read_in_slices(chained: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, clusters = chained
    monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", 20_000)
    write_corpus(tmp_path / "NORM", files)
    options = {"verify": "jaccard", "corpus": tmp_path / "NORM"}
    found = removed_by(tmp_path, clusters, **options)
    assert found == {key: kept for key, (kept, _) in reference(files, clusters, "jaccard", 0.8).items()}


def test_another_corpus_or_an_option_changed_is_not_passed_over(tmp_path: Path, chained: tuple, norm: Path) -> None:
    files, clusters = chained
    shutil.copytree(norm, tmp_path / "NORM")
    options = {"verify": "jaccard", "corpus": tmp_path / "NORM"}
    first = removed_by(tmp_path, clusters, **options)
    assert removed_by(tmp_path, clusters, **options, threshold=0.5) != first
    changed = {name: ["nothing alike" * (i + 9) for i in range(len(texts))] for name, texts in files.items()}
    write_corpus(tmp_path / "NORM", changed)
    again = removed_by(tmp_path, clusters, **options)
    assert again == {key: kept for key, (kept, _) in reference(changed, clusters, "jaccard", 0.8).items()} != first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": "jaccard"}, "--verify jaccard reads the documents: give --corpus"),
        ({"keep": "longest"}, "--keep longest reads the documents: give --corpus"),
        ({"keep": "oldest"}, "--keep oldest: wanted one of first"),
        ({"verify": "jaccard", "threshold": 80.0, "corpus": Path()}, "--threshold 80.0"),
        ({"verify": "jaccard", "width": 0, "corpus": Path()}, "--width 0"),
        ({"verify": "jaccard", "corpus": Path("no/such")}, "no/such: wanted a folder"),
        ({"dropped": (Path("none.pickle"),)}, "none.pickle: wanted"),
    ],
)
def test_options_that_cannot_be_met(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        removed_by(tmp_path, CLUSTERS, **options)
    assert not (tmp_path / "d.parquet").exists()


def test_a_corpus_that_is_not_the_one_that_was_signed(tmp_path: Path, chained: tuple, norm: Path) -> None:
    with pytest.raises(UsageError, match=r"3 files that --corpus does not have, 'a/x' the first; it has 'arxiv/a"):
        removed_by(tmp_path, CLUSTERS, verify="jaccard", corpus=norm)
    with pytest.raises(InputError, match=r"no document in row 99999, and a cluster names arxiv/a\.jsonl@99999"):
        removed_by(tmp_path, [[("arxiv/a.jsonl", 0), ("arxiv/a.jsonl", 99999)]], verify="jaccard", corpus=norm)
    write_corpus(tmp_path / "NORM", {"a/x.jsonl": ["one", {"no text": 1}, "two"]})
    with pytest.raises((InputError, TooManyMalformed)):
        removed_by(tmp_path, [[("a/x.jsonl", 0), ("a/x.jsonl", 1)]], verify="jaccard", corpus=tmp_path / "NORM")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"cluster": [1, 0], "file": ["a", "b"], "row": [0, 0]}, "do not ascend"),
        ({"cluster": [0, 0], "file": ["a", None], "row": [0, 0]}, "file name is missing"),
        ({"cluster": [0, 0], "file": ["a", "b"], "row": [0, None]}, "column row is int64 with 1 nulls"),
        ({"cluster": [0.5, 1], "file": ["a", "b"], "row": [0, 0]}, "column cluster is double"),
        ({"cluster": [0, 0], "file": ["a", "b"]}, "has no column row: it has cluster, file"),
    ],
)
def test_tables_that_are_none_of_ours(tmp_path: Path, columns: dict, message: str) -> None:
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "c.parquet")
    with pytest.raises(InputError, match=message):
        generate_duplicates_dict(tmp_path / "c.parquet", tmp_path / "d.pickle", QUIET)


def test_a_document_in_two_clusters(tmp_path: Path, norm: Path) -> None:
    key = ("arxiv/a.jsonl", 0)
    with pytest.raises(InputError, match=r"arxiv/a\.jsonl@0 is in it twice"):
        removed_by(tmp_path, [[key, ("arxiv/a.jsonl", 2)], [key, ("arxiv/a.jsonl", 4)]], verify="jaccard", corpus=norm)


def test_no_cluster_at_all(tmp_path: Path, norm: Path) -> None:
    for options in ({}, {"verify": "jaccard", "corpus": norm}, {"keep": "newest:x", "corpus": norm}):
        assert removed_by(tmp_path, [], **options) == {}
        generate_duplicates_dict(write_pickle(tmp_path / "c.pickle", []), tmp_path / "e.pickle", QUIET, **options)
        assert pickle.loads((tmp_path / "e.pickle").read_bytes()) == {}
