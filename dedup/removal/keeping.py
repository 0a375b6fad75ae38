"""Keep policies: which document of a cluster stays, declared in a word, as a rank for every document.

The document that comes first is kept: by tier (see below), then by rank, then by key.
"""

import json
import math
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from typing import Any

import msgspec
import numpy as np

from gristmill.errors import UsageError

INDEXED, ORDINARY, DROPPED = 0, 1, 2  # tiers: in an index built before; any other; dropped by another stage anyway
LAST = np.iinfo(np.int64).max  # the rank of a document that a policy knows nothing about
CHOICES = "first, longest, source:wikipedia,book (in that order), newest:meta.timestamp (a field of the record)"


@dataclass(frozen=True)
class First:
    """The first in key order."""


@dataclass(frozen=True)
class Longest:
    """The one whose text has most characters."""


@dataclass(frozen=True)
class BySource:
    """The one whose source is named first; sources that are not named come last."""

    sources: tuple[str, ...]

    def rank(self, source: str) -> int:
        return self.sources.index(source) if source in self.sources else LAST


@dataclass(frozen=True)
class Newest:
    """The one whose field is greatest; those without it come last.

    `field` leads into the record, dot by dot. Its values are numbers, or dates and times in ISO 8601
    (UTC unless they say otherwise), which count as the seconds since 1970. All are compared as float64.
    """

    field: str

    def value(self, record: dict[str, Any]) -> Any:
        """What a record holds in the field, None if nothing: decoded JSON or an Arrow value."""
        found: Any = record
        for name in self.field.split("."):
            found = _decoded(found)
            found = found.get(name) if isinstance(found, dict) else None
        return _decoded(found) if isinstance(found, msgspec.Raw) else found


Keep = First | Longest | BySource | Newest


def parse_keep(text: str) -> Keep:
    """The policy that a user names. UsageError if there is none of that name.

    >>> parse_keep("source:wikipedia,book")
    BySource(sources=('wikipedia', 'book'))
    """
    name, colon, rest = text.partition(":")
    parts = tuple(part.strip() for part in rest.split(","))
    if name == "first" and not colon:
        return First()
    if name == "longest" and not colon:
        return Longest()
    if name == "source" and all(parts) and len(set(parts)) == len(parts):
        return BySource(parts)
    if name == "newest" and all(rest.split(".")):
        return Newest(rest)
    raise UsageError(f"--keep {text}: wanted one of {CHOICES}")


def rank_longest(characters: int) -> int:
    """The more characters, the earlier."""
    return -characters


def rank_newest(value: Any) -> int | None:
    """The greater a number or a point in time, the earlier; None for what is neither.

    >>> rank_newest("2023-03-01T12:00:00Z") < rank_newest("2023-02-28") < rank_newest(7.5) < LAST
    True
    """
    number = _number(value)
    if number is None or not math.isfinite(number):
        return None
    bits = int(np.float64(number + 0.0).view(np.int64))  # + 0.0: there is a negative zero
    ascending = bits if bits >= 0 else bits ^ LAST  # floats of one sign are ordered as their bits are
    return ~ascending


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.strip())
        except ValueError:
            return None
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, time())
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _decoded(value: Any) -> Any:
    """JSON that stands in a record: raw where the file is JSON; some tables hold it as a string."""
    if isinstance(value, msgspec.Raw):
        value = msgspec.json.decode(value)
    if isinstance(value, str) and value.startswith("{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
