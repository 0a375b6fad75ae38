"""Placements: the pieces of every rank of a mesh, which of them a norm counts, and how many ranks hold the same one."""

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.sharding.axis import Axes, Axis
from training.sharding.placement import Placement


def mesh(**sizes: int) -> Iterator[Axes]:
    """The axes as every rank of a mesh sees them."""
    for ranks in product(*map(range, sizes.values())):
        yield {name: Axis(name, sizes[name], rank, None) for name, rank in zip(sizes, ranks, strict=True)}


def test_axes_split_the_pieces_of_those_before_them() -> None:
    rows_of_columns, rows_twice = Placement({"tp": 1, "shard": 0}), Placement({"tp": 0, "shard": 0})
    blocks = [rows_of_columns.piece((4, 6), axes) for axes in mesh(tp=2, shard=2)]
    assert [(b.offset, b.size) for b in blocks] == [((r, c), (2, 3)) for c in (0, 3) for r in (0, 2)]
    rows = [rows_twice.piece((7, 2), axes) for axes in mesh(tp=2, shard=3)]
    assert [(r.offset[0], r.size[0]) for r in rows] == [(0, 2), (2, 2), (4, 0), (4, 1), (5, 1), (6, 1)]


def test_axes_that_are_left_out_hold_a_piece_together() -> None:
    placement = Placement({"tp": 0, "shard": 0}, ("replicate",), ("replicate", "shard"))
    assert placement.without("shard") == Placement({"tp": 0}, ("replicate",), ("replicate",))
    assert placement.without("replicate") == Placement({"tp": 0, "shard": 0}, (), ("shard",))


def test_neighbours_along_an_axis_have_the_same_piece() -> None:
    placement = Placement({"tp": 0}, ("kv",), ("kv",), {"tp": 2}) | Placement({"shard": 0})
    assert placement.without("shard") == Placement({"tp": 0}, ("kv",), ("kv",), {"tp": 2})
    rows = [placement.piece((8, 2), axes) for axes in mesh(tp=4, shard=2)]
    assert [(r.offset[0], r.size[0]) for r in rows] == [(0, 2), (2, 2), (0, 2), (2, 2), (4, 2), (6, 2), (4, 2), (6, 2)]


@given(
    sizes=st.fixed_dictionaries(dict.fromkeys(("row", "column", "replicate", "shard"), st.integers(1, 3))),
    sharded=st.lists(
        st.sampled_from([("row", 0), ("column", 1), ("shard", 0)]), unique_by=lambda pair: pair[0], max_size=3
    ),
)
def test_every_element_is_counted_once_and_held_by_as_many_ranks(
    sizes: dict[str, int], sharded: list[tuple[str, int]]
) -> None:
    """Whatever is split over whatever, two axes with two dimensions included, and the rest replicated."""
    replicated = tuple(name for name in sizes if name not in dict(sharded))
    placement = Placement(dict(sharded), replicated)
    held: dict[tuple[int, int], list[bool]] = {}
    for axes in mesh(**sizes):
        piece = placement.piece((5, 4), axes)
        for index in product(*(range(o, o + s) for o, s in zip(piece.offset, piece.size, strict=True))):
            held.setdefault(index, []).append(placement.is_primary(axes))  # type: ignore[arg-type]
        assert placement.copies(axes) == pytest.approx(
            len([a for a in mesh(**sizes) if all(a[name] == axes[name] for name, _ in sharded)])
        )
    assert len(held) == 20
    assert all(sum(counted) == 1 and len(counted) == placement.copies(axes) for counted in held.values())


@pytest.mark.parametrize(
    ("shard", "replicated", "gradient_sum"),
    [({"tp": 0}, ("tp",), ()), ({"tp": 0}, (), ("shard",)), ({}, (), ("tp",))],
)
def test_an_axis_is_placed_once_and_before_it_is_summed_over(
    shard: dict[str, int], replicated: tuple[str, ...], gradient_sum: tuple[str, ...]
) -> None:
    with pytest.raises(AssertionError, match=r"both sharded and replicated|summed over"):
        Placement(shard, replicated, gradient_sum)


def test_a_placement_may_not_name_an_axis_twice() -> None:
    with pytest.raises(AssertionError, match="twice"):
        _ = Placement({"tp": 0}) | Placement({"tp": 1})
