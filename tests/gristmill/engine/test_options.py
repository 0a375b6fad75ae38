"""Options of a run: sizes, values that are refused before anything is written; its summary line."""

from pathlib import Path

import pytest

from gristmill.budget import usable_cores
from gristmill.counts import Counts
from gristmill.engine.options import RunOptions, parse_size
from gristmill.engine.report import print_summary
from gristmill.engine.run import open_stage
from gristmill.errors import UsageError
from tests.gristmill.engine.upper_stage import STAGE


@pytest.mark.parametrize(
    ("text", "size"), [("512MiB", 512 << 20), ("4G", 4 << 30), ("1000", 1000), ("1.5k", 1536), ("2 GB", 2 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1G", "much", "1X", "nan", "inf", "1e999"])
def test_an_invalid_size_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


def test_more_workers_than_help_are_not_started() -> None:
    cores = usable_cores()
    assert RunOptions(workers=64 * cores).processes == 2 * cores
    assert RunOptions(workers=1).processes == 1 and RunOptions().processes == cores
    assert RunOptions(workers=64 * cores, memory="64GiB", executor="ray").memory_per_worker == (1 << 30) // cores


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RunOptions(workers=0), "--workers 0"),
        (RunOptions(max_malformed=float("nan")), "--max_malformed nan"),
        (RunOptions(max_malformed=2.0), "--max_malformed 2.0"),
        (RunOptions(memory="much"), "is not a size"),
        (RunOptions(memory="4"), "--memory 4 is a number of bytes: expected one with a unit, such as 4GiB"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, options: RunOptions, message: str) -> None:
    with pytest.raises(UsageError, match=message), open_stage(STAGE, tmp_path / "out", options):
        raise AssertionError
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("variable", ["GRISTMILL_LEASE_SECONDS", "GRISTMILL_LOG_SECONDS"])
def test_a_time_that_is_none_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Also where it is not needed, as on a disk: it is a mistake, and the next run may need it."""
    monkeypatch.setenv(variable, "nan")
    with (
        pytest.raises(UsageError, match=f"{variable} 'nan': expected seconds"),
        open_stage(STAGE, tmp_path / "out", RunOptions(workers=1)),
    ):
        raise AssertionError
    assert not (tmp_path / "out").exists()


def test_a_summary_names_what_is_passed_on_and_then_each_reason_whatever_came_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for order in (["short", "kept", "duplicate", "read"], ["read", "duplicate", "kept", "short"]):
        counts = Counts({}, [])
        for reason in order:
            counts.add("web", reason, 1, 3 if reason == "read" else 1)
        print_summary("filter", counts, 1, 1, 1.0)
        assert capsys.readouterr().err.startswith("filter: 3 read = 1 kept + 1 duplicate + 1 short |")
