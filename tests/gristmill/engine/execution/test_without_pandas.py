"""pyarrow without pandas: commands that run stages import none, and whoever asks for it has it."""

import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.command import command
from gristmill.engine.options import RunOptions
from gristmill_cli.run import run_and_print
from gristmill_cli.run_config import RunConfig

SCRIPT = """
import sys
import gristmill.command
from gristmill.engine.execution.without_pandas import leave_pandas_out
print("pyarrow" in sys.modules)
leave_pandas_out()
import pyarrow
table = pyarrow.table({"number": [1, None], "text": ["a", "b"]})
print("pandas" in sys.modules)
print(table.to_pandas()["text"].tolist())
"""


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where pandas was left out."""
    left_out = list[str]()
    for module in ("gristmill.command", "gristmill_cli.run"):
        monkeypatch.setattr(f"{module}.leave_pandas_out", lambda module=module: left_out.append(module))
    return left_out


def test_pyarrow_converts_values_without_pandas() -> None:
    pytest.importorskip("pandas")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == "False\nFalse\n['a', 'b']\n"  # commands without stages start without pyarrow, too


def stage(options: RunOptions = RunOptions()) -> None:
    """Run users' functions in workers."""


def preview() -> None:
    """Run users' functions here."""


def test_a_command_that_runs_a_stage_leaves_it_out(left_out: list[str]) -> None:
    for function in (preview, stage):
        with pytest.raises(SystemExit):
            command(function, arguments=[])
        assert left_out == ["gristmill.command"] * (function is stage)


def test_a_run_leaves_it_out(left_out: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill_cli.run.run", lambda *_, **__: None)
    run_and_print(RunConfig(Path("corpus"), Path("out")))
    assert left_out == ["gristmill_cli.run"]
