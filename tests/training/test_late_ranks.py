"""A rank whose peers do not come says what it waits for."""

import socket
from datetime import timedelta
from pathlib import Path

import pytest

from tests.patience import wait_until
from tests.training.launch import launch_all, rank_variables
from training.distributed import process_group
from training.distributed.process_group import init_distributed


def join(start_seconds: float) -> None:
    """Meet the other ranks; `start_seconds`: how long another program that says nothing is waited for."""
    process_group._START_TIMEOUT = timedelta(seconds=start_seconds)
    with init_distributed("cpu", 1.0):
        pass


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_says_what_it_waits_for(tmp_path: Path, rank: int) -> None:
    """Rank 0 has no peer; at rank 1's address another program listens, which says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        if rank == 0:
            other.close()
        with launch_all(join, (600.0,), [rank_variables(rank, 2, port)], tmp_path) as launched:
            wait_until(lambda: "waited" in launched.said()[0])
            said = launched.said()[0]
    assert said.startswith(f"rank {rank} has waited 1 s for all of 2 ranks to start and meet at 127.0.0.1:{port}")


def test_a_rank_does_not_wait_forever_for_another_program(tmp_path: Path) -> None:
    """It takes connections and says nothing, which torch would wait for without an end."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with launch_all(join, (2.0,), [rank_variables(1, 2, port)], tmp_path) as launched:
            assert launched.codes() == [2]
            said = launched.said()[0]
    assert f"error: rank 1 found no other rank at 127.0.0.1:{port}; look for their errors" in said
