"""Replicas that are runs of their own meet in a folder; one that is killed costs nothing but its own steps."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill.errors import UsageError
from tests.patience import patience
from tests.training.experimental.local_steps.test_local_steps import H, assert_equal, exact, shared_weights, values
from tests.training.launch import Fault, launch
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.config import TrainConfig
from training.experimental.local_steps.rendezvous import Rendezvous, ReplicaRanks
from training.experimental.local_steps.rendezvous_folder import Start
from training.experimental.local_steps.replicas_config import ReplicasConfig
from training.experimental.parallel_config import ParallelConfig
from training.run_plan import RunPlan
from training.train import train

RunRanks = Callable[..., list[Any]]
__all__ = ["closed", "exact"]


def replica(config: TrainConfig, folder: Path, number: int, steps: int = 2 * H, deadline: float = 200.0) -> TrainConfig:
    """The run of one of two replicas."""
    meeting = ReplicasConfig(folder, 2, number, H, deadline)
    optim, saves = replace(config.optim, steps=steps), CheckpointConfig(every=H, async_save=False)
    out_dir, measured = config.out_dir / f"replica-{number}", replace(config.eval, every=0)
    several = {"parallel": ParallelConfig(), "replicas": meeting, "optim": optim, "checkpoint": saves, "eval": measured}
    return replace(config, out_dir=out_dir, timeout=400.0, **several)


def wait_until_left(folder: Path, number: int, replica: int, runs: Callable[[], bool]) -> None:
    """Wait until a replica has left its gradients at a round, or no longer `runs`."""
    while runs() and not (folder / f"round-{number:08d}/replica-{replica}.done").exists():
        time.sleep(0.01)


def test_runs_that_meet_equal_replicas_of_one_launcher(exact: TrainConfig, run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(2, train, replace(exact, out_dir=tmp_path / "together"))
    expected = shared_weights(tmp_path / "together", exact)
    configs = [replica(exact, tmp_path / "meeting", number) for number in (0, 1)]
    with ExitStack() as stack:
        started = [
            stack.enter_context(launch(1, config, tmp_path / f"log-{number}")) for number, config in enumerate(configs)
        ]
        assert [each.codes() for each in started] == [[0], [0]], [each.said() for each in started]
    whole = values(tmp_path / "together", "run", "tokens_per_step")
    for config in configs:
        assert_equal(shared_weights(config.out_dir, exact), expected, 1e-12)
        assert values(config.out_dir, "run", "tokens_per_step") == [whole[0] / 2]
    losses = [values(config.out_dir, "step", "loss") for config in configs]
    assert torch.tensor(losses).mean(0).tolist() == pytest.approx(
        values(tmp_path / "together", "step", "loss"), rel=1e-6
    )


def test_a_killed_replica_loses_its_own_steps_and_comes_back(exact: TrainConfig, tmp_path: Path) -> None:
    """The other takes every step; at the end both have the same weights, bit for bit."""
    steps, folder = 20 * H, tmp_path / "meeting"
    one, other = replica(exact, folder, 0, steps, deadline=1.0), replica(exact, folder, 1, steps)
    with ExitStack() as stack:
        killed = stack.enter_context(launch(1, other, tmp_path / "log-1", Fault("SIGKILL", 0, H + 2)))
        wait_until_left(folder, 1, 1, killed.processes[0].is_alive)  # or the other would go on without it
        survivor = stack.enter_context(launch(1, one, tmp_path / "log-0"))
        assert killed.codes() == [-9]
        deadline = time.monotonic() + patience(120)
        while not (folder / "round-00000003/members.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert json.loads((folder / "round-00000003/members.json").read_text()) == [0]
        with launch(1, other, tmp_path / "log-2") as returned:
            assert survivor.codes() == [0] and returned.codes() == [0], survivor.said() + returned.said()
    assert len(values(one.out_dir, "step", "loss")) == steps
    assert_equal(shared_weights(other.out_dir, exact), shared_weights(one.out_dir, exact), 0.0)


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Closes the meetings of a test at its end."""
    made, init = list[Rendezvous](), Rendezvous.__init__

    def remembered(self: Rendezvous, *arguments: Any) -> None:
        made.append(self)
        init(self, *arguments)

    monkeypatch.setattr(Rendezvous, "__init__", remembered)
    yield
    for meeting in made:
        meeting.close()


def come(folder: Path, number: int, count: int, deadline: float, options: str = "the same") -> Rendezvous:
    meeting = Rendezvous(ReplicasConfig(folder, count, number, H, deadline), ReplicaRanks())
    meeting.join({"options": options}, {"optim.steps": 6}, Start(shared="first"))
    return meeting


