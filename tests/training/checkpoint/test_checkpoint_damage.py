"""Checkpoints survive damaged files, full disks and killed processes."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gristmill.errors import InputError, OutputError
from tests.training.small_state import (
    Ranks,
    flip_a_bit,
    is_seed,
    load,
    load_latest,
    open_world,
    record,
    save,
    weights_and_moments,
)
from training.checkpoint.checkpoint import CheckpointManager
from training.checkpoint.remote_run import RemoteRun
from training.checkpoint.shard_storage import model_state
from training.distributed.rank_pool import RankError
from training.sharding.shard_spec import ShardSpec
from training.sharding.sharded_parameter import ShardedParameter


def truncate(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])


def make_old(checkpoint: Path) -> None:
    change(checkpoint, version=1)


def change(checkpoint: Path, **fields: Any) -> None:
    """Change fields of record.json, those of its model by model=; `...` removes one."""
    file = checkpoint / "record.json"
    record = json.loads(file.read_bytes())
    for name, value in fields.items():
        merged = {**record[name], **value} if isinstance(value, dict) else value
        record[name] = {k: v for k, v in merged.items() if v is not ...} if isinstance(merged, dict) else merged
    file.write_text(json.dumps({key: value for key, value in record.items() if value is not ...}))


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        truncate,
        make_old,
        lambda checkpoint: next(checkpoint.glob("*.distcp")).unlink(),
        lambda checkpoint: (checkpoint / ".metadata").write_bytes(b""),
        lambda checkpoint: (checkpoint / "record.json").write_text('{"step": 3'),
        lambda checkpoint: (checkpoint / "record.json").unlink(),
    ],
    ids=["bit", "truncated", "version", "no file", "empty metadata", "half a record", "no record"],
)
def test_a_damaged_checkpoint_is_skipped_with_a_message(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    save(tmp_path, "rows", [2, 3])
    damage(tmp_path / "step-00000003")
    found, held, said = load(tmp_path, "columns")
    assert found is not None and found.step == 2 and is_seed([held], 2)
    assert len(said) == 1 and "step-00000003 cannot be used" in said[0]


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"version": "2"}, "has version '2'"),
        ({"tokenizer": {"sha256": ...}}, "is damaged"),
        ({"model": {"rope_base": 10001.0}}, "is damaged"),
    ],
    ids=str,
)
def test_a_changed_record_is_refused(tmp_path: Path, fields: dict[str, Any], fault: str) -> None:
    save(tmp_path, "rows", [2, 3])
    change(tmp_path / "step-00000003", **fields)
    found, _, said = load(tmp_path, "columns")
    assert found is not None and found.step == 2 and len(said) == 1 and "\n" not in said[0]
    assert said[0].startswith("checkpoint step-00000003 cannot be used (record.json ") and fault in said[0]


@pytest.mark.parametrize("name", [b"", b"\xff\xfe", b"step-\0", b"step-00000009"])
def test_a_damaged_latest_names_the_last_checkpoint(tmp_path: Path, name: bytes) -> None:
    save(tmp_path, "rows", [2, 3])
    (tmp_path / "latest").write_bytes(name)
    found, held, _ = load(tmp_path, "rows")
    assert found is not None and found.step == 3 and is_seed([held], 3)


def test_all_ranks_skip_a_checkpoint_that_one_found_damaged(tmp_path: Path, run_ranks: Ranks) -> None:
    run_ranks(3, save, tmp_path, "rows", [2, 3])
    (tmp_path / "step-00000003/__1_0.distcp").write_bytes(b"something else")
    results = run_ranks(3, load, tmp_path, "rows")
    assert [found.step for found, _, _ in results] == [2, 2, 2] and is_seed([held for _, held, _ in results], 2)


def resume_and_save(folder: Path, step: int) -> int:
    """Load, then save `step`, as a resumed run does; returns the step it resumed from."""
    with open_world() as world:
        checkpoints = CheckpointManager(folder, 2, world, [].append)
        state = model_state(*weights_and_moments("rows", 1, 0, seed=step))
        found = load_latest(checkpoints, state)
        checkpoints.save(record(step), state)
        return found.step if found else 0


def test_checkpoints_later_than_the_loaded_one_are_removed_by_the_next_save(tmp_path: Path) -> None:
    save(tmp_path, "rows", [2, 3])
    flip_a_bit(tmp_path / "step-00000003")
    assert resume_and_save(tmp_path, 4) == 2  # and not 3 and 4, of which one is damaged
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002", "step-00000004"]
    (tmp_path / "latest").write_text("step-00000002")
    assert resume_and_save(tmp_path, 4) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002", "step-00000004"]
    assert resume_and_save(tmp_path, 5) == 4
    (tmp_path / "latest").unlink()
    assert resume_and_save(tmp_path, 6) == 5


def test_a_step_that_is_saved_again_in_place_of_a_damaged_one_is_kept(tmp_path: Path) -> None:
    save(tmp_path, "rows", [2, 3])
    flip_a_bit(tmp_path / "step-00000003")
    with open_world() as world:
        checkpoints = CheckpointManager(tmp_path, 2, world, print)
        state = model_state(*weights_and_moments("rows", 1, 0, seed=9))
        load_latest(checkpoints, state)
        for step in (3, 4):
            checkpoints.save(record(step), state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000003", "step-00000004"]


def test_an_unfinished_checkpoint_is_never_read(tmp_path: Path) -> None:
    save(tmp_path, "rows", [2])
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000003.partial")
    found, _, said = load(tmp_path, "rows")
    assert found is not None and found.step == 2
    assert said == ["checkpoint step-00000003 was never finished: ignoring it"]
    save(tmp_path, "rows", [5])
    assert not list(tmp_path.rglob("*.partial"))


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(tmp_path: Path) -> None:
    assert load(tmp_path, "rows")[0] is None
    save(tmp_path, "rows", [2])
    flip_a_bit(tmp_path / "step-00000002")
    with pytest.raises(
        InputError, match=r"step-00000002 cannot be used \(__0_0.distcp is missing or damaged\), and there"
    ):
        load(tmp_path, "rows")


def run_out_of_room(folder: Path, asynchronous: bool) -> tuple[str, str]:
    """Save three checkpoints, the second on a full disk; returns the errors of the second and third."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    said = ["", ""]
    with open_world() as world:
        checkpoints = CheckpointManager(folder, 2, world, print)
        for step, room in ((1, resource.RLIM_INFINITY), (2, 2000), (3, resource.RLIM_INFINITY)):
            resource.setrlimit(resource.RLIMIT_FSIZE, (room if world.rank == world.size - 1 else -1, -1))
            state = model_state(*weights_and_moments("copies", world.size, world.rank, step))
            state = {f"{key}.{i}": held for key, held in state.items() for i in range(4)}  # 2000 bytes, and more
            try:
                if asynchronous:
                    checkpoints.save_async(record(step), state)
                    checkpoints.wait()
                else:
                    checkpoints.save(record(step), state)
            except OutputError as error:
                said[step - 2] = str(error)
                assert not (world.is_main and [*folder.glob("*.partial")]), "room was not given back"
    return said[0], said[1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_keeps_the_previous_checkpoint(
    tmp_path: Path, run_ranks: Ranks, asynchronous: bool
) -> None:
    for first, then in run_ranks(2, run_out_of_room, tmp_path, asynchronous):
        assert "cannot write the checkpoint" in first and "MiB are free there" in first and "\n" not in first
        assert "(File too large; " in first
        assert then == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000003"]


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path, run_ranks: Ranks) -> None:
    (tmp_path / "file").write_text("")
    assert all("cannot write" in said for said in run_ranks(2, save_into_a_file, tmp_path / "file/checkpoints"))


