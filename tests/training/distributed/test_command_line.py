"""Command lines of the trainer: help whose reader has ended."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["train", "evaluate"])
def test_a_reader_of_the_help_may_end_first(module: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", f"training.{module}", "--help"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
