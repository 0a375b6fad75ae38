"""A worker process of LocalExecutor: how it starts, and how it runs a call that a signal may end."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow

from gristmill.process_end import TERMINATED, Terminated, exit_in_time, exit_with_parent, interruptible
from gristmill.storage.lock import hold_worker_lock


class _Idle:
    """A worker's handler of SIGINT between two calls: the next one is interrupted as it starts."""

    is_interrupted = False

    def __call__(self, *_: object) -> None:
        self.is_interrupted = True


def start_worker(lock: Path | None) -> None:
    """Prepare this process for calls; `lock` is the lock file of the stage, of which it holds a share."""
    signal.signal(signal.SIGINT, _Idle())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    pyarrow.set_cpu_count(1)  # there is a worker for every core
    exit_in_time()
    exit_with_parent()
    multiprocessing.set_start_method(None, force=True)  # processes of a user's function start as in a script of theirs
    if lock:
        hold_worker_lock(lock)


def run_in_worker(call: Callable[[], Any]) -> Any:
    """Run a call; Ctrl-C interrupts a worker only then, as an idle one would print a traceback.

    At SIGTERM, which a scheduler sends to all processes, it ends its upload, removes temporary files, and exits.
    """
    idle = signal.getsignal(signal.SIGINT)
    try:
        with interruptible(_terminate, by_sigint=True):
            if isinstance(idle, _Idle) and idle.is_interrupted:
                raise KeyboardInterrupt
            return call()
    except Terminated:
        os._exit(TERMINATED)  # at once: an exception would be sent to a driver that may be gone


def _terminate(_: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
