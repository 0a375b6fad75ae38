"""Where tasks run: in this process or in a pool of them. Tasks do not know which."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from gristmill.errors import GristmillError


@dataclass(frozen=True)
class Call:
    """A module-level function and its arguments: what can be sent to another process."""

    function: Callable[..., Any]
    arguments: dict[str, Any]

    def __call__(self) -> Any:
        return self.function(**self.arguments)


def execute(calls: Sequence[Call], workers: int) -> Iterator[tuple[int, Any]]:
    """Run every call; yield (position, result) as each ends, in no particular order.

    The first error stops the rest and is raised as it is. Results must not depend on `workers`.
    """
    if workers <= 1 or len(calls) <= 1:
        yield from ((position, call()) for position, call in enumerate(calls))
    else:
        yield from _execute_in_pool(calls, min(workers, len(calls)))


def _execute_in_pool(calls: Sequence[Call], workers: int) -> Iterator[tuple[int, Any]]:
    # A fork server starts clean (no threads of ours to inherit) and warm (imports are done once).
    with _uninterrupted():
        start_fork_server(sorted({call.function.__module__ for call in calls}))
    context, others = multiprocessing.get_context("forkserver"), set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=exit_with_parent)
    try:
        with _uninterrupted():  # a worker that is half started when we leave fails with a traceback of its own
            futures = {pool.submit(call): position for position, call in enumerate(calls)}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        # A worker that started just as another died is missed by the pool, which would wait for it for ever.
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
        raise GristmillError(
            "a worker process died: most often the machine ran out of memory. Try fewer --workers or a smaller "
            "--memory. (Called from a script of yours? Then call it under `if __name__ == '__main__':`.)"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let an interrupt wait until the block ends.

    Masking the signal would not do: another thread, of NumPy's say, would take it, and Python raise it here.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield  # an interrupt is raised in the main thread alone
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        signal.raise_signal(signal.SIGINT)


def start_fork_server(modules: list[str]) -> None:
    """Have it import `modules` from where this file stands.

    It knows nothing of our sys.path, and would take another copy of ours that is installed, or that
    the working folder holds.
    """
    forkserver.set_forkserver_preload(modules)
    places = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    wanted = {"PYTHONPATH": os.pathsep.join(places), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.pop(name, None) for name in wanted}
    os.environ.update(wanted)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            del os.environ[name]
            os.environ.update({name: value} if value is not None else {})


def exit_with_parent() -> None:
    """End this worker when the process that started it is killed, so that none writes on unseen."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
