"""Command lines of the trainer whose reader has ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.conftest import small_run


@pytest.mark.parametrize(("module", "trains"), [("train", False), ("evaluate", False), ("train", True)])
def test_a_reader_of_the_output_may_end_first(module: str, trains: bool, corpus: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    options = [*small_run(corpus), "--out_dir", str(tmp_path)] if trains else ["--help"]
    command = [sys.executable, "-m", f"training.{module}", *options]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
