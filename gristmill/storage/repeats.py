"""Calls of an object store that are made again after a failure that may pass, and its errors in one sentence."""

import errno
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from gristmill.errors import StorageError, UsageError
from gristmill.storage.problems import explain_problem
from gristmill.urls import object_name

RETRIES: Any = {"max_retries": 8, "retry_timeout": timedelta(seconds=90)}  # of obstore's requests
_ATTEMPTS = 4  # at a call, where obstore has not repeated the request
_HAS_REPEATED = re.compile(r"after (\d+) retries, max_retries: \1\b")  # as often as it may

_Answer = TypeVar("_Answer")


def resumed(path: Path, resume: Callable[[], Iterable[_Answer]]) -> Iterator[_Answer]:
    """All that `resume` yields; it is called again, and goes on, after a failure that may pass."""
    failures, until = 0, _last_time()
    while True:
        try:
            with problems(path):
                for item in resume():
                    failures, until = 0, _last_time()
                    yield item
            return
        except StorageError as error:
            failures += 1
            if _is_final(error, failures, until):
                raise


def repeated(path: Path, call: Callable[[], _Answer], writes: bool = False) -> _Answer:
    """What `call` returns; it is called again after a failure that may pass."""
    failures, until = 0, _last_time()
    while True:
        try:
            with problems(path, writes):
                return call()
        except StorageError as error:
            failures += 1
            if _is_final(error, failures, until):
                raise


def _last_time() -> float:
    return time.monotonic() + RETRIES["retry_timeout"].total_seconds()


def _is_final(error: StorageError, failures: int, until: float) -> bool:
    """Whether a call is not repeated: obstore has done so, or it has failed too often or for too long."""
    return failures >= _ATTEMPTS or time.monotonic() > until or bool(_HAS_REPEATED.search(str(error.__cause__)))


@contextmanager
def problems(path: Path, writes: bool = False) -> Iterator[None]:
    """Context: convert an error of the object store; conditions that do not hold are raised unchanged."""
    try:
        yield
    except FileNotFoundError as error:
        problem = explain_problem(object_name(path), str(error), writes)
        if isinstance(problem, UsageError):  # there is no such bucket
            raise problem from error
        raise FileNotFoundError(errno.ENOENT, "there is no such object", str(path)) from error
    except (AlreadyExistsError, PreconditionError):
        raise
    except BaseError as error:
        raise explain_problem(object_name(path), str(error), writes) from error
