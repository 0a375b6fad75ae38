"""A process that fails, dies, hangs or is stopped: who tells, what is told, and that all end."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.training.launch import Fault, launch
from training.config import TrainConfig
from training.distributed.hang_detection import Doing, accuse, lost_contact
from training.distributed.layout import ParallelConfig
from training.optim.stability import StabilityConfig

HUNG = (
    "error: the others waited in vain for rank 1",
    "    rank 1: busy: step 4, befall (launch.py:",
    "    rank 0: waited for others: step 4, all_reduce of float32 (12, 16, 32) over tp (all ranks) in _ReduceFromTP.f",
)
KILLED = (
    "error: rank 1 ended without a word: killed",
    "    rank 0: waited for others: step 4, sum over shard (all ranks)",
)
STOPPED = ("error: no answer from rank 1: stopped, or cut off", "    rank 0: waited for others: step 4, ", "Pipeline.")


@pytest.mark.parametrize(
    ("fault", "layout", "told", "codes"),
    [
        ("sleep", ParallelConfig(tp=2), HUNG, [1, 1]),
        ("SIGKILL", ParallelConfig(zero=2), KILLED, [1, -9]),
        ("SIGSTOP", ParallelConfig(pp=2), STOPPED, [1, None]),
    ],
)
def test_who_keeps_the_others_waiting_is_named_and_all_end(
    config: TrainConfig, tmp_path: Path, fault: str, layout: ParallelConfig, told: tuple[str, ...], codes: list[int]
) -> None:
    config = replace(config, parallel=layout, timeout=6.0)
    with launch(2, config, tmp_path, Fault(fault, 1, 4)) as launched:
        found = launched.codes(but=[rank for rank, code in enumerate(codes) if code is None])
        said = launched.said()
        assert found == codes, said
    assert all(words in said[0] for words in told) and said[0].startswith(told[0]), said
    assert "the same command goes on from the last checkpoint" in said[0] and "Traceback" not in "".join(said)
    assert said[1] == ""


def test_an_error_of_our_own_is_told_with_its_traceback_by_the_rank_that_met_it(
    config: TrainConfig, tmp_path: Path
) -> None:
    config = replace(config, parallel=ParallelConfig(tp=2, pp=2))
    with launch(4, config, tmp_path, Fault("raise", 2, 3)) as launched:
        assert launched.codes(seconds=50) == [1] * 4  # not after a collective's timeout
        said = launched.said()
    assert said[2].startswith("error: rank 2 failed: ValueError: an error of our own\nTraceback"), said
    assert said[2].count("Traceback") == 1 and [bool(words) for words in said] == [False, False, True, False]


def test_what_all_ranks_refuse_is_told_once(config: TrainConfig, tmp_path: Path) -> None:
    policy = StabilityConfig(policy="stop")
    config = replace(config, stability=policy, optim=replace(config.optim, lr=1e30, max_grad_norm=0.0))
    with launch(2, config, tmp_path) as launched:
        assert sorted(launched.codes(), key=str) == [1, 2]
        said = "".join(launched.said())
    assert said.startswith("error: the ") and said.count("\n") == 1 and "stability.policy is stop" in said


def test_those_who_do_the_same_share_a_line() -> None:
    here, there = Doing(True, "step 3, recv"), Doing(False, "step 2, in load")
    said = accuse({0: here, 1: there, 2: here, 3: here}, [], late=True).splitlines()
    assert said[0] == "error: the others waited in vain for rank 1" and said[1] == "    rank 1: busy: step 2, in load"
    assert said[2] == "    ranks 0, 2, 3: waited for others: step 3, recv"
    assert accuse({0: here}, [], late=True).startswith("error: the processes wait for each other")
    assert accuse({0: here}, [1, 2], late=False).startswith("error: ranks 1, 2 ended without a word")


def test_a_collective_that_fails_for_another_s_sake_is_told_from_other_errors() -> None:
    gloo = RuntimeError("[…/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically")
    wrapped = RuntimeError("[Stage 0] failed to run forward")
    wrapped.__cause__ = gloo
    late = RuntimeError("[…/unbound_buffer.cc:117] Timed out waiting 60000ms for recv operation to complete")
    store = dist.DistStoreError("wait timeout after 6000ms, keys: /attempt0/0//cpu//0/0")
    assert all(map(lost_contact, (gloo, wrapped, late, store)))
    assert not any(map(lost_contact, (RuntimeError("a shape"), ValueError("Connection closed by peer"), None)))
