import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.checkpoint.shard_plans import Box, any_overlap, box_array, intersect, numel, sweep_pairs
from training.sharding.shard_spec import ShardSpec


@st.composite
def boxes_of_dims(draw: st.DrawFn) -> tuple[int, list[Box]]:
    dims = draw(st.integers(0, 3))
    sides = st.tuples(*[st.integers(0, 6)] * dims)
    return dims, draw(st.lists(st.tuples(sides, sides), max_size=8))


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + n) for o, n in zip(*box, strict=True))))


@settings(deadline=None)
@given(boxes_of_dims())
def test_overlaps_are_those_of_sets_of_elements(drawn: tuple[int, list[Box]]) -> None:
    dims, boxes = drawn
    array, sets = box_array(boxes, dims), [elements(box) for box in boxes]
    assert numel(array).tolist() == [len(held) for held in sets]
    assert any_overlap(array) == any(one & other for one, other in itertools.combinations(sets, 2))
    for box, held in zip(boxes[:3], sets, strict=False):
        shared = [elements((tuple(start), tuple(size))) for start, size in intersect(box, array).tolist()]
        assert shared == [held & other for other in sets]


def cut(parts: tuple[int, ...]) -> list[Box]:
    specs = [ShardSpec.whole(tuple(10 * n for n in parts))]
    for dim, count in enumerate(parts):
        specs = [spec.shard(dim, count, number) for spec in specs for number in range(count)]
    return [(spec.offset, spec.size) for spec in specs]


@pytest.mark.parametrize("parts", [(512, 1), (1, 512), (2, 256), (16, 32), (8, 8, 8)])
def test_a_sweep_compares_far_fewer_pairs_than_there_are(parts: tuple[int, ...]) -> None:
    boxes = np.random.default_rng(0).permutation(box_array(cut(parts), len(parts)))
    compared, count = len(sweep_pairs(boxes)), math.prod(parts)
    assert compared == count * (count // max(parts) - 1) // 2  # of all 512 pairs only those of one slab
    assert not any_overlap(boxes) and any_overlap(np.concatenate([boxes, boxes[:1]]))
