"""Command: torchrun with its own arguments, exit codes that tell a stop from a failure, and time for a checkpoint.

torchrun itself ends with 1 whatever its processes end with, and kills them half a minute after a signal. And it hangs
where a node joins (torch 2.13): the node waits for an address that the first one has said only in the round before,
unless each round has a store of its own.
"""

import os
import re
import signal
import socket
import sys
from collections.abc import Sequence

_SECONDS = "120"  # that processes have after a signal to finish a step and save


def main(argv: Sequence[str] | None = None) -> None:
    """Run torchrun; exit with 128 + the signal that stopped it, or the exit code of the process that failed first."""
    words = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SECONDS)
    if is_elastic(words):
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(words)
    except SignalException as stopped:
        number = int(stopped.sigval)
        print(f"torchrun: stopped by {signal.Signals(number).name}", file=sys.stderr)
        sys.exit(128 + number)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        print(f"torchrun: {describe_failure(rank, socket.gethostname(), failure.exitcode)}", file=sys.stderr)
        sys.exit(exit_code(failure.exitcode))


def is_elastic(words: Sequence[str]) -> bool:
    """Return whether the number of nodes is a range.

    >>> is_elastic(["--nnodes=1:2", "x.py"]), is_elastic(["--nnodes", "1:2"]), is_elastic(["--nnodes", "2", "1:2"])
    (True, True, False)
    """
    return re.search(r"(^| )--nnodes[= ]\d+:\d+( |$)", " ".join(words)) is not None


def describe_failure(rank: int, node: str, code: int) -> str:
    """Say how the process ended that failed first, in the place of torchrun's block of twenty lines.

    >>> print(describe_failure(3, "node1", 2))
    rank 3 on node1 failed first, with exit code 2; what it printed is above
    >>> print(describe_failure(0, "node1", -9))
    rank 0 on node1 failed first, killed by SIGKILL, as the system does where memory runs out
    """
    first = f"rank {rank} on {node} failed first"
    if code == -signal.SIGKILL:
        return f"{first}, killed by SIGKILL, as the system does where memory runs out"
    if code < 0:
        return f"{first}, killed by {signal.Signals(-code).name}; what it printed is above"
    return f"{first}, with exit code {code}; what it printed is above"


def exit_code(code: int) -> int:
    """Return the exit code of a shell for one of a subprocess, which is negative for a signal.

    >>> exit_code(2), exit_code(-9)
    (2, 137)
    """
    return code if code >= 0 else 128 - code
