"""A rank that fails, dies, hangs or is stopped: one rank prints the report, and all processes end."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.patience import patience
from tests.training.launch import Fault, launch
from training.config import TrainConfig
from training.distributed.hang_detection import Activity, diagnose, is_peer_failure
from training.experimental.parallel_config import ParallelConfig
from training.optim.stability import StabilityConfig

HUNG = (
    "error: rank 1 hung; the other ranks timed out waiting for it",
    "    rank 1: running: step 4, befall (launch.py:",
    "    rank 0: waiting: step 4, all_reduce of float32 (12, 16, 32) over tp (all ranks) in _all_reduce (",
)
KILLED = (
    "error: rank 1 died without an error message: killed",
    "    rank 0: waiting: step 4, asynchronous communication over shard (all ranks)",
)
STOPPED = ("error: rank 1 did not respond: stopped, or disconnected", "    rank 0: waiting: step 4, ", "Pipeline.")


@pytest.mark.parametrize(
    ("fault", "layout", "report", "codes"),
    [
        ("sleep", ParallelConfig(tp=2), HUNG, [1, 1]),
        ("SIGKILL", ParallelConfig(zero=2), KILLED, [1, -9]),
        ("SIGSTOP", ParallelConfig(pp=2), STOPPED, [1, None]),
    ],
)
def test_the_rank_at_fault_is_named_and_all_end(
    config: TrainConfig, tmp_path: Path, fault: str, layout: ParallelConfig, report: tuple[str, ...], codes: list[int]
) -> None:
    config = replace(config, parallel=layout, timeout=patience(3))
    with launch(2, config, tmp_path, Fault(fault, 1, 4)) as launched:
        found = launched.codes(but=[rank for rank, code in enumerate(codes) if code is None])
        said = launched.said()
        assert found == codes, said
    assert all(words in said[0] for words in report) and said[0].startswith(report[0]), said
    assert "run the same command to resume from the last checkpoint" in said[0] and "Traceback" not in "".join(said)
    assert said[1] == ""


def test_a_stall_that_no_collective_reports_names_the_rank_at_fault(config: TrainConfig, tmp_path: Path) -> None:
    long = patience(200)  # as under NCCL: the collective only waits
    config = replace(config, parallel=ParallelConfig(tp=2), timeout=long)
    with launch(2, config, tmp_path, Fault("sleep", 1, 4), stalling=True) as launched:
        assert launched.codes(seconds=50) == [1, 1]
        said = launched.said()
    assert all(words in said[0] for words in HUNG[:2]) and said[0].startswith(HUNG[0]), said
    assert "rank 0: waiting: step 4, all_reduce of" in said[0] and "its GPU at work" in said[0], said
    assert "first noticed by rank 0: GPU timed out after 1 s" in said[0] and said[1] == ""


def test_an_exception_is_reported_with_its_traceback_by_the_rank_that_raised_it(
    config: TrainConfig, tmp_path: Path
) -> None:
    config = replace(config, parallel=ParallelConfig(tp=2, pp=2), timeout=patience(200))
    with launch(4, config, tmp_path, Fault("raise", 2, 3)) as launched:
        assert launched.codes(seconds=50) == [1] * 4  # not after a collective's timeout
        said = launched.said()
    assert said[2].startswith("error: rank 2 failed: ValueError: an error of our own\nTraceback"), said
    assert said[2].count("Traceback") == 1 and [bool(words) for words in said] == [False, False, True, False]


def test_an_error_of_all_ranks_is_reported_once(config: TrainConfig, tmp_path: Path) -> None:
    policy = StabilityConfig(policy="stop")
    config = replace(config, stability=policy, optim=replace(config.optim, lr=1e30, max_grad_norm=0.0))
    with launch(2, config, tmp_path) as launched:
        assert sorted(launched.codes(), key=str) == [1, 2]
        said = "".join(launched.said())
    assert said.startswith("error: the ") and said.count("\n") == 1 and "stability.policy is stop" in said


def test_ranks_of_the_same_activity_share_a_line() -> None:
    here, there = Activity(True, "step 3, recv"), Activity(False, "step 2, in load")
    report = diagnose({0: here, 1: there, 2: here, 3: here}, [], timed_out=True).splitlines()
    assert report[0] == "error: rank 1 hung; the other ranks timed out waiting for it"
    assert report[1:] == ["    rank 1: running: step 2, in load", "    ranks 0, 2, 3: waiting: step 3, recv"]
    assert diagnose({0: here}, [], timed_out=True).startswith("error: deadlock: all ranks are waiting for each other")
    assert diagnose({0: here}, [1, 2], timed_out=False).startswith("error: ranks 1, 2 died without an error message")
    hosts = {0: "node0", 1: "node1", 2: "node1"}
    report = diagnose({0: here}, [1, 2], False, hosts).splitlines()
    assert report[0].startswith("error: ranks 1, 2 (on node1) died") and report[1].startswith("    rank 0 (on node0): ")


def test_failures_of_peers_are_distinguished_from_other_errors() -> None:
    gloo = RuntimeError("[…/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically")
    wrapped = RuntimeError("[Stage 0] failed to run forward")
    wrapped.__cause__ = gloo
    late = RuntimeError("[…/unbound_buffer.cc:117] Timed out waiting 60000ms for recv operation to complete")
    store = dist.DistStoreError("wait timeout after 6000ms, keys: /attempt0/0//cpu//0/0")
    assert all(map(is_peer_failure, (gloo, wrapped, late, store)))
    assert not any(map(is_peer_failure, (RuntimeError("a shape"), ValueError("Connection closed by peer"), None)))
