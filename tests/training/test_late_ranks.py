"""A rank whose peers do not come says what it waits for."""

import os
import socket
import subprocess
import sys

import pytest

JOIN = """
from training.distributed.process_group import init_distributed
with init_distributed("cpu", 1.0):
    pass
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_says_what_it_waits_for(rank: int) -> None:
    """Rank 0 has no peer; at rank 1's address another program listens, which says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        if rank == 0:
            other.close()
        launched = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in launched.items()}
        with subprocess.Popen(
            [sys.executable, "-c", JOIN], env=environment, stderr=subprocess.PIPE, text=True
        ) as joins:
            assert joins.stderr is not None
            said = next(line for line in joins.stderr if "waited" in line)
            joins.kill()
    assert said.startswith(f"rank {rank} has waited 1 s for all of 2 ranks to start and meet at 127.0.0.1:{port}")


def test_a_rank_does_not_wait_forever_for_another_program() -> None:
    """It takes connections and says nothing, which torch would wait for without an end."""
    limit = "from datetime import timedelta\nfrom training.distributed import process_group\n"
    limit += "process_group._START_TIMEOUT = timedelta(seconds=2)\n"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        environment = os.environ | {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        words = [sys.executable, "-c", limit + JOIN]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"error: rank 1 found no other rank at 127.0.0.1:{port}; look for their errors" in done.stderr
