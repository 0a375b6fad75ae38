"""What meetings in a folder do when replicas return, are stopped, do not belong together, or files are damaged."""

import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.errors import GristmillError, InputError, OutputError, UsageError
from tests.patience import patience
from tests.training.experimental.local_steps.test_local_steps import H, assert_equal, exact, shared_weights
from tests.training.experimental.local_steps.test_rendezvous import (
    closed,
    come,
    exchange,
    meetings,
    replica,
    wait_until_left,
)
from tests.training.launch import launch
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.config import TrainConfig
from training.distributed.rank_pool import RankError
from training.experimental.local_steps.rendezvous import Rendezvous, ReplicaRanks
from training.experimental.local_steps.rendezvous_folder import Start
from training.experimental.local_steps.replicas_config import ReplicasConfig
from training.experimental.parallel_config import ParallelConfig
from training.run_plan import RunPlan
from training.train import train
from training.trainer import Trainer

RunRanks = Callable[..., list[Any]]
__all__ = ["closed", "exact"]


def alone(config: TrainConfig, folder: Path, number: int = 0, deadline: float = 0.01) -> TrainConfig:
    """A replica that waits for nobody, and has no checkpoint before the end."""
    config = replica(config, folder, number, deadline=deadline)
    return replace(config, checkpoint=CheckpointConfig(every=0, async_save=False))


def train_and_die(config: TrainConfig, method: str, at: int) -> None:
    """Train until the meeting's method is called with round `at`."""

    def die(self: Rendezvous, number: int, *arguments: Any) -> Any:
        if number == at:
            raise KeyboardInterrupt
        return called(self, number, *arguments)

    called = getattr(Rendezvous, method)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Rendezvous, method, die)
        train(config)


def test_a_replica_that_returns_takes_what_it_left(exact: TrainConfig, run_ranks: RunRanks, tmp_path: Path) -> None:
    """Killed when its gradients count and before it has shared the weights, it comes with other moments: no matter."""
    undisturbed = alone(exact, tmp_path / "whole")
    run_ranks(1, train, undisturbed)
    killed = replace(alone(exact, tmp_path / "meeting"), out_dir=tmp_path / "killed")
    run_ranks(1, train_and_die, killed, "write_shared", 2)
    run_ranks(1, train, killed)
    assert_equal(shared_weights(killed.out_dir, exact), shared_weights(undisturbed.out_dir, exact), 0.0)


def test_any_replica_leaves_the_shared_weights(exact: TrainConfig, run_ranks: RunRanks, tmp_path: Path) -> None:
    """Those of the round before, where the member that had to leave them has not."""
    config = alone(exact, tmp_path / "meeting")
    run_ranks(1, train_and_die, config, "exchange", 2)
    (tmp_path / "meeting/round-00000001/shared.rank-0").unlink()
    run_ranks(1, train, replace(config, replicas=replace(config.replicas, number=1), out_dir=tmp_path / "other"))
    assert (tmp_path / "meeting/round-00000001/shared.rank-0").exists()


def test_gradients_that_were_left_are_not_written_again(tmp_path: Path) -> None:
    one, two = meetings(tmp_path, 2, 1000.0)
    assert exchange(1, (one, 1.0), (two, 2.0)) == ([[0, 1]] * 2, [1.5] * 2)
    two.close()
    returned = come(tmp_path, 1, 2, 1.0)
    assert exchange(1, (returned, 50.0)) == ([[0, 1]], [1.5])


def test_a_round_has_replicas_of_the_same_shared_weights(tmp_path: Path) -> None:
    one, two = meetings(tmp_path, 2, 0.0)
    assert one.exchange(2, [torch.ones(1)], one.fingerprint([torch.ones(3)])) == [0]
    with pytest.raises(
        UsageError, match=r"replica 1 comes to .* other shared weights than replica 0: .* empty --out_d"
    ):
        two.exchange(2, [torch.ones(1)], two.fingerprint([torch.zeros(3)]))
    assert two.exchange(2, [torch.zeros(1)], two.fingerprint([torch.ones(3)])) == [0]


@pytest.mark.parametrize(
    ("lengths", "start", "said"),
    [
        ({}, Start(shared="other"), "replica 1 begins with other weights .* same --init_from or --branch_from"),
        ({}, Start(run="another", shared="first"), "another run than the checkpoint of replica 1; .* empty --out_dir"),
        ({"optim.steps": 12}, Start(shared="first"), "optim.steps is 12, and 6 in replica-0 .* learning rates differ"),
    ],
)  # fmt: skip
def test_who_does_not_belong_is_refused(tmp_path: Path, lengths: dict[str, int], start: Start, said: str) -> None:
    come(tmp_path, 0, 2, 1.0)
    other = Rendezvous(ReplicasConfig(tmp_path, 2, 1, H, 1.0), ReplicaRanks())
    with pytest.raises(UsageError, match=said):
        other.join({"options": "the same"}, lengths, start)


