"""Command: torchrun with its own arguments, exit codes that tell a stop from a failure, and time for a checkpoint.

torchrun itself ends with 1 whatever its processes end with, and kills them half a minute after a signal. And it hangs
where a node joins (torch 2.13): the node waits for an address that the first one has said only in the round before,
unless each round has a store of its own.
"""

import os
import re
import signal
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
        print(failed, file=sys.stderr)
        sys.exit(exit_code(failed.get_first_failure()[1].exitcode))


def is_elastic(words: Sequence[str]) -> bool:
    """Return whether the number of nodes is a range.

    >>> is_elastic(["--nnodes=1:2", "x.py"]), is_elastic(["--nnodes", "1:2"]), is_elastic(["--nnodes", "2", "1:2"])
    (True, True, False)
    """
    return re.search(r"(^| )--nnodes[= ]\d+:\d+( |$)", " ".join(words)) is not None


def exit_code(code: int) -> int:
    """Return the exit code of a shell for one of a subprocess, which is negative for a signal.

    >>> exit_code(2), exit_code(-9)
    (2, 137)
    """
    return code if code >= 0 else 128 - code
