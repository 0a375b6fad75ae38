"""Keep policies: what a word means, and that ranks are in the order that they promise."""

from datetime import UTC, date, datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dedup.clustering.keep_policy import LAST, BySource, Candidate, First, Longest, Newest, parse_keep, rank_newest
from gristmill.errors import UsageError


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("first", First()),
        ("longest", Longest()),
        ("source:wikipedia", BySource(("wikipedia",))),
        ("source:wiki, lang=en,a:b", BySource(("wiki", "lang=en", "a:b"))),
        ("newest:meta.timestamp", Newest("meta.timestamp")),
    ],
)
def test_policies_by_name(text: str, policy: object) -> None:
    assert parse_keep(text) == policy


@pytest.mark.parametrize(
    "text", ["", "last", "First", "first:", "longest:text", "source", "source:", "source:a,,b", "source:a,a", "newest",
             "newest:", "newest:meta.", "newest:.x"]
)  # fmt: skip
def test_other_words_are_refused_with_what_is_possible(text: str) -> None:
    with pytest.raises(UsageError, match=r"first, longest, source:.* newest:"):
        parse_keep(text)


def test_sources_in_the_given_order_and_then_all_others() -> None:
    policy = BySource(("wiki", "book"))
    wiki, book, c4, arxiv = (policy.rank(Candidate(source)) for source in ("wiki", "book", "c4", "arxiv"))
    assert wiki < book < c4 == arxiv


@given(st.text(), st.text())
def test_longer_comes_first(one: str, other: str) -> None:
    ranks = [Longest().rank(Candidate("book", text)) for text in (one, other)]
    assert (ranks[0] < ranks[1]) == (len(one) > len(other))


_NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**100), 2**100) | st.just(-0.0)
_NEAR = st.tuples(st.integers(-(2**63), 2**64), st.integers(-9, 9)).map(lambda it: (it[0], it[0] + it[1]))


@given(_NEAR | st.tuples(_NUMBERS, _NUMBERS))
def test_greater_comes_first(numbers: tuple[float, float]) -> None:
    """Large integers that float64 cannot tell apart, too: ids and nanoseconds since 1970."""
    one, other = numbers
    assert (rank_newest(one) < rank_newest(other)) == (one > other)
    assert (rank_newest(one) == rank_newest(other)) == (one == other)
    assert all(-(2**63) <= rank < LAST for rank in rank_newest(one))


@pytest.mark.parametrize(
    "form", ["2026-01-02T03:04:05.{:09}", "20260102T030405,{:09}Z", "2026-01-02 03:04:05.{:09}+01:00"]
)
@given(st.integers(0, 10**9 - 2))
def test_times_are_told_apart_by_the_nanosecond(form: str, billionths: int) -> None:
    assert rank_newest(form.format(billionths + 1)) < rank_newest(form.format(billionths))
    stamp = pa.scalar(10**18 + billionths, pa.timestamp("ns")).as_py()
    assert rank_newest(stamp) == rank_newest(str(stamp))


@given(*[st.datetimes(datetime(1700, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))] * 2)
def test_later_comes_first_however_it_is_written(one: datetime, other: datetime) -> None:
    assert (rank_newest(one.isoformat()) < rank_newest(other)) == (one > other)


def test_dates_and_times_of_many_forms() -> None:
    same = ["2023-01-01", "2023-01-01T00:00:00Z", "2023-01-01 01:00+01:00", "20230101T000000", date(2023, 1, 1),
            datetime(2023, 1, 1), 1672531200, 1672531200.0, " 2023-01-01 "]  # fmt: skip
    assert {rank_newest(value) for value in same} == {rank_newest(same[0])}


@pytest.mark.parametrize(
    "value", [None, "", "yesterday", True, [], {}, float("nan"), float("inf"), 10**400, "2023-13-01"]
)
def test_neither_number_nor_date(value: object) -> None:
    assert rank_newest(value) is None


RECORDS = [
    ({"meta": {"year": 7}}, 7),
    ({"meta": '{"year": 7}'}, 7),  # JSON within a string, as some tables have it
    ({"meta": [1]}, None),
    ({"meta": "{broken"}, None),
    ({"meta": None}, None),
    ({"year": 7}, None),
    ({}, None),
]


@pytest.mark.parametrize(("record", "value"), RECORDS)
def test_the_field_is_found_wherever_records_hold_it(record: dict, value: object) -> None:
    assert Newest("meta.year").value(record) == value


def test_a_field_at_the_top() -> None:
    assert Newest("date").value({"date": "2023-01-01"}) == "2023-01-01"
