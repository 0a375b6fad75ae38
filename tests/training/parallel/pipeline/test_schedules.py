"""The order of passes, beside the order in which torch's schedules take them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from training.experimental.parallel_config import ParallelConfig
from training.parallel.pipeline.schedules import SCHEDULES, Pass

RunRanks = Callable[..., list[Any]]
INTERLEAVED = ("interleaved-1f1b", "looped-bfs", "zero-bubble", "zbv", "dualpipev")


def differences(micro_batches: tuple[int, ...]) -> list[str]:
    """Layouts whose passes differ from torch's, on this rank."""
    from torch.distributed.pipelining import PipelineStage, schedules

    size, rank, found, compared = dist.get_world_size(), dist.get_rank(), [], 0
    for schedule in INTERLEAVED:
        fixed, torch_class = SCHEDULES[schedule].stages_per_rank, getattr(schedules, SCHEDULES[schedule].torch_class)
        for virtual in [fixed] if fixed else [2, 3]:
            for count in micro_batches:
                layout = ParallelConfig(1, 0, 1, 1, False, size, schedule, virtual, count)  # type: ignore[arg-type]
                here = [(n, torch.nn.Linear(2, 2)) for n in layout.stages_of_rank(rank)]
                stages = [PipelineStage(part, n, layout.stages, torch.device("cpu")) for n, part in here]
                try:
                    real = torch_class(stages, n_microbatches=count, loss_fn=lambda a, _: a)
                except ValueError:  # not a multiple of its rounds
                    continue
                compared += 1
                actions = [action for action in real.pipeline_order[rank] if action is not None]
                expected = [_pass(str(each)) for action in actions for each in action.sub_actions or [action]]
                found += [str(layout)] * (layout.passes(rank) != expected)
    assert compared > 20
    return found


def _pass(action: str) -> Pass:
    """From torch's words for it, such as 2F0."""
    stage = action.rstrip("0123456789")
    return Pass(stage[-1], int(stage[:-1]))


@pytest.mark.parametrize("size", [2, 4])
def test_passes_are_in_the_order_of_torchs_schedules(run_ranks: RunRanks, size: int) -> None:
    assert run_ranks(size, differences, (1, 2, 3, 4, 6, 8, 9)) == [[]] * size


def test_1f1b_has_as_many_micro_batches_in_flight_as_stages_follow() -> None:
    for rank in range(4):
        alive = most = 0
        for kind, _ in ParallelConfig(1, 0, 1, 1, False, 4, "1f1b", 1, 8).passes(rank):
            alive += 1 if kind == "F" else -1
            most = max(most, alive)
        assert most == 4 - rank and alive == 0