def save_from_two_machines(folder: Path) -> str:
    """Save a run that is in a bucket; the second machine has a file where the folder of its checkpoints would be."""
    with open_world() as world:
        checkpoints = folder / f"machine-{world.rank}" / "checkpoints"
        if world.rank == 1:
            checkpoints.parent.mkdir()
            checkpoints.write_text("a file")
        remote = RemoteRun.of(Path("s3://bucket/run"), checkpoints.parent)
        manager = CheckpointManager(checkpoints, 1, world, lambda _: None, remote=remote)
        weights, moments = weights_and_moments("rows", 2, world.rank, 1)
        try:
            manager.save(record(1), model_state(weights, moments))
        except OutputError as error:
            return str(error)
    return ""


def test_a_working_copy_that_cannot_be_created_is_an_error_of_all_ranks(tmp_path: Path, run_ranks: Ranks) -> None:
    said = run_ranks(2, save_from_two_machines, tmp_path)
    assert said[0] == said[1] and "machine-1/checkpoints" in said[0]


def save_into_a_file(folder: Path) -> str:
    try:
        save(folder, "rows", [1])
    except OutputError as error:
        return str(error)
    return ""


def save_until_killed(folder: Path, moment: str) -> None:
    """Save large checkpoints; every rank kills itself as soon as a path appears."""

    def watch() -> None:
        while not (folder / moment).exists():
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGKILL)

    with open_world() as world:
        checkpoints = CheckpointManager(folder, 2, world, print)
        threading.Thread(target=watch, daemon=True).start()
        for step in range(1, 100):
            own = nn.Parameter(torch.full((4_000_000,), float(step)))
            spec = ShardSpec.whole((4_000_000 * world.size,)).shard(0, world.size, world.rank)
            checkpoints.save_async(record(step), model_state([ShardedParameter("w", own, own, spec, True)]))
        checkpoints.wait()


@pytest.mark.parametrize("moment", ["step-00000003.partial", "step-00000003.partial/__1_0.distcp", "step-00000004"])
def test_a_kill_while_saving_leaves_a_checkpoint_to_resume_from(tmp_path: Path, run_ranks: Ranks, moment: str) -> None:
    with pytest.raises(RankError, match="-9"):
        run_ranks(2, save_until_killed, tmp_path, moment)
    latest = (tmp_path / "latest").read_text()
    with open_world() as world:
        state = {"model.w": [(torch.zeros(8_000_000), ShardSpec.whole((8_000_000,)))]}
        found = load_latest(CheckpointManager(tmp_path, 2, world, print), state)
    assert found is not None and f"step-{found.step:08d}" == latest and found.step in (2, 3, 4)
    assert bool((state["model.w"][0][0] == found.step).all())
