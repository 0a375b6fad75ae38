"""How processes end: at SIGTERM, when their parent is killed, and in time; and how one has ended, in words.

Python calls a handler of a signal between two of its instructions. In a forked process that is about to wait for a
lock, as a worker of a multiprocessing.Pool does, it would never be called, and whoever waits for that process waits
forever: processes that are forked from one that handles SIGTERM do not, and end at once.

What a handler raises in a callback from C, such as those of numba's compiler, or in a finalizer, Python drops with a
message. Here the signal is sent again instead, until what it raises reaches the program. It is sent to the main thread,
and repeatedly: a call that begins to wait just then, after Python has looked for signals, or while another thread
receives this one, would not notice it.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import FrameType

TERMINATED = 128 + signal.SIGTERM  # the exit code of a process that handles SIGTERM
_EXIT_SECONDS = 5.0
_AGAIN_SECONDS = 0.01
_REPEAT_SECONDS = 0.25
_FIRST = 1000  # priority of a finalizer before those of multiprocessing
_before_fork = threading.local()  # the signal mask of the thread that forks this process


class Terminated(BaseException):
    """SIGTERM was received."""


class _Handler:
    """A handler of a signal that forked processes do not keep, and that raises nothing where Python would drop it."""

    def __init__(self, action: Callable[[FrameType | None], None], hook: "_Hook") -> None:
        self.action, self.hook = action, hook
        self.acted = 0  # times

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _is_in_hook(frame):
            self.send_again(number)
        else:
            self.hook.is_interrupted = True
            self.acted += 1
            self.action(frame)

    def send_again(self, number: int) -> None:
        """Send the signal again, soon, until this handler acts on it or is no longer in charge."""
        acted, main = self.acted, threading.main_thread().ident
        assert main

        def send() -> None:
            time.sleep(_AGAIN_SECONDS)
            signal.pthread_kill(main, number)
            time.sleep(_REPEAT_SECONDS)
            while self.acted == acted and not self.hook.has_ended:
                signal.pthread_kill(main, number)
                time.sleep(_REPEAT_SECONDS)

        threading.Thread(target=send, daemon=True).start()


class _Hook:
    """sys.unraisablehook that sends a signal again if Python dropped what its handler raised.

    After an interruption it is silent: finalizers fail that find objects which were only half made.
    """

    def __init__(self, at_sigterm: Callable[[FrameType | None], None]) -> None:
        self.sigterm, self.sigint = _Handler(at_sigterm, self), _Handler(_interrupt, self)
        self.before = sys.unraisablehook
        self.is_interrupted = self.has_ended = False

    def __call__(self, dropped: "sys.UnraisableHookArgs") -> None:
        is_sigterm = issubclass(dropped.exc_type, Terminated)
        if is_sigterm:
            if not self.has_ended:  # else it ends the process, as by default
                signal.signal(signal.SIGTERM, self.sigterm)
            self.sigterm.send_again(signal.SIGTERM)
        elif issubclass(dropped.exc_type, KeyboardInterrupt) and not self.has_ended:
            self.sigint.send_again(signal.SIGINT)
        elif not self.is_interrupted:
            self.before(dropped)


def _interrupt(_: FrameType | None) -> None:
    raise KeyboardInterrupt


def _is_in_hook(frame: FrameType | None) -> bool:
    while frame and frame.f_code is not _Hook.__call__.__code__:
        frame = frame.f_back
    return frame is not None


@contextmanager
def interruptible(at_sigterm: Callable[[FrameType | None], None], by_sigint: bool) -> Iterator[None]:
    """Context: call `at_sigterm` with the present frame at SIGTERM; main thread only.

    `by_sigint`: raise KeyboardInterrupt at SIGINT; else that is handled as before.
    """
    hook, before = _Hook(at_sigterm), signal.getsignal(signal.SIGINT)
    sys.unraisablehook = hook
    signal.signal(signal.SIGTERM, hook.sigterm)
    try:
        if by_sigint:
            signal.signal(signal.SIGINT, hook.sigint)
        yield
    finally:
        hook.has_ended = True  # first: what is dropped from now on must not set the handler again
        if by_sigint:
            signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.unraisablehook = hook if hook.is_interrupted else hook.before


@contextmanager
def delay_sigint() -> Iterator[None]:
    """Delay SIGINT until the block ends.

    Masking the signal is not enough: another thread, such as one of NumPy's, would receive it, and
    Python would raise KeyboardInterrupt here all the same.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield  # KeyboardInterrupt is raised in the main thread only, and not where the signal is ignored
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:  # also after an error, which the signal may have caused in another process
            signal.raise_signal(signal.SIGINT)


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
    """How the first of them died: its exit code or the name of its signal. The others end at SIGTERM then.

    Where the fork server died before them, nobody knows.
    """
    ended = [process.exitcode for process in processes if process.exitcode is not None]
    if not ended:
        return "or the process that starts them did"
    codes = [code for code in ended if code]
    by_itself = [code for code in codes if code not in (-signal.SIGTERM, TERMINATED)]
    code = (by_itself or codes or ended)[0]
    number = signal.SIGTERM if code == TERMINATED else -code
    return signal.Signals(number).name if number in set(signal.Signals) else f"exit code {code}"
