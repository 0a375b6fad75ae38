"""The store of a path: the one place where it is decided whether a path is local, in a bucket or on the Hub."""

from pathlib import Path

from gristmill.paths import scheme_of
from gristmill.storage.bucket_store import BucketStore
from gristmill.storage.hub_store import HubStore
from gristmill.storage.local_store import LocalStore
from gristmill.storage.remote_store import RemoteStore
from gristmill.storage.store import Store

_LOCAL = LocalStore()
_BUCKETS = BucketStore()
_REMOTE: dict[str, RemoteStore] = {"s3": _BUCKETS, "gs": _BUCKETS, "az": _BUCKETS, "hf": HubStore()}


def store_of(path: Path | str) -> Store:
    """Return the store where a path is.

    >>> store_of(Path("/data/a")).needs_copies, store_of(Path("s3://bucket/a")).needs_copies
    (False, True)
    """
    scheme = scheme_of(path)
    if not scheme:
        return _LOCAL
    return _REMOTE[scheme]


def remote_store_of(path: Path) -> RemoteStore:
    """Return the store of a path that is in one that needs copies."""
    return _REMOTE[scheme_of(path)]
