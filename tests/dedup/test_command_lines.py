"""SlimPajama's command lines, from documents to the keys of duplicates, on a corpus with planted copies."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet
import pytest

from gristmill.io.keys import read_keys

STRANGE = "book/a @1 of ::; 'naïve' файл.jsonl"
PLANTED = [
    ["arxiv/a.jsonl@0", "arxiv/b.jsonl.zst@1"],
    ["arxiv/a.jsonl@3", f"{STRANGE}@0", f"{STRANGE}@4"],
    [f"{STRANGE}@1", f"{STRANGE}@3"],
]
REMOVED = {"arxiv/b.jsonl.zst": {1}, STRANGE: {0, 3, 4}}

TO_HASH = "python dedup/to_hash.py {source} {norm}/{source}/ {out}/MINHASH/{source}/ 15 0 0 9999 -w 13 -k 10000"
PAIRS = (
    "python dedup/generate_duplicate_pairs.py --input_dir {out}/MINHASH/ --out_file {out}/DUP/duplicate_pairs.txt "
    "--range 13 --bands 9 --processes 2"
)
COMPONENTS = (
    "python dedup/generate_connected_components.py --input_dir {out}/DUP "
    "--out_file {out}/DUP/connected_components.{suffix}"
)
DICT = (
    "python dedup/generate_duplicates_dict.py --input_file {out}/DUP/connected_components.{suffix} "
    "--out_file {out}/DUP/duplicates.{suffix}"
)
Commands = Callable[..., None]


@pytest.fixture(scope="module")
def chain(run: Callable, norm: Path) -> Commands:
    """Run to_hash on both data sets, then the other stages."""

    def chain(out: Path, how: str = "", suffix: str = "pickle", pairs: str = PAIRS, **environment: str) -> None:
        for line in [TO_HASH] * 2 + [pairs, COMPONENTS, DICT]:
            source = "book" if (out / "MINHASH" / "arxiv").exists() else "arxiv"
            run(f"{line} {how}".format(source=source, norm=norm, out=out, suffix=suffix), **environment)

    return chain


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, chain: Commands) -> Path:
    """What the command lines wrote, with two workers."""
    out = tmp_path_factory.mktemp("stages")
    chain(out, "--workers 2", PYTHONHASHSEED="0")
    return out


def test_pickles_are_slimpajamas(out: Path) -> None:
    with (out / "DUP/connected_components.pickle").open("rb") as file:
        components, count, keys = pickle.load(file)
    assert count == len(components) == len(PLANTED)
    assert [[keys[number] for number in component] for component in components] == PLANTED
    with (out / "DUP/duplicates.pickle").open("rb") as file:
        assert pickle.load(file) == REMOVED


def test_a_pair_is_a_line_of_two_keys(out: Path) -> None:
    lines = (out / "DUP/duplicate_pairs.txt").read_text(encoding="utf-8").splitlines()
    clusters = {key: cluster for cluster in PLANTED for key in cluster}
    assert {cluster[0] for line in lines for cluster in [clusters[line.rsplit(" :: ", 1)[1]]]} == {
        cluster[0] for cluster in PLANTED
    }
    for line in lines:
        member, first = line.rsplit(" :: ", 1)
        assert member != first
        assert clusters[member] is clusters[first]


def test_the_table_beside_says_what_was_kept(out: Path) -> None:
    rows = pyarrow.parquet.read_table(out / "DUP/duplicates.parquet").to_pylist()
    kept = {f"{row['file']}@{row['row']}": f"{row['kept_file']}@{row['kept_row']}" for row in rows}
    assert kept == {key: cluster[0] for cluster in PLANTED for key in cluster[1:]}


def test_nothing_unfinished_is_left(out: Path) -> None:
    assert not list(out.rglob("*.partial"))
    assert not [path for path in out.rglob("*.bin") if path.is_file()]


def test_one_worker_little_memory_and_another_hash_seed_give_the_same_bytes(
    tmp_path: Path, chain: Commands, out: Path, contents: Callable
) -> None:
    chain(
        tmp_path, "--workers 1 --memory 2MiB", pairs=PAIRS.replace("--processes 2", "--processes 1"), PYTHONHASHSEED="1"
    )
    assert contents(tmp_path) == contents(out)


def test_tables_hold_what_the_pickles_hold(run: Callable, tmp_path: Path, out: Path) -> None:
    shutil.copytree(out / "DUP", tmp_path / "DUP")
    for line in (COMPONENTS, DICT):
        run(line.format(out=tmp_path, suffix="parquet"))
    rows = pyarrow.parquet.read_table(tmp_path / "DUP/connected_components.parquet").to_pylist()
    clusters: dict[int, list[str]] = {}
    for row in rows:
        clusters.setdefault(row["cluster"], []).append(f"{row['file']}@{row['row']}")
    assert list(clusters.values()) == PLANTED
    keys = read_keys(tmp_path / "DUP/duplicates.parquet")
    assert {file: set(found.tolist()) for file, found in keys.items()} == REMOVED


def test_again_there_is_nothing_to_do(run: Callable, norm: Path, out: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and ".lock" not in path.name}
    for line in (TO_HASH, PAIRS, COMPONENTS, DICT):
        ended = run(line.format(source="arxiv", norm=norm, out=out, suffix="pickle"))
        assert "done already" in ended.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_by_module_and_by_path_are_the_same(run: Callable, out: Path) -> None:
    line = PAIRS.format(out=out).replace("dedup/generate_duplicate_pairs.py", "-m dedup.generate_duplicate_pairs")
    assert "done already" in run(line).stderr


def test_errors_are_a_line_and_an_exit_code(run: Callable, out: Path) -> None:
    ended = run(PAIRS.format(out=out).replace("--bands 9", "--bands 10"), fails=2)
    assert "--range 13 × --bands 10 = 130" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "words",
    [
        "python dedup/generate_duplicate_pairs.py --input_dir {0} --out_file {0}/p.txt --range 13 --bands 9",
        "python dedup/generate_connected_components.py --input_dir {0} --out_file {0}/c.pickle",
        "python dedup/generate_duplicates_dict.py --input_file {0}/c.pickle --out_file {0}/d.pickle",
        "python -m gristmill_cli cluster {0} --out {0}/c.parquet",
        "python -m gristmill_cli remove {0}/c.parquet --out {0}/d.parquet",
    ],
)
def test_a_limit_of_malformed_records_is_refused_where_none_is_read(words: str, tmp_path: Path, run: Callable) -> None:
    ended = run(f"{words.format(tmp_path)} --max_malformed 0.5", fails=2)
    assert ended.stderr.startswith("error: --max_malformed 0.5 has no effect on ")