def test_a_number_is_of_one_replica_at_a_time(tmp_path: Path) -> None:
    one = come(tmp_path, 0, 2, 1.0)
    with pytest.raises(
        OutputError, match=r"replica 0 of .* runs already, as process \d+ on .* give each replica another --rep"
    ):
        come(tmp_path, 0, 2, 1.0)
    one.close()
    longer = Rendezvous(one.config, ReplicaRanks())
    longer.join({"options": "the same"}, {"optim.steps": 12}, Start(shared="first"))  # nobody runs with the old length


def wait_in_vain(meeting: Rendezvous, act: Callable[[], None]) -> list[int] | None:
    """What a replica gets of round 1, to which nobody else comes, and in which `act` happens."""
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(meeting.exchange, 1, [torch.ones(1)], "first")
        wait_until_left(meeting.folder, 1, 0, lambda: not found.done())
        act()
        return found.result(timeout=patience(200))


def test_a_round_that_was_removed_is_not_decided(tmp_path: Path) -> None:
    """As the others do that are three rounds ahead of a process that was stopped."""
    one, _ = meetings(tmp_path, 2, 1000.0)
    assert wait_in_vain(one, lambda: shutil.rmtree(tmp_path / "round-00000001")) == []
    with pytest.raises(InputError, match=r"files of round 1 in .* are gone"):
        one.last_shared(1)


def test_a_signal_ends_the_wait_without_a_decision(tmp_path: Path) -> None:
    one = come(tmp_path, 0, 2, 1000.0)
    assert wait_in_vain(one, lambda: setattr(one.stop, "received", signal.SIGTERM)) is None
    assert not (tmp_path / "round-00000001/members.json").exists()


def test_a_stopped_replica_meets_again_when_it_resumes(exact: TrainConfig, tmp_path: Path) -> None:
    """Its checkpoint is of the step before the meeting, at which its gradients are by now."""
    folder = tmp_path / "meeting"
    one, other = (replica(exact, folder, number) for number in (0, 1))
    with launch(1, one, tmp_path / "log-0") as stopped:
        wait_until_left(folder, 1, 0, stopped.processes[0].is_alive)
        stopped.processes[0].terminate()
        assert stopped.codes() == [128 + signal.SIGTERM], stopped.said()
    assert (one.out_dir / f"checkpoints/step-{H:08d}/record.json").exists()
    with launch(1, one, tmp_path / "log-1") as resumed, launch(1, other, tmp_path / "log-2") as second:
        assert resumed.codes() == [0] and second.codes() == [0], resumed.said() + second.said()
    assert (folder / "round-00000001/members.json").read_text() == "[0, 1]"
    assert_equal(shared_weights(other.out_dir, exact), shared_weights(one.out_dir, exact), 0.0)


def test_a_new_run_joins_meetings_that_are_not_done(exact: TrainConfig, run_ranks: RunRanks, tmp_path: Path) -> None:
    """An empty out_dir takes the others' weights, and says so; it does not take those of a run that is done."""
    config = alone(exact, tmp_path / "meeting")
    run_ranks(1, train_and_die, config, "exchange", 2)
    other = replace(config, replicas=replace(config.replicas, number=1), out_dir=tmp_path / "other")
    note = run_ranks(1, note_of, other)[0]
    assert note.startswith(f"joins the replicas in {tmp_path / 'meeting'} at step {H}, with their weights")
    run_ranks(1, train, config)
    with pytest.raises((UsageError, RankError), match=r"are done, after round 2, .* try another --replicas.folder"):
        run_ranks(1, train, replace(other, out_dir=tmp_path / "third"))


def note_of(config: TrainConfig) -> str:
    with Trainer(RunPlan.of(config), torch.device("cpu")) as trainer:
        trainer.load()
        return trainer.plugins.notes[0]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "round-00000001/shared.rank-0").write_bytes(b"12"), "gone or damaged; remove that"),
        (lambda folder: (folder / "round-00000001.bak").mkdir(), ""),
    ],
)
def test_damaged_files_have_one_clear_error(tmp_path: Path, damage: Callable[[Path], Any], said: str) -> None:
    one = come(tmp_path, 0, 1, 1.0)
    assert exchange(1, (one, 1.0))[0] == [[0]]
    one.write_shared(1, [torch.ones(2)])
    damage(tmp_path)
    found = [torch.zeros(2)]
    with pytest.raises(GristmillError, match=said) if said else nullcontext():
        one.read_shared(one.last_shared(), found)
        exchange(2, (one, 1.0))
        assert found[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replicas": ReplicasConfig(Path("s3://bucket/meeting"), 2, 0, H)}, "in a bucket: .* try a folder that all"),
        ({"parallel": ParallelConfig(compression="int8")}, "compression int8 and replicas.folder: .* try --parallel"),
    ],
)
def test_what_does_not_go_together_is_refused(
    exact: TrainConfig, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], said: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=said):
        RunPlan.of(replace(alone(exact, Path("m")), **options))
