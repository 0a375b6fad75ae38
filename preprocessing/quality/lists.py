"""Lists of a recipe: words, and domains or addresses, of which a million take 8 MB."""

import hashlib
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import numpy as np
from numpy.typing import NDArray

from gristmill.errors import UsageError

_ENTRY = re.compile(r"[\w-]+(?:\.[\w-]+)*(?::\d+)?(?:/\S*)?\Z")  # a domain, and what may follow it
_SCHEME = re.compile(r"\A(?:https?:)?//")
_COMMENT = re.compile(r"(?:\A|\s)#.*")
_EXAMPLE = "a domain or an address per line, such as example.com or example.com/shop"


def read_list(path: Path) -> frozenset[str]:
    """Return the entries of a list, in lower case. Raises UsageError."""
    try:
        return _read(path, path.stat().st_mtime_ns)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: expected a list, a UTF-8 file with one entry per line, got {error}") from error


@lru_cache(maxsize=4)
def _read(path: Path, _: int) -> frozenset[str]:
    entries = set[str]()
    for line in path.read_text(encoding="utf-8-sig").splitlines():
        entry = line.partition("#")[0].strip().lower()
        if entry:
            entries.add(entry)
    return frozenset(entries)


class UrlEntries:
    """Domains, and addresses by their beginnings, kept as sorted 64-bit hashes.

    >>> entries = UrlEntries.of(["example.com", "http://www.example.org/shop"])
    >>> entries.find("https://news.example.com/a?b"), entries.find("http://www.example.org/shop/9?id=1")
    ('example.com', 'www.example.org/shop')
    >>> entries.find("https://www.example.org/shopping"), entries.find("no address")
    ('', '')
    """

    def __init__(self, hashes: NDArray[np.uint64]) -> None:
        self._hashes = hashes

    @classmethod
    def of(cls, entries: Iterator[str] | list[str]) -> "UrlEntries":
        """Build it from entries."""
        hashes = np.fromiter((_hash(_normal(entry)) for entry in entries), np.uint64)
        return cls(np.unique(hashes))

    def find(self, url: str) -> str:
        """Return the entry that an address is of: its domain, one above it, or its beginning; empty if none is."""
        candidates = list(_parts_of(url))
        if not candidates or not len(self._hashes):
            return ""
        hashes = np.array([_hash(candidate) for candidate in candidates], np.uint64)
        places = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        is_listed = self._hashes[places] == hashes
        if not is_listed.any():
            return ""
        return candidates[int(np.argmax(is_listed))]


def read_urls(path: Path) -> UrlEntries:
    """Return the entries of a list of domains and addresses. Raises UsageError for a file that is none."""
    try:
        return _read_urls(path, path.stat().st_mtime_ns)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: expected {_EXAMPLE}, in UTF-8, got {error}") from error


@lru_cache(maxsize=4)
def _read_urls(path: Path, _: int) -> UrlEntries:
    return UrlEntries.of(_entries(path))


def _entries(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            entry = _COMMENT.sub("", line).strip()
            if not entry:
                continue
            if not _ENTRY.match(_SCHEME.sub("", entry.lower())):
                raise UsageError(f"{path} line {number}: expected {_EXAMPLE}, got {entry[:80]!r}")
            yield entry


def host_of(url: str) -> str:
    """Return the host of an address, empty if it is none."""
    try:
        return _split(url).hostname or ""
    except ValueError:
        return ""


def _split(url: str) -> SplitResult:
    """Return the parts of an address, which may begin with its host."""
    if "//" not in url:
        url = f"//{url}"
    return urlsplit(url)


def _normal(entry: str) -> str:
    """Return an entry without its scheme, port and final slash; the host is in lower case."""
    if "//" in entry:
        entry = _SCHEME.sub("", entry, count=1)
    host, slash, path = entry.partition("/")
    return f"{host.partition(':')[0].lower()}{slash}{path}".rstrip("/")


def _parts_of(url: str) -> Iterator[str]:
    """Yield what an address may be listed as: host, the domains above it, and the host with the path's beginnings."""
    host = host_of(url)
    if not host:
        return
    labels = host.split(".")
    for at in range(len(labels)):
        yield ".".join(labels[at:])
    beginning = host
    for segment in _split(url).path.strip("/").split("/"):
        if segment:
            beginning = f"{beginning}/{segment}"
            yield beginning


def _hash(entry: str) -> int:
    digest = hashlib.blake2b(entry.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
