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


@pytest.mark.parametrize("settings", [{"verify": "jaccard", "width": 3}, {"keep": "longest"}], ids=["verify", "keep"])
def test_a_task_fetches_the_members_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    monkeypatch.setattr("gristmill.engine.slices.SMALL_BYTES", 0)  # a task for each file
    names = [f"a/{number:02}.jsonl" for number in range(FILES)]
    write_corpus(tmp_path / "NORM", {name: [f"text {number // 2}"] * 2 for number, name in enumerate(names)})
    clusters = [[(names[i], 0), (names[i], 1), (names[i + 1], 0), (names[i + 1], 1)] for i in range(0, FILES, 2)]
    local = removed_by(tmp_path, clusters, corpus=tmp_path / "NORM", **settings)
    ranges: list[str] = []
    out = Path(f"s3://{BUCKET}/out")

    def record(application: object, environment: Environment, start_response: object) -> None:
        if environment["REQUEST_METHOD"] == "GET" and environment["PATH_INFO"].endswith("/members.bin"):
            ranges.append(environment.get("HTTP_RANGE", "all"))

    with object_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        store.upload_tree(tmp_path / "NORM", "NORM")
        write_file(out / "c.parquet", write_table(tmp_path / "c.parquet", clusters).read_bytes())
        store.fault = record
        corpus = Path(f"s3://{BUCKET}/NORM")
        generate_duplicates_dict(out / "c.parquet", out / "d.parquet", QUIET, corpus=corpus, **settings)
        (tmp_path / "d.parquet").write_bytes(store.tree("out")["d.parquet"])
    size = 2 * MEMBER.itemsize
    assert sorted(ranges) == sorted(f"bytes={first}-{first + size - 1}" for first in range(0, FILES * size, size))
    removed = {key: kept for key, (kept, _) in read_removed(tmp_path / "d.parquet").items()}
    assert removed == local and len(local) == FILES * 3 // 2
