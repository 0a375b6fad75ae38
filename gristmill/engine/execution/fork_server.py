"""Imported by the fork server alone: a worker whose driver is killed while it starts the worker ends without a word."""

import sys
from contextlib import suppress
from types import TracebackType

import pyarrow


def _print_unless_driver_died(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    """An exception hook: the pipe from which a new worker reads what it is to do ends too early if its driver died."""
    if not isinstance(error, EOFError | ConnectionError):
        sys.__excepthook__(kind, error, at)


with suppress(Exception):  # of a pandas that is broken
    pyarrow.scalar(0)  # with its first value it imports pandas, where that is installed: here once, not in each worker
if "numba" in sys.modules:
    sys.modules["numba"].core.registry.cpu_target.target_context.refresh()  # half a second, before its first kernel
sys.excepthook = _print_unless_driver_died
