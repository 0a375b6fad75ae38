"""Benchmark: seconds to plan a save and a load of a checkpoint in many pieces.

    python benchmarks/bench_checkpoint_plan.py --pieces 64 512 --tensors 900

Every rank holds a row of every tensor. All but the plans of single ranks is the work of rank 0, here for all ranks in
one process; nothing is written.
"""

import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import torch
import tyro

from benchmarks.dedup_tables import markdown
from training.checkpoint.shard_plans import ShardLoadPlanner, ShardSavePlanner, State
from training.checkpoint.shard_storage import assign_writers, held_shards
from training.sharding.shard_spec import ShardSpec

Result = TypeVar("Result")
_SHAPES = ((4096, 4096), (11_008, 4096), (4096, 11_008), (32_000, 4096))


def bench_checkpoint_plan(pieces: tuple[int, ...] = (64, 512), tensors: int = 900) -> None:
    """Plan checkpoints of so many pieces a tensor and print the seconds of each part.

    Args:
        pieces: Ranks, each with a piece of every tensor.
        tensors: Tensors: a 7B model's parameters and moments are some 900.
    """
    heads = ["pieces", "writers, s", "a rank's plan, s", "rank 0's plan, s", "index, kB", "a rank's load, s"]
    rows = [_measure(count, tensors) for count in pieces]
    print(markdown(f"Planning a checkpoint of {tensors} tensors", heads, rows, ["The index without places in files."]))


def _measure(pieces: int, tensors: int) -> list[str]:
    states = [_state(rank, pieces, tensors) for rank in range(pieces)]
    held = [held_shards(state) for state in states]
    writers = _timed(lambda: assign_writers(held))[0]
    planners = [ShardSavePlanner() for _ in states]
    for planner, state in zip(planners, states, strict=True):
        planner.set_up_planner(state)
    local, plans = _timed(lambda: [planner.create_local_plan() for planner in planners])
    whole, (_, metadata) = _timed(lambda: planners[0].create_global_plan(plans))
    loader = ShardLoadPlanner()
    loader.set_up_planner(states[-1], metadata)
    load = _timed(loader.create_local_plan)[0]
    index = len(pickle.dumps(metadata)) / 1000
    return [str(pieces), f"{writers:.2f}", f"{local / pieces:.3f}", f"{whole:.2f}", f"{index:.0f}", f"{load:.2f}"]


def _state(rank: int, pieces: int, tensors: int) -> State:
    state: State = {}
    for number in range(tensors):
        spec = ShardSpec.whole(_SHAPES[number % len(_SHAPES)]).shard(0, pieces, rank)
        state[f"model.blocks.{number}.weight"] = [(torch.empty(spec.size, device="meta"), spec)]
    return state


def _timed(work: Callable[[], Result]) -> tuple[float, Result]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


if __name__ == "__main__":
    tyro.cli(bench_checkpoint_plan)
