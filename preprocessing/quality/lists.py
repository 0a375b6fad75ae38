"""Lists of words and of domains that rules of a recipe name: a file, an entry a line, # for a comment."""

from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from gristmill.errors import UsageError


def read_list(path: Path) -> frozenset[str]:
    """The entries of a list, in lower case. Raises UsageError."""
    try:
        return _read(path, path.stat().st_mtime_ns)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: expected a list, a UTF-8 file with an entry a line, got {error}") from error


@lru_cache(maxsize=4)
def _read(path: Path, _: int) -> frozenset[str]:
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    return frozenset(entry for line in lines if (entry := line.partition("#")[0].strip().lower()))


def listed_domain(url: str, domains: frozenset[str]) -> str:
    """The domain of an address, or one above it, that is in a list; empty if none is.

    >>> listed_domain("https://www.shop.example.com/a?b", frozenset(["example.com"]))
    'example.com'
    """
    try:
        host = urlsplit(url if "//" in url else f"//{url}").hostname or ""
    except ValueError:  # no address
        return ""
    parts = host.split(".")
    return next((found for at in range(len(parts)) if (found := ".".join(parts[at:])) in domains), "")
