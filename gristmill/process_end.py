"""How processes end: at SIGTERM, when their parent is killed, and in time; and how one has ended, in words.

Python calls a handler of a signal between two of its instructions. In a forked process that is about to wait for a
lock, as a worker of a multiprocessing.Pool does, it would never be called, and whoever waits for that process waits
forever: processes that are forked from one that handles SIGTERM do not, and end at once.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import FrameType

TERMINATED = 128 + signal.SIGTERM  # the exit code of a process that handles SIGTERM
_EXIT_SECONDS = 5.0
_FIRST = 1000  # priority of a finalizer before those of multiprocessing
_before_fork = threading.local()  # the signal mask of the thread that forks this process


class Terminated(BaseException):
    """SIGTERM was received."""


class _Handler:
    """A handler of SIGTERM that forked processes do not keep."""

    def __init__(self, action: Callable[[FrameType | None], None]) -> None:
        self.action = action

    def __call__(self, _: int, frame: FrameType | None) -> None:
        self.action(frame)


@contextmanager
def on_sigterm(action: Callable[[FrameType | None], None]) -> Iterator[None]:
    """Context: call `action` with the present frame at SIGTERM; main thread only."""
    signal.signal(signal.SIGTERM, _Handler(action))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _block() -> None:
    """Hold SIGTERM back while this process is forked: it may be meant for the new one, which is not ready for it."""
    is_ours = isinstance(signal.getsignal(signal.SIGTERM), _Handler)
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]) if is_ours else None


def _unblock() -> None:
    if _before_fork.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _end_at_once() -> None:
    if _before_fork.mask is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock()


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_end_at_once)


def exit_with_parent() -> None:
    """Exit this worker process when its parent is killed, so that it stops writing."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def exit_in_time() -> None:
    """Give this worker process a few seconds at its end, whatever was left in it that Python would wait for."""
    Finalize(None, _exit_soon, exitpriority=_FIRST)


def _exit_soon() -> None:
    last = threading.Timer(_EXIT_SECONDS, os._exit, (0,))
    last.daemon = True
    last.start()


def how_ended(processes: Iterable[BaseProcess]) -> str:
    """How the first of them died: its exit code or the name of its signal. The others end at SIGTERM then."""
    codes = [process.exitcode for process in processes if process.exitcode]
    by_itself = [code for code in codes if code not in (-signal.SIGTERM, TERMINATED)]
    code = (by_itself or codes or [0])[0]
    number = signal.SIGTERM if code == TERMINATED else -code
    return signal.Signals(number).name if number in set(signal.Signals) else f"exit code {code}"
