"""`gristmill apply --format parquet`: the same records as lines of JSON, in typed tables, whatever runs the tasks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dedup.remove_lines import remove_lines
from dedup.remove_spans import remove_spans
from gristmill.engine.options import RunOptions
from gristmill.errors import UsageError
from gristmill.io.files import rejects_path
from gristmill.io.readers import read_corpus
from preprocessing.apply import apply
from preprocessing.decontaminate import decontaminate
from preprocessing.filter_quality import filter_quality
from tests.object_store import BUCKET, object_store
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]
MODULE = """
def most(documents):
    for document in documents:
        if "drop" not in document.text:
            document.fields["length"] = len(document.text)
            yield document
"""


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sources in three formats, with nested fields that not all records have, one of them malformed."""
    root = tmp_path / "corpus"
    records: list[dict[str, Any]] = [
        {"text": f"text {row} é", "meta": {"n": row, "tags": ["a"] * (row % 3)}, "score": row if row % 2 else row / 4}
        | ({"id": f"b{row}", "meta": {"n": None, "who": {"name": "x"}}} if row % 5 == 0 else {})
        for row in range(3000)
    ]
    records[7]["text"] = records[2999]["text"] = "drop"
    for name in ("web/a.jsonl", "web/deep/b.jsonl.gz", "book/c.parquet"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) for record in records]
    (root / "web/a.jsonl").write_text("".join(f"{line}\n" for line in [*lines, '{"text": 3}']))
    (root / "web/deep/b.jsonl.gz").write_text("".join(f"{line}\n" for line in lines[:20]))  # not packed, and read
    table = pa.table({"text": [f"book {row}" for row in range(50)], "at": pa.array(range(50), pa.timestamp("s"))})
    pq.write_table(table, root / "book/c.parquet")
    (tmp_path / "choosing.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("gristmill.io.writers._GROUP_BYTES", 50_000)
    return root


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder and its bytes, without state folders."""
    paths = (path for path in folder.rglob("*") if path.is_file() and ".gristmill" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def values(folder: Path) -> list[dict[str, Any]]:
    """The records of a folder by file, without fields that are null, at any depth."""

    def full(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: full(item) for name, item in value.items() if item is not None}
        return value

    return [full({name: it.value(name) for name in it.fields}) for it in read_corpus(folder)]


def test_records_and_counts_are_those_of_lines(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = RunOptions(workers=2, quiet=True)
    counts = apply(corpus, tmp_path / "lines", "choosing:most", options)
    found = []
    for name in ("one", "two"):
        assert apply(corpus, tmp_path / name, "choosing:most", options, format="parquet").tallies == counts.tallies
        found.append(contents(tmp_path / name))
        monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", 30_000)  # the files are cut into pieces
        monkeypatch.setattr("gristmill.engine.slices.SMALL_BYTES", 0)
    assert found[0] == found[1]
    assert sorted(found[0]) == ["book/c.parquet", "web/a.parquet", "web/a.parquet.malformed", "web/deep/b.parquet"]
    assert values(tmp_path / "one") == values(tmp_path / "lines")
    assert rejects_path(tmp_path / "one/web/a.parquet").read_text().count("\n") == 1
    table = pq.ParquetFile(tmp_path / "one/web/a.parquet")
    groups = [table.metadata.row_group(number).num_rows for number in range(table.num_row_groups)]
    assert len(groups) >= 3 and max(groups) <= 1024
    tags = pa.list_(pa.field("element", pa.string()))
    meta = pa.struct({"n": pa.int64(), "who": pa.struct({"name": pa.string()}), "tags": tags})
    fields = {"text": pa.string(), "meta": meta, "score": pa.float64(), "id": pa.string(), "length": pa.int64()}
    for name in ("web/a.parquet", "web/deep/b.parquet"):
        assert {field.name: field.type for field in pq.read_schema(tmp_path / "one" / name)} == fields


@pytest.mark.parametrize("stage", ["filter_quality", "remove_lines", "remove_spans", "decontaminate"])
def test_other_stages_write_the_same_records_and_tables(corpus: Path, tmp_path: Path, stage: str) -> None:
    (tmp_path / "own.toml").write_text("words.max = 2\n")
    (tmp_path / "quiz.jsonl").write_text(json.dumps({"text": " ".join(f"of{number}" for number in range(20))}))
    function, more = {
        "filter_quality": (filter_quality, {"recipe": str(tmp_path / "own.toml")}),
        "remove_lines": (remove_lines, {"min_characters": 0, "min_count": 2}),
        "remove_spans": (remove_spans, {"min": 16}),
        "decontaminate": (decontaminate, {"against": (tmp_path / "quiz.jsonl",)}),
    }[stage]
    options = RunOptions(workers=1, quiet=True)
    counts = [
        function(corpus, tmp_path / format, options=options, format=format, **more) for format in ("jsonl", "parquet")
    ]
    assert counts[0].tallies == counts[1].tallies and counts[0].total("written").documents > 0
    assert values(tmp_path / "jsonl") == values(tmp_path / "parquet")
    for path in tmp_path.glob("jsonl.*.parquet"):
        assert path.read_bytes() == path.with_name(path.name.replace("jsonl", "parquet", 1)).read_bytes()


def test_a_file_that_is_gone_is_written_again(corpus: Path, tmp_path: Path) -> None:
    """Though the lines of JSON that it was made of were temporary."""
    found = []
    for _ in range(2):
        apply(corpus, tmp_path / "out", "choosing:most", RunOptions(workers=1, quiet=True), format="parquet")
        found.append(contents(tmp_path / "out"))
        (tmp_path / "out/web/a.parquet").unlink()
        (tmp_path / "out/web/a.parquet.malformed").unlink()
    assert found[0] == found[1] and len(found[0]) == 4


def test_nothing_runs_again_and_another_format_takes_the_place(corpus: Path, tmp_path: Path, capfd: Any) -> None:
    options = RunOptions(workers=1)
    for format, suffixes in (
        ("parquet", {".parquet"}),
        ("parquet", {".parquet"}),
        ("jsonl", {".jsonl", ".gz", ".zst"}),
    ):
        capfd.readouterr()
        apply(corpus, tmp_path / "out", "choosing:most", options, format=format)
        assert {Path(name).suffix for name in contents(tmp_path / "out")} == {*suffixes, ".malformed"}


@pytest.mark.parametrize(
    ("records", "fault"),
    [
        (
            [{"text": "a", "x": 1}, {"text": "b", "x": "one"}],
            "a.jsonl cannot be written as Parquet.*'x'.*--format jsonl",
        ),
        ([{"text": "a", "x": 1 << 70}], "a.jsonl cannot be written as Parquet.*field 'x'.*too large"),
        ([{"text": "a", "x": {"y": {}}}], "field 'x' has objects without fields"),
    ],
)
def test_what_a_table_cannot_hold_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: list, fault: str
) -> None:
    (tmp_path / "choosing.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "corpus/web").mkdir(parents=True)
    (tmp_path / "corpus/web/a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(UsageError, match=fault):
        apply(tmp_path / "corpus", tmp_path / "out", "choosing:most", RunOptions(workers=1), format="parquet")


def test_files_of_a_source_whose_types_differ_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "choosing.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in (("web/a", 1), ("web/b", "one"), ("book/a", "other")):
        (tmp_path / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "corpus" / f"{name}.jsonl").write_text(json.dumps({"text": "t", "x": value}))
    with pytest.raises(UsageError, match=r"web/b.jsonl cannot be written as Parquet.*Field x has incompatible types"):
        apply(tmp_path / "corpus", tmp_path / "out", "choosing:most", RunOptions(workers=1), format="parquet")


@pytest.mark.thorough
def test_shards_and_a_bucket_give_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}

    def start(target: str, *more: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "gristmill_cli", "apply", str(corpus), target, "choosing:most"]
        options = ["--format", "parquet", "--workers", "1", "--quiet", *more]
        return subprocess.Popen([*command, *options], env=environment)

    shards = [start(str(tmp_path / "shards"), "--shard", f"{number}/3") for number in range(3)]
    with object_store() as store:
        environment |= store.environment
        ended = [
            process.wait(patience(300))
            for process in [start(str(tmp_path / "one")), start(f"s3://{BUCKET}/out"), *shards]
        ]
        stored = {name: data for name, data in store.tree("out").items() if ".gristmill" not in name}
    assert ended == [0] * 5
    one = contents(tmp_path / "one")
    assert len(one) == 4 and contents(tmp_path / "shards") == one == stored
