"""Keep policies: the order of documents within a cluster, of which the first is kept.

Documents are ordered by tier, then by rank, then by fine rank, then by key:

    tier       INDEXED (in an index built before), ORDINARY, DROPPED (removed by another stage anyway)
    rank       int64 from the policy: first (0 for all), longest, source:a,b or newest:field; see KeepPolicy
    fine rank  of newest:field, what float64 rounds off a value; 0 otherwise
    key        the position in the clusters file, which is in key order
"""

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from numbers import Rational, Real
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from gristmill.errors import UsageError

# Tiers: a document is kept before those of a higher one.
INDEXED = 0
ORDINARY = 1
DROPPED = 2
LAST = np.iinfo(np.int64).max  # rank of a document that lacks the policy's field or is of no listed source
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_BILLIONTHS = re.compile(r"[.,]\d{6}(\d{1,9})")  # of a second, after its millionths


Rank = tuple[int, int]  # rank and fine rank


class Candidate(NamedTuple):
    """Values of a document for a policy: its source, and if it reads documents its text and a field's value."""

    source: str = ""
    text: str = ""
    value: Any = None


class KeepPolicy(ABC):
    """Says which document of a cluster is kept: that of the lowest rank, and among equals the first by key.

    A policy is a frozen dataclass of its parameters, and its name in POLICIES.
    """

    name: ClassVar[str]  # on the command line, before the colon
    example: ClassVar[str] = ""  # of what stands after the colon, if a policy has parameters
    reads_documents: ClassVar[bool] = False  # else the source alone is known

    @classmethod
    def of(cls, words: str | None) -> Self | None:
        """Return the policy, given what stands after the colon, None without one; None if this does not belong there.

        A policy without parameters need not define it.
        """
        return cls() if words is None else None

    @property
    def path(self) -> list[str]:
        """Return the names of the fields on the way to the value that it looks at, the record's own first; or none."""
        return []

    @abstractmethod
    def rank(self, candidate: Candidate) -> Rank | None:
        """Return rank and fine rank of a document (int64); None if it has no value to rank it by, and so comes last."""

    def rank_or_last(self, candidate: Candidate) -> Rank:
        """Return rank and fine rank of a document, LAST for one without a value."""
        return self.rank(candidate) or (LAST, 0)

    def value(self, record: dict[str, Any]) -> Any:
        """Return the value that it looks at in a record; None if there is none."""
        value: Any = record
        for name in self.path:
            value = _decoded(value)
            value = value.get(name) if isinstance(value, dict) else None
        return value if self.path else None


@dataclass(frozen=True)
class First(KeepPolicy):
    """Keep the first document in key order."""

    name = "first"

    def rank(self, candidate: Candidate) -> Rank:  # noqa: ARG002
        return 0, 0


@dataclass(frozen=True)
class Longest(KeepPolicy):
    """Keep the document with most characters."""

    name = "longest"
    reads_documents = True

    def rank(self, candidate: Candidate) -> Rank:
        return -len(candidate.text), 0


@dataclass(frozen=True)
class BySource(KeepPolicy):
    """Keep the document whose source is listed first; sources that are not listed come last."""

    name = "source"
    example = "wikipedia,book (in that order)"
    sources: tuple[str, ...]

    @classmethod
    def of(cls, words: str | None) -> Self | None:
        sources = tuple(source.strip() for source in (words or "").split(","))
        is_list = all(sources) and len(set(sources)) == len(sources)
        return cls(sources) if is_list else None

    def rank(self, candidate: Candidate) -> Rank:
        if candidate.source not in self.sources:
            return LAST, 0
        return self.sources.index(candidate.source), 0


@dataclass(frozen=True)
class Newest(KeepPolicy):
    """Keep the document with the greatest value of a field; documents without it come last.

    `field` is a path into the record, such as meta.timestamp. Its values are numbers, or dates and times
    in ISO 8601 (UTC unless they name a zone), which count as seconds since 1970. Integers and times are compared to
    the last digit, nanoseconds too.
    """

    name = "newest"
    example = "meta.timestamp (a field of the record)"
    reads_documents = True
    field: str

    @classmethod
    def of(cls, words: str | None) -> Self | None:
        return cls(words) if words and all(words.split(".")) else None

    @property
    def path(self) -> list[str]:
        return self.field.split(".")

    def rank(self, candidate: Candidate) -> Rank | None:
        return rank_newest(candidate.value)


