"""The records' own ids in the tables of removed documents and of clusters, against a plain look-up by key."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dedup import generate_duplicates_dict
from gristmill.engine.options import RunOptions
from tests.dedup.removal.clustered_corpus import QUIET, Key, write_corpus, write_pickle, write_table

CLUSTERS_OF = "d_clusters.parquet"


@pytest.fixture
def identified(chained: tuple, tmp_path: Path) -> tuple[Path, dict[Key, str | None]]:
    """The corpus of chains, whose records have ids of many kinds or none, and the ids that tables should have."""
    chance, files, wanted = random.Random(1), dict[str, list[Any]](), dict[Key, str | None]()
    for name, texts in chained[0].items():
        files[name] = []
        for row, text in enumerate(texts):
            kinds: list[tuple[Any, str | None]] = [(f"é-{row}", f"é-{row}"), (None, None), ("", "")]
            if name.endswith(".jsonl"):
                kinds += [(row, str(row)), ({"n": [row]}, f'{{"n": [{row}]}}'), ("\ud800", "?"), (..., None)]
            own, wanted[name, row] = chance.choice(kinds)
            files[name].append({"text": text} | ({} if own is ... else {"id": own}))
    write_corpus(tmp_path / "NORM", files)
    return tmp_path / "NORM", wanted


def check(folder: Path, wanted: dict[Key, str | None], clusters: list[list[Key]]) -> None:
    """The tables in a folder have the ids of their documents, and of those kept in their place."""
    removed = pq.read_table(folder / "d.parquet").to_pylist()
    assert removed and [it["id"] for it in removed] == [wanted[it["file"], it["row"]] for it in removed]
    assert [it["kept_id"] for it in removed] == [wanted.get((it["kept_file"], it["kept_row"])) for it in removed]
    rows = pq.read_table(folder / CLUSTERS_OF).to_pylist()
    keys = [key for cluster in clusters for key in cluster]
    assert [(it["file"], it["row"], it["id"]) for it in rows] == [(*key, wanted.get(key)) for key in keys]
    assert [it["cluster"] for it in rows] == [number for number, of in enumerate(clusters) for _ in of]


@pytest.mark.parametrize("options", [{"verify": "jaccard", "threshold": 0.7}, {"keep": "longest"}, {}], ids=str)
def test_whatever_decides_and_however_slices_are_cut(
    chained: tuple,
    identified: tuple,
    tmp_path: Path,
    options: dict,
    monkeypatch: pytest.MonkeyPatch,
    contents: Callable,
) -> None:
    corpus, wanted = identified
    table, found = write_table(tmp_path / "c.parquet", chained[1]), []
    for number, memory in enumerate(["1GiB", "2MiB"]):
        out = tmp_path / str(number)
        run_options = RunOptions(workers=2 - number, memory=memory, quiet=True)
        generate_duplicates_dict(table, out / "d.pickle", run_options, corpus=corpus, **options)
        check(out, wanted, chained[1])
        found.append(contents(out))
        monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", 20_000)
        monkeypatch.setattr("gristmill.engine.slices.SMALL_BYTES", 0)
        monkeypatch.setattr("dedup.removal.fetching._BATCH", 3)
        monkeypatch.setattr("dedup.removal.clusters._MIN_PART_SIZE", 16)
    assert found[0] == found[1]


def test_of_an_index_there_are_none(indexed: tuple, identified: tuple, tmp_path: Path) -> None:
    folder, clusters = indexed
    table = write_pickle(tmp_path / "c.pickle", clusters)
    options: dict[str, Any] = {"verify": "jaccard", "threshold": 0.7, "index": (str(folder),)}
    generate_duplicates_dict(table, tmp_path / "out/d.parquet", QUIET, corpus=identified[0], **options)
    check(tmp_path / "out", identified[1], clusters)


def test_without_ids_tables_are_as_they_were(chained: tuple, chained_norm: Path, tmp_path: Path) -> None:
    """No column, and no table of clusters."""
    table = write_table(tmp_path / "c.parquet", chained[1])
    for name, corpus in (("plain", None), ("read", chained_norm)):
        generate_duplicates_dict(table, tmp_path / name / "d.parquet", QUIET, corpus=corpus)
        assert [path.name for path in (tmp_path / name).glob("*.parquet")] == ["d.parquet"]
    plain, read = ((tmp_path / name / "d.parquet").read_bytes() for name in ("plain", "read"))
    assert plain == read and "id" not in pq.read_schema(tmp_path / "read/d.parquet").names


def test_ids_that_are_gone_leave_no_table(tmp_path: Path) -> None:
    table = write_table(tmp_path / "c.parquet", [[("a/x.jsonl", 0), ("a/x.jsonl", 1)]])
    for records, names in (([{"text": "t", "id": 7}, "t"], ["d.parquet", CLUSTERS_OF]), (["t", "t"], ["d.parquet"])):
        write_corpus(tmp_path / "NORM", {"a/x.jsonl": records})
        generate_duplicates_dict(table, tmp_path / "out/d.parquet", QUIET, corpus=tmp_path / "NORM")
        assert sorted(path.name for path in (tmp_path / "out").glob("*.parquet")) == names