def meetings(folder: Path, count: int, deadline: float) -> list[Rendezvous]:
    return [come(folder, number, count, deadline) for number in range(count)]


def exchange(number: int, *parts: tuple[Rendezvous, float]) -> tuple[list[list[int] | None], list[float]]:
    """The members that each finds at a round, and the means, of replicas that come one after the other."""
    tensors = [torch.tensor([value]) for _, value in parts]

    def meet(meeting: Rendezvous, tensor: Tensor) -> list[int] | None:
        return meeting.exchange(number, [tensor], f"after {number - 1}")

    with ThreadPoolExecutor(len(parts)) as threads:
        found = list[Future[list[int] | None]]()
        for (meeting, _), tensor in zip(parts, tensors, strict=True):
            found.append(threads.submit(meet, meeting, tensor))
            wait_until_left(meeting.folder, number, meeting.config.number, lambda: not found[-1].done())
    members = [each.result() for each in found]
    return members, [float(tensor) for tensor in tensors]


def test_who_stays_away_is_waited_for_once_and_may_return(tmp_path: Path) -> None:
    one, two, three = meetings(tmp_path, 3, 1000.0)
    assert exchange(1, (one, 1.0), (two, 2.0), (three, 6.0)) == ([[0, 1, 2]] * 3, [3.0] * 3)
    two.config = replace(two.config, deadline=0.5)
    assert exchange(2, (one, 1.0), (two, 2.0)) == ([[0, 1]] * 2, [1.5] * 2)
    two.config = replace(two.config, deadline=1000.0)  # would wait for long, but nobody is expected
    assert exchange(3, (one, 1.0), (two, 2.0))[0] == [[0, 1]] * 2
    assert exchange(3, (three, 9.0)) == ([[0, 1]], [1.5])  # too late: its steps do not count, the others' do
    three.announce(4)
    assert exchange(4, (one, 1.0), (two, 2.0), (three, 6.0)) == ([[0, 1, 2]] * 3, [3.0] * 3)


def test_shared_weights_are_left_for_who_returns(tmp_path: Path) -> None:
    one, two = meetings(tmp_path, 2, 1.0)
    assert two.last_shared() == 0
    for number in range(1, 6):
        one.write_shared(number, [torch.full((2,), float(number)), torch.ones(1)])
    found = [torch.zeros(2), torch.zeros(1)]
    assert two.last_shared() == 5
    two.read_shared(5, found)
    assert [each.tolist() for each in found] == [[5.0, 5.0], [1.0]]
    assert len([*tmp_path.glob("round-*")]) == 3


def test_a_folder_has_the_meetings_of_one_run(tmp_path: Path) -> None:
    meetings(tmp_path, 2, 1.0)
    with pytest.raises(UsageError, match=r"other options, .* another options; .* try another --replicas.folder"):
        come(tmp_path, 2, 3, 1.0, "others")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"replicas": ReplicasConfig(None, 2)},
            "replicas.count 2 without replicas.folder: .* --parallel.local_steps 50",
        ),
        (
            {"replicas": ReplicasConfig(None, local_steps=5)},
            "local_steps 5 without .*folder: .* --parallel.local_steps 5",
        ),
        ({"replicas": ReplicasConfig(None, deadline=5.0)}, "replicas.deadline 5 without replicas.folder: .* no place"),
        ({"replicas": ReplicasConfig(None, 2, 1)}, "replicas.count 2 and number 1 without replicas.folder"),
        ({"replicas": ReplicasConfig(Path("m"), 2, 2, H)}, "number is 2, and replicas.count 2; expected 0 to 1"),
        (
            {"replicas": ReplicasConfig(Path("m"), 2, 0, 4)},
            "not divisible by replicas.local_steps 4: .* --optim.steps 8",
        ),
        ({"replicas": ReplicasConfig(Path("m"), 2, 0, H, 90.0)}, "deadline 90 and timeout 60: .* --timeout 180"),
        (
            {"replicas": ReplicasConfig(Path("m"), 2, 0, H), "parallel": ParallelConfig(local_steps=H)},
            "in a folder, or",
        ),
        (
            {"replicas": ReplicasConfig(Path("m"), 5, 0, H)},
            r"not divisible by replicas.count 5 x parallel.dp 1 x .* 15",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(exact: TrainConfig, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        RunPlan.of(replace(exact, **{"parallel": ParallelConfig(), **options}))