POLICIES: tuple[type[KeepPolicy], ...] = (First, Longest, BySource, Newest)


def parse_keep(text: str) -> KeepPolicy:
    """Parse the option --keep. UsageError if it names no policy.

    >>> parse_keep("source:wikipedia,book")
    BySource(sources=('wikipedia', 'book'))
    """
    name, colon, words = text.partition(":")
    for policy in POLICIES:
        parsed = policy.of(words if colon else None) if policy.name == name else None
        if parsed:
            return parsed
    choices = (f"{policy.name}:{policy.example}" if policy.example else policy.name for policy in POLICIES)
    raise UsageError(f"--keep {text}: expected one of {', '.join(choices)}")


def check_sources(keep: KeepPolicy, sources: Collection[str]) -> None:
    """Raise UsageError if the policy lists a source that is not among those of the corpus."""
    if isinstance(keep, BySource) and (unknown := sorted(set(keep.sources) - set(sources))):
        raise UsageError(
            f"--keep source:{','.join(keep.sources)} names {', '.join(map(repr, unknown))}: the corpus has the sources "
            f"{', '.join(map(repr, sorted(sources)))}; name these only"
        )


def rank_newest(value: Any) -> Rank | None:
    """Return rank and fine rank (int64) by a number or a point in time, greater first; None if `value` is neither.

    The rank is that of the nearest float64, the fine rank that of what is left: together they tell integers beyond
    2^53 apart, and times since 1970 by the nanosecond.

    >>> rank_newest("2023-03-01T12:00:00Z") < rank_newest("2023-02-28") < rank_newest(7.5) < (LAST, 0)
    True
    >>> rank_newest(2**60 + 1) < rank_newest(2**60)
    True
    """
    number = _number(value)
    try:
        near = float(number) if number is not None else math.nan
    except (OverflowError, ValueError):  # of a signalling NaN
        return None
    if number is None or not math.isfinite(near):
        return None
    rest = Fraction(number) - Fraction(near) if near else Fraction()  # one below all float64 is 0
    return _descending(near), _descending(float(rest))


def _descending(number: float) -> int:
    """Return an int64 that is the less, the greater a finite number is."""
    bits = int(np.float64(number + 0.0).view(np.int64))  # + 0.0 turns -0.0 into 0.0
    ascending = bits if bits >= 0 else bits ^ LAST  # the bits of negative floats are in descending order
    return ~ascending


def _number(value: Any) -> Fraction | Decimal | float | None:
    """Return the exact value of a number, or of a point in time in seconds since 1970; None if it is neither."""
    billionths = Fraction()
    if isinstance(value, str):
        if digits := _BILLIONTHS.search(value):  # which Python's datetime leaves out
            billionths = Fraction(int(digits[1]), 10 ** (6 + len(digits[1])))
        try:
            value = datetime.fromisoformat(value.strip())
        except ValueError:
            return None
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, time())
    if isinstance(value, datetime):
        if not value.tzinfo:
            value = value.replace(tzinfo=UTC)
        return _seconds(value - _EPOCH) + billionths
    if isinstance(value, bool) or not isinstance(value, Real | Decimal):  # NumPy's are Real, too
        return None
    if isinstance(value, Rational):
        return Fraction(int(value.numerator), int(value.denominator))
    return value if isinstance(value, Decimal) else float(value)


def _seconds(since: timedelta) -> Fraction:
    seconds = since.days * 86_400 + since.seconds
    nanoseconds = since.microseconds * 1000 + getattr(since, "nanoseconds", 0)  # which pandas' have
    return seconds + Fraction(nanoseconds, 10**9)


def _decoded(value: Any) -> Any:
    """Decode strings that hold a JSON object, as some tables have them."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
