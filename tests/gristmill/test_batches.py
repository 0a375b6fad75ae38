"""Batches: every item once and in order, each batch ended as soon as its count or size is reached."""

from hypothesis import given
from hypothesis import strategies as st

from gristmill.batches import batched

Limits = st.none() | st.integers(1, 6)


@given(st.lists(st.integers(0, 5)), Limits, Limits)
def test_batches_are_the_items_cut_where_a_limit_is_reached(
    sizes: list[int], count: int | None, size: int | None
) -> None:
    batches = list(batched(sizes, count, size, size_of=int))
    assert [item for batch in batches for item in batch] == sizes

    def is_full(batch: list[int]) -> bool:
        return len(batch) == count or (size is not None and sum(batch) >= size)

    assert all(is_full(batch) for batch in batches[:-1])
    assert all(batch and not is_full(batch[:-1]) for batch in batches)


def test_a_batch_is_yielded_before_the_next_item_is_read() -> None:
    items = iter(range(5))
    assert next(batched(items, count=2)) == [0, 1]
    assert next(items) == 2
