"""Ranges of members: a task that reads some of the members in a bucket fetches their bytes and no others."""

from pathlib import Path

import pytest

from dedup import generate_duplicates_dict
from dedup.removal.clusters import MEMBER
from gristmill.storage.files import write_file
from tests.dedup.removal.clustered_corpus import QUIET, read_removed, removed_by, write_corpus, write_table
from tests.object_faults import Environment
from tests.object_store import BUCKET, object_store

FILES = 12


BOTH = pytest.mark.parametrize(
    "settings", [{"verify": "jaccard", "width": 3}, {"keep": "longest"}], ids=["verify", "keep"]
)


@BOTH
def test_a_task_fetches_the_members_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    monkeypatch.setattr("gristmill.engine.slices.SMALL_BYTES", 0)  # a task for each file
    names = [f"a/{number:02}.jsonl" for number in range(FILES)]
    write_corpus(tmp_path / "NORM", {name: [f"text {number // 2}"] * 2 for number, name in enumerate(names)})
    clusters = [[(names[i], 0), (names[i], 1), (names[i + 1], 0), (names[i + 1], 1)] for i in range(0, FILES, 2)]
    local = removed_by(tmp_path, clusters, corpus=tmp_path / "NORM", **settings)
    ranges = ranges_in_bucket(tmp_path, monkeypatch, clusters, settings)
    assert sorted(ranges) == [(first, first + 2) for first in range(0, FILES * 2, 2)]
    removed = {key: kept for key, (kept, _) in read_removed(tmp_path / "d.parquet").items()}
    assert removed == local and len(local) == FILES * 3 // 2


@BOTH
def test_a_task_for_a_part_of_a_file_fetches_few_members_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    """A file that is a corpus may have as many slices as there are files elsewhere."""
    monkeypatch.setattr("gristmill.engine.slices.SMALL_BYTES", 0)
    write_corpus(tmp_path / "NORM", {"a/x.jsonl": [f"text {row // 4}" for row in range(200)]})
    clusters = [[("a/x.jsonl", row + i) for i in range(4)] for row in range(0, 200, 4) if row % 20]
    local = removed_by(tmp_path, clusters, corpus=tmp_path / "NORM", **settings)
    monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", 300)
    monkeypatch.setattr("dedup.removal.clusters._NOTED", 4)
    ranges = ranges_in_bucket(tmp_path, monkeypatch, clusters, settings)
    assert len(ranges) > 10 and min(first for first, _ in ranges) == 0 and max(last for _, last in ranges) == 160
    assert max(last - first for first, last in ranges) < 30
    removed = {key: kept for key, (kept, _) in read_removed(tmp_path / "d.parquet").items()}
    assert removed == local and len(local) == 120


def ranges_in_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clusters: list[list[tuple[str, int]]], settings: dict[str, str]
) -> list[tuple[int, int]]:
    """Write d.parquet by a run in a bucket; returns the first and last member of each request, the last exclusive."""
    ranges: list[tuple[int, int]] = []
    out = Path(f"s3://{BUCKET}/out")

    def record(application: object, environment: Environment, start_response: object) -> None:
        if environment["REQUEST_METHOD"] == "GET" and environment["PATH_INFO"].endswith("/members.bin"):
            first, last = environment["HTTP_RANGE"].removeprefix("bytes=").split("-")
            ranges.append((int(first) // MEMBER.itemsize, (int(last) + 1) // MEMBER.itemsize))

    with object_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        store.upload_tree(tmp_path / "NORM", "NORM")
        write_file(out / "c.parquet", write_table(tmp_path / "c.parquet", clusters).read_bytes())
        store.fault = record
        corpus = Path(f"s3://{BUCKET}/NORM")
        generate_duplicates_dict(out / "c.parquet", out / "d.parquet", QUIET, corpus=corpus, **settings)
        (tmp_path / "d.parquet").write_bytes(store.tree("out")["d.parquet"])
    return ranges
