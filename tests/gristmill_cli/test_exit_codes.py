"""Exit codes: 2 for what was typed or configured and cannot be, 1 for a right command that failed."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.gristmill_cli.in_process import gristmill


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a corpus without its column, a damaged one, and one of no documents."""
    for name in ("columns", "damaged", "malformed"):
        (tmp_path / name / "web").mkdir(parents=True)
    pq.write_table(pa.table({"body": ["one two three"]}), tmp_path / "columns/web/a.parquet")
    (tmp_path / "damaged/web/a.parquet").write_text("no parquet")
    (tmp_path / "malformed/web/a.jsonl").write_text("no JSON\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("status nowhere", 2),
        ("trace nowhere web/a.jsonl@1", 2),
        ("report nowhere", 2),
        ("card nowhere", 2),
        ("preview gopher nowhere", 2),
        ("preview gopher columns", 2),
        ("estimate --corpus nowhere", 2),
        ("doctor nowhere.toml", 2),
        ("run nowhere.toml", 2),
        ("run --corpus nowhere --out out", 2),
        ("run --corpus columns --out out", 2),
        ("run --corpus malformed --out out --corpsu there", 2),
        ("run --corpus malformed --out out --recipe nowhere.toml", 2),
        ("run --corpus malformed --out out --keep_list nowhere.txt", 2),
        ("run --corpus malformed --out out --max_failed 2", 2),
        ("normalize_text --data_dir columns --target_dir out --workers 1", 2),
        ("apply malformed out no_module:function", 2),
        ("normalize_text --data_dir malformed --target_dir out --workers 1", 1),
        ("normalize_text --data_dir damaged --target_dir out --workers 1", 1),
        ("run --corpus malformed --out out --workers 1", 1),
    ],
)
def test_a_mistake_ends_with_2_and_a_failure_with_1(folder: Path, words: str, code: int) -> None:
    done = gristmill(*words.split())
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in done.stderr
