"""Processes: how they end, at SIGTERM and Ctrl-C, when their parent is killed, and in time; calls in a process apart.

Both signals raise an exception in the main thread, which ends its work in order. Python drops an exception that is
raised in a callback from C, as while numba compiles, or in a finalizer: then the signal is sent again. A call of a
library that lasts minutes, in which Python handles no signal, such as the training of a tokenizer, is made in a process
of its own, which is killed. Modules stay, and need not be searched for garbage.
"""

import ctypes
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import Any

from gristmill.errors import WorkerDied

TERMINATED = 128 + signal.SIGTERM  # the exit code of a process that handles SIGTERM
_EXIT_SECONDS = 5.0
_AGAIN_SECONDS = 0.05
_FIRST = 1000  # priority of a finalizer before multiprocessing's
_SERVE = "from gristmill.processes import serve; serve()"
_SIGNAL_AT_DEATH = 1  # of the parent: PR_SET_PDEATHSIG of Linux's prctl


class Terminated(KeyboardInterrupt):
    """SIGTERM was received. A KeyboardInterrupt, as Ray handles no other exception of a signal in its calls."""


_RAISED: dict[type[BaseException], signal.Signals] = {Terminated: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}


class _Handler:
    """Raises the exception of a signal; `received` are the signals of which it has reached the program."""

    def __init__(self) -> None:
        self.received = set[int]()
        self._sends_again = False

    def __call__(self, number: int, _: FrameType | None) -> None:
        if self._sends_again or number == signal.SIGTERM in self.received:
            return  # a second one, as a scheduler and a parent send: the program cleans up already
        self.received.add(number)
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    def at_dropped(self, dropped: "sys.UnraisableHookArgs") -> None:
        """Send a signal again whose exception was dropped; used as sys.unraisablehook.

        Other errors are printed, unless a signal was received: finalizers of half-made objects may fail then.
        """
        if number := _RAISED.get(dropped.exc_type):
            self._sends_again = True  # until then another signal raises nothing, which would be dropped here, too
            again = threading.Timer(_AGAIN_SECONDS, self._send_again, (number,))
            again.daemon = True
            again.start()
        elif not self.received:
            sys.__unraisablehook__(dropped)

    def _send_again(self, number: int) -> None:
        main = threading.main_thread().ident
        assert main is not None
        self.received.discard(number)
        self._sends_again = False
        signal.pthread_kill(main, number)


@contextmanager
def ends_at_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process at once, with a word and no traceback of half-imported modules, until the block ends.

    It ends by the signal itself: a shell script that called it ends, too.
    """

    def end(_number: int, _frame: object) -> None:
        os.write(2, b"interrupted\n")
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    if before == signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def raised_signals(sigint: bool = True) -> Iterator[set[int]]:
    """Context: raise Terminated at SIGTERM, and with `sigint` KeyboardInterrupt at SIGINT; yield the signals received.

    Main thread only; elsewhere, and where SIGTERM is handled already, it does nothing.
    """
    handler = _Handler()
    before = signal.getsignal(signal.SIGINT)
    hook = sys.unraisablehook
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield handler.received
        return
    sys.unraisablehook = handler.at_dropped
    signal.signal(signal.SIGTERM, handler)
    try:
        if sigint:
            signal.signal(signal.SIGINT, handler)
        yield handler.received
    finally:
        if sigint:
            signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not handler.received:
            sys.unraisablehook = hook


@contextmanager
def delayed_signals() -> Iterator[None]:
    """Context: delay SIGINT and SIGTERM until the block ends, if Python handles them here.

    A mask is not enough: another thread, such as one of NumPy's, would receive the signal instead.
    """
    received = list[int]()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    own = [number for number, handler in before.items() if callable(handler)]
    if threading.current_thread() is not threading.main_thread():
        own = []
    for number in own:
        signal.signal(number, lambda caught, _: received.append(caught))
    try:
        yield
    finally:
        for number in own:
            signal.signal(number, before[number])
        for caught in received[:1]:  # also after an error, which the signal may have caused in another process
            signal.raise_signal(caught)


def _end_at_sigterm() -> None:
    """End a process at SIGTERM that was forked from one that handles it, such as of a user's multiprocessing.Pool.

    Python would call the handler between two instructions: never in a process that waits for a lock.
    """
    if isinstance(signal.getsignal(signal.SIGTERM), _Handler):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_end_at_sigterm)


def exit_with_parent() -> None:
    """Exit this worker process when its parent is killed, so that it stops writing."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def signal_at_death_of_parent(number: signal.Signals) -> None:
    """Have this process sent a signal when the process that started it ends; on Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_AT_DEATH, number)


def exit_in_time() -> None:
    """Give this worker process a few seconds at its end, whatever was left in it that Python would wait for."""
    Finalize(None, _exit_soon, exitpriority=_FIRST)


def _exit_soon() -> None:
    last = threading.Timer(_EXIT_SECONDS, os._exit, (0,))
    last.daemon = True
    last.start()


def how_ended(processes: Iterable[BaseProcess]) -> str:
    """Return how the first of them died: its exit code or the name of its signal. The others end at SIGTERM then."""
    ended = [process.exitcode for process in processes if process.exitcode is not None]
    codes = [code for code in ended if code]
    by_itself = [code for code in codes if code not in (-signal.SIGTERM, TERMINATED)]
    code = next(iter(by_itself or codes or ended), None)
    if code is None:
        return "or the process that starts them did"
    if code == TERMINATED:
        return signal.SIGTERM.name
    if -code in set(signal.Signals):
        return signal.Signals(-code).name
    return f"exit code {code}"


def discard_output() -> None:
    """Send what is still in the buffer of standard output nowhere: Python would fail to write it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def call_apart(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call `function`, of a module that can be imported, in a new process; return or raise what it does there.

    The process is killed if a signal, or another exception, interrupts the call here, and if this process is killed.
    Raises WorkerDied if it died by itself.
    """
    folders = [str(Path(__file__).resolve().parents[1]), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", _SERVE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        try:
            answer = child.communicate(pickle.dumps((os.getpid(), function, arguments)))[0]
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        how = f"exit code {child.returncode}"
        if child.returncode < 0:
            how = signal.Signals(-child.returncode).name
        raise WorkerDied(
            f"the process of {function.__name__} died ({how}): most often the machine ran out of memory. Give a "
            "smaller --sample, or more memory"
        )
    is_error, result = pickle.loads(answer)
    if is_error:
        raise result
    return result


def processor_seconds() -> float:
    """Return the processor time of this process, and of the ended processes that it started."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def serve() -> None:
    """Read a call from standard input, make it, and write what comes of it to standard output."""
    for number in (signal.SIGINT, signal.SIGTERM):  # which a terminal or a scheduler sends to all: the parent obeys
        signal.signal(number, signal.SIG_IGN)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints
    signal_at_death_of_parent(signal.SIGKILL)
    parent, function, arguments = pickle.loads(sys.stdin.buffer.read())
    if os.getppid() != parent:
        return  # it died before
    try:
        answer = False, function(**arguments)
    except Exception as error:
        answer = True, error
    with output:
        output.write(pickle.dumps(answer))


class _Collector:
    """The state of this process's garbage collector."""

    passes_over_own = False


def keep_objects() -> None:
    """Have the garbage collector pass over all that is there, for good: it is mostly modules, which stay."""
    gc.freeze()
    _Collector.passes_over_own = True  # to count what is frozen takes as long as some runs take to begin


@contextmanager
def kept_objects() -> Iterator[None]:
    """Context: as keep_objects, until its end, unless this process has kept its own: these would be searched again."""
    if _Collector.passes_over_own:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
