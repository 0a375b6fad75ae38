"""Fixtures: a running object store, and an empty folder in it."""

from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest

from gristmill.storage import objects
from tests.object_store import BUCKET, Store, object_store
from tests.patience import patience

_NUMBERS = count()
RETRIES = 3


@pytest.fixture(scope="session")
def running_store() -> Iterator[Store]:
    with object_store() as store:
        yield store


@pytest.fixture
def store(running_store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The store without faults, in the environment of this process; requests are repeated soon."""
    for name, value in running_store.environment.items():
        monkeypatch.setenv(name, value)
    moment = timedelta(milliseconds=2)
    backoff = {"init_backoff": moment, "max_backoff": moment, "base": 2}
    monkeypatch.setitem(objects.RETRIES, "backoff", backoff)
    monkeypatch.setitem(objects.RETRIES, "max_retries", RETRIES)
    monkeypatch.setitem(objects._CLIENT, "timeout", timedelta(seconds=patience(60)))
    objects._open.cache_clear()
    running_store.requests.clear()
    yield running_store
    running_store.fault = None
    objects._open.cache_clear()


@pytest.fixture
def folder(store: Store) -> Path:
    """A folder in the bucket that no other test has."""
    return Path(f"s3://{BUCKET}/test{next(_NUMBERS)}")
