import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.sharding.shard_spec import Piece, assemble, part_range

CPU = torch.device("cpu")
SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@given(st.integers(0, 60), st.integers(1, 9))
def test_parts_are_consecutive_and_divided_as_torch_chunk_does(length: int, parts: int) -> None:
    ranges = [part_range(length, parts, number) for number in range(parts)]
    assert ranges[0][0] == 0 and ranges[-1][1] == length
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    chunks = [list(range(*r)) for r in ranges if r[0] < r[1]]
    assert chunks == [c.tolist() for c in torch.arange(length).chunk(parts) if len(c)]


@st.composite
def divided(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Piece]]:
    """A shape, and pieces that divide it along several dimensions in turn."""
    shape = draw(SHAPES)
    pieces = [Piece.whole(shape)]
    for _ in range(draw(st.integers(0, 2))):
        dim, parts = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))
        pieces = [piece.part(dim, parts, number) for piece in pieces for number in range(parts)]
    return shape, pieces


@given(divided())
def test_pieces_cut_draw_and_assemble_the_whole(case: tuple[tuple[int, ...], list[Piece]]) -> None:
    shape, pieces = case
    whole = torch.arange(math.prod(shape)).view(shape)
    assert sum(p.numel for p in pieces) == whole.numel()  # nothing twice
    assert torch.equal(assemble({p: whole[p.slices] for p in pieces}), whole)
    for p in pieces:
        assert whole[p.slices].shape == p.size
        assert torch.equal(p.indices(0, p.numel, CPU), whole[p.slices].flatten())
        if p.numel > 1:
            assert torch.equal(p.indices(1, p.numel - 1, CPU), whole[p.slices].flatten()[1:-1])
        left = {q: whole[q.slices] for q in pieces if q != p}
        if p.numel and left:
            with pytest.raises(AssertionError, match=f"{p.numel} elements of"):
                assemble(left)


def test_a_part_of_a_part_is_a_part_of_the_whole() -> None:
    rows = Piece.whole((10, 6)).part(0, 4, 1)
    assert (rows.offset, rows.size) == ((3, 0), (3, 6))
    inner = rows.part(1, 2, 1).part(0, 2, 1)
    assert (inner.offset, inner.size, inner.shape) == ((5, 3), (1, 3), (10, 6))
    assert Piece.whole((3,)).part(0, 4, 3).numel == 0
