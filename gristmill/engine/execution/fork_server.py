"""Imported by the fork server alone, before all else.

It imports without garbage collection, and a worker whose driver is killed while it starts the worker ends without a
word.
"""

import gc
import os
import sys
from contextlib import suppress
from types import TracebackType

import pyarrow


def _print_unless_driver_died(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    """An exception hook: the pipe from which a new worker reads what it is to do ends too early if its driver died."""
    if not isinstance(error, EOFError | ConnectionError):
        sys.__excepthook__(kind, error, at)


def _collect_garbage() -> None:
    """Enable garbage collection in a worker, which can skip the modules: they stay."""
    gc.freeze()
    gc.enable()


gc.disable()  # it is a quarter of the time that the imports take
os.register_at_fork(after_in_child=_collect_garbage)
with suppress(Exception):  # of a pandas that is broken
    pyarrow.scalar(0)  # with its first value it imports pandas, where that is installed: here once, not in each worker
sys.excepthook = _print_unless_driver_died
