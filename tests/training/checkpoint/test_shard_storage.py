import math
import pickle

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from training.checkpoint.shard_plans import ShardLoadPlanner, ShardSavePlanner, State
from training.checkpoint.shard_storage import assign_writers, held_shards, model_state
from training.sharding.shard_spec import ShardSpec
from training.sharding.sharded_parameter import ShardedParameter

Shape = tuple[int, ...]
shapes = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)


@st.composite
def partitions(draw: st.DrawFn, shape: Shape) -> list[ShardSpec]:
    """Random partitions of a tensor into boxes, some of them empty."""
    specs = [ShardSpec.whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        chosen = specs.pop(draw(st.integers(0, len(specs) - 1)))
        dim, parts = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))
        specs += [chosen.shard(dim, parts, number) for number in range(parts)]
    return specs


def numbered(shape: Shape) -> Tensor:
    return torch.arange(1, math.prod(shape) + 1).reshape(shape).double()


def store(held: list[State]) -> tuple[dict[MetadataIndex, Tensor], object]:
    """Save as DCP does, in one process: returns the chunks that would be written, and the index."""
    written = assign_writers([held_shards(state) for state in held])
    planners = [ShardSavePlanner() for _ in held]
    for planner, state, items in zip(planners, held, written, strict=True):
        share: State = {}
        for key, spec in sorted(items, key=repr):
            tensor = next(tensor for tensor, other in state[key] if other == spec)
            share.setdefault(key, []).append((tensor, spec))
        planner.set_up_planner(share)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    chunks: dict[MetadataIndex, Tensor] = {}
    for planner, plan in zip(planners, plans, strict=True):
        for item in planner.finish_plan(plan).items:
            assert item.index not in chunks
            chunks[item.index] = planner.resolve_data(item).clone()
    return chunks, metadata


def fetch(state: State, chunks: dict[MetadataIndex, Tensor], metadata: object) -> None:
    planner = ShardLoadPlanner()
    planner.set_up_planner(state, metadata)
    for item in planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0]).items:
        chunk = chunks[item.storage_index]
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            chunk = chunk.narrow(dim, start, length)
        target = planner.resolve_tensor(item)
        assert target.shape == chunk.shape and target.numel()
        target.copy_(chunk)
        planner.commit_tensor(item, target)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_partition_is_loaded_from_any_other(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    whole = numbered(shape)
    boxes = data.draw(partitions(shape))
    boxes += data.draw(st.lists(st.sampled_from(boxes), max_size=3))  # and copies
    held: list[State] = [{"a": []} for _ in range(data.draw(st.integers(1, 4)))]
    for number, spec in enumerate(data.draw(st.permutations(boxes))):
        held[number % len(held)]["a"].append((whole[spec.slices], spec))
    chunks, metadata = store(held)
    assert sum(chunk.numel() for chunk in chunks.values()) == whole.numel()
    # of another type, and in a memory whose order is another
    back = list(reversed(range(len(shape))))
    wanted = [(torch.zeros(spec.size[::-1]).permute(back), spec) for spec in data.draw(partitions(shape))]
    fetch({"a": wanted}, chunks, metadata)
    assert all(torch.equal(tensor, whole[spec.slices].float()) for tensor, spec in wanted)


def planned(ranks: int, names: list[str]) -> list[SavePlan]:
    """The plans of ranks that each hold a row of every named square."""
    plans = []
    for rank in range(ranks):
        spec, planner = ShardSpec.whole((ranks, ranks)).shard(0, ranks, rank), ShardSavePlanner()
        planner.set_up_planner({name: [(torch.empty(spec.size, device="meta"), spec)] for name in names})
        plans.append(planner.create_local_plan())
    return plans


def test_tensors_that_are_cut_alike_share_their_chunks_in_the_index() -> None:
    _, metadata = ShardSavePlanner().create_global_plan(planned(64, [f"w{n}" for n in range(20)]))
    chunks = [entry.chunks for entry in metadata.state_dict_metadata.values()]
    assert len(chunks) == 20 and len({id(listed) for listed in chunks}) == 1 and len(chunks[0]) == 64
    assert len(pickle.dumps(metadata)) < 64 * 200 + 20 * 300


def test_what_a_rank_sends_to_plan_is_small() -> None:
    (plan,) = planned(1, [f"blocks.{n}.mlp.up.weight" for n in range(300)])
    assert len(pickle.dumps(plan)) < 300 * 60  # torch's own items have some 300 bytes


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(1, 50), st.just(63) | st.integers(0, 63)), max_size=30))
@example(4, [(7, 0), (5, 0), (1, 0), (1, 0), (2, 0)])
def test_writers_are_balanced_over_the_ranks_that_hold_a_shard(ranks: int, sizes: list[tuple[int, int]]) -> None:
    held: list[list[tuple[str, ShardSpec]]] = [[] for _ in range(ranks)]
    for number, (size, holders) in enumerate(sizes):
        for rank in [r for r in range(ranks) if holders >> r & 1] or range(ranks):
            held[rank].append((f"k{number}", ShardSpec.whole((size,))))
    written = assign_writers(held)
    assert all(items <= set(mine) for items, mine in zip(written, held, strict=True))
    assert sorted(key for items in written for key, _ in items) == sorted(f"k{n}" for n in range(len(sizes)))
    loads = [sum(spec.numel for _, spec in items) for items in written]
    if all(mine == held[0] for mine in held):  # nothing would be better off with someone else
        for load, items in zip(loads, written, strict=True):
            assert all(load - spec.numel <= min(loads) for _, spec in items)


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ([ShardSpec((4, 2), (0, 0), (3, 2))], "6 elements, and the whole 8"),
        ([ShardSpec((4, 2), (0, 0), (2, 2)), ShardSpec((5, 2), (2, 0), (2, 2))], "here and"),
    ],
)
def test_shards_that_do_not_partition_a_tensor_are_refused(specs: list[ShardSpec], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        store([{"a": [(torch.zeros(spec.size), spec)]} for spec in specs])


def test_a_state_names_parameters_and_moments() -> None:
    own, spec = nn.Parameter(torch.ones(2, 3)), ShardSpec((4, 3), (2, 0), (2, 3))
    moments = {"w": {"exp_avg": torch.zeros(2, 3), "master": torch.zeros(2, 3).double()}}
    state = model_state([ShardedParameter("w", own, own, spec, True)], moments)
    assert held_shards(state) == [("model.w", spec), ("optim.w.exp_avg", spec), ("optim.w.master", spec)]
    ((tensor, _),) = state["model.w"]
    assert tensor.data_ptr() == own.data_ptr() and not tensor.requires_grad
    assert list(model_state([ShardedParameter("w", own, own, spec, True)])) == ["model.w"]


def test_a_tied_matrix_is_written_once_and_loaded_twice() -> None:
    spec = ShardSpec.whole((2, 3))
    tied = [nn.Parameter(numbered((2, 3)), requires_grad=False) for _ in range(2)]
    moments = {"w": {"exp_avg": numbered((2, 3))}}
    state = model_state([ShardedParameter("w", own, own, spec, True) for own in tied], moments)
    chunks, metadata = store([state])
    assert len(chunks) == 2
    for tensor in (*tied, moments["w"]["exp_avg"]):
        tensor.zero_()
    fetch(state, chunks, metadata)
    assert all(torch.equal(tensor, numbered((2, 3))) for tensor in (*tied, moments["w"]["exp_avg"]))
