"""Command lines of the trainer whose reader has ended."""

import os
import signal
import socket
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


def test_a_port_that_is_in_use_is_a_user_s_error(corpus: Path, tmp_path: Path) -> None:
    """Rank 0 of launchers that have no store of their own, such as srun, listens there."""
    with socket.socket() as listening:
        listening.bind(("0.0.0.0", 0))
        listening.listen()
        port = str(listening.getsockname()[1])
        rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-m", "training.train", *small_run(corpus), "--out_dir", str(tmp_path / "run")]
        done = subprocess.run(command, env=os.environ | rank, capture_output=True, text=True)
    said = f"error: rank 0 cannot listen at 127.0.0.1:{port}, as another program does; try another MASTER_PORT\n"
    assert (done.returncode, done.stderr) == (2, said)
