"""Command: torchrun with its own arguments, exit codes that tell a stop from a failure, and time for a checkpoint.

Where it cannot begin, as a port is taken, it says so in a sentence.

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
    """Run torchrun; exit with 128 + the signal that stopped it, or the exit code of the process that failed first.

    With 2 where a port that was given is taken.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SECONDS)
    if is_elastic(words):
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
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
    except (DistError, RendezvousError) as error:
        if port := taken_port(str(error)):
            print(f"error: cannot listen at port {port}, as another program does; try another one", file=sys.stderr)
            sys.exit(2)
        print(f"torchrun: {describe_lost_meeting(error)}", file=sys.stderr)
        sys.exit(1)


def taken_port(message: str) -> str:
    """Return the port at which torch says that it cannot listen, as another program does; nothing of other errors.

    >>> taken_port("… has failed to listen on any local network address. port: 29500, …, name: EADDRINUSE, message: …")
    '29500'
    """
    port = re.search(r"port: (\d+).*EADDRINUSE", message)
    return port[1] if port else ""


def describe_lost_meeting(error: Exception) -> str:
    """Say that the nodes did not meet, or lost the first one, in the place of a traceback."""
    reason = str(error.__cause__ or error).strip().splitlines()[0]
    return (
        "the nodes could not meet, or lost the one that they meet at: see whether it runs at the address that all "
        f"name, and whether another program listens there ({reason:.200})"
    )


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
