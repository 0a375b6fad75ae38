"""The task queue: tasks are taken once, those of the dead are taken over once, and no partial file is believed."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace as posted

from gristmill.counts import Counts
from gristmill.engine.execution import task_queue
from gristmill.engine.execution.call import Call
from gristmill.engine.execution.local import LocalExecutor
from gristmill.engine.execution.shards import code_versions, shard_executor
from gristmill.engine.execution.staging import Scratch
from gristmill.engine.execution.task_queue import Failure, Heartbeat, OpenTasks, StepManifest, TaskQueue
from gristmill.engine.execution.task_run import TaskRun
from gristmill.engine.options import RunOptions, TaskShard
from gristmill.engine.staleness.records import DoneRecord
from gristmill.engine.task import LIBRARIES, Task
from gristmill.errors import DamagedFile, FinishedElsewhere, GristmillError, OutputError, UsageError
from gristmill.storage.lock import lease_seconds
from tests.patience import wait_until

STEP = StepManifest("session", step=1, tasks=4, name="upper: upper", versions=code_versions())
CALLS = [Call(print, {"task": number}) for number in range(STEP.tasks)]


@pytest.fixture
def queues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TaskQueue, TaskQueue]:
    """The queue as two processes see it; one that shows no sign of life for 0.4 seconds is dead."""
    monkeypatch.setenv("GRISTMILL_LEASE_SECONDS", "0.4")
    one, other = TaskQueue(tmp_path / "queue"), TaskQueue(tmp_path / "queue")
    one.post(STEP, CALLS)
    return one, other


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the queue sees, which pass as a test says."""
    now = [0.0]
    monkeypatch.setattr(task_queue, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: now[0]}))
    return now


def record(name: str) -> DoneRecord:
    return DoneRecord("upper", name, {}, [], Counts({}, []), {"length": 3})


def shares(queues: tuple[TaskQueue, TaskQueue]) -> list[OpenTasks]:
    return [OpenTasks(queue, STEP, TaskShard(index, 2), 0.0) for index, queue in enumerate(queues)]


def test_each_task_is_taken_by_one_process_its_own_first(queues: tuple[TaskQueue, TaskQueue]) -> None:
    one, other = shares(queues)
    taken = [share.next() for _ in range(2) for share in (one, other)]
    assert taken == [0, 1, 2, 3]
    assert one.next() is None and other.next() is None
    assert [call.arguments for call in queues[1].load(STEP)] == [call.arguments for call in CALLS]


def test_what_is_done_is_seen_once_with_its_record(queues: tuple[TaskQueue, TaskQueue]) -> None:
    (one, other), (queue, second) = shares(queues), queues
    for position in (other.next(), other.next()):
        assert position is not None
        second.finish(STEP, position, record(str(position)))
        assert other.end(position)
    done, failed = one.look()
    assert (done, failed) == ([1, 3], []) and dict(queue.results(STEP, done))[3].value == {"length": 3}
    assert one.look() == ([], []) and not one.is_over
    assert [one.next(), one.next(), one.next()] == [0, 2, None]
    assert [one.end(0), one.end(2), one.end(2)] == [True, True, False] and one.is_over


def test_tasks_of_the_dead_are_taken_over_by_one_process(
    queues: tuple[TaskQueue, TaskQueue], clock: list[float]
) -> None:
    (one, other), (queue, second) = shares(queues), queues
    third = TaskQueue(queue.folder)
    living = Heartbeat(queue.processes.folder, third.name)
    with living:
        assert third.take(STEP, 0, 0) and queue.take(STEP, 1, 0)
        assert not second.take(STEP, 1, 0)
        (queue.folder / "session-1" / "2.0.taken").touch()  # killed before it wrote its name
        assert other.next() == 3
        second.finish(STEP, 3, record("3"))
        other.end(3)
        for share in (one, other):
            share.look()
            assert share.next() is None  # nobody has been watched for long enough
        for _ in range(4):  # more than the lease's seconds, which pass only once there was a sign of life
            before = living.path.read_bytes()
            wait_until(lambda seen=before: living.path.read_bytes() != seen)  # type: ignore[misc]
            clock[0] += lease_seconds() / 3
            assert all(share.queue.processes.is_alive(third.name) for share in (one, other))
        for share in (one, other):
            share.look()
        assert [other.next(), one.next(), other.next(), one.next()] == [1, 2, None, None]
    clock[0] += lease_seconds() / 3
    one.look()
    assert one.next() == 0  # its process has ended


def test_a_look_takes_no_partial_file_for_a_task(queues: tuple[TaskQueue, TaskQueue]) -> None:
    folder = queues[0].folder
    (folder / "session-1" / "0.done.12345678.partial").write_bytes(b"{")
    assert queues[0].list_states(STEP) == ({}, set(), set())
    (folder / "step.json").write_bytes(b'{"session": "ha')
    assert queues[1].read() is None
    (folder / "step.json.12345678.partial").write_bytes(b"{")
    queues[1].clear()
    assert [path.name for path in folder.iterdir()] == ["step.json"]


def test_a_process_that_lost_its_charge_posts_nothing(queues: tuple[TaskQueue, TaskQueue]) -> None:
    queue, second = queues
    second.post(StepManifest("another"))
    with pytest.raises(OutputError, match="another process has taken over the work"):
        queue.post(STEP, before=STEP)
    assert second.read() == StepManifest("another")
    second.clear()
    with pytest.raises(OutputError, match="taken over"):
        list(queue.results(STEP, [0]))
    with pytest.raises(FileNotFoundError):
        queue.take(STEP, 0, 0)


def test_an_error_keeps_its_class() -> None:
    error = Failure.of(DamagedFile(Path("a.jsonl"), "cut off", "ends too early")).error()
    assert isinstance(error, DamagedFile) and str(error) == "a.jsonl: ends too early"
    unknown = Failure("NewError", "something", b"not a pickle").error()
    assert type(unknown) is GristmillError and str(unknown) == "NewError: something"


def help_once(folder: Path, posting: StepManifest, work: str = "") -> None:
    """What a process that waits does when it finds a posting, and finds it ended the next time."""
    options = RunOptions(workers=1, shard="1/2")
    with shard_executor(LocalExecutor(1), folder, options, work, Scratch(folder)) as team:
        team.help()
        TaskQueue(folder).post(posting)
        team.help()


def fail_late(this: TaskRun, folder: Path) -> None:
    """A call that fails when the process in charge has ended its step, and has not yet said so on the queue."""
    TaskQueue(folder).remove(STEP)
    raise DamagedFile(this.task.arguments["source"], "cut off", "ends too early")


def test_who_fails_when_the_step_is_over_leaves_nothing_of_it(
    queues: tuple[TaskQueue, TaskQueue], tmp_path: Path
) -> None:
    folder, task = queues[0].folder, Task("a", fail_late, {"source": tmp_path / "a"})
    queues[0].post(posted(STEP, tasks=1), [Call(fail_late, {"folder": folder}, task_run=TaskRun("copy", "one", task))])
    with shard_executor(LocalExecutor(1), folder, RunOptions(workers=1, shard="1/2"), "", Scratch(tmp_path)) as team:
        team.help()
    assert sorted(path.name for path in folder.iterdir()) == ["processes", "step.json"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_process_with_other_versions_is_refused(tmp_path: Path, library: str) -> None:
    assert "zlib" in LIBRARIES and "ftfy" in LIBRARIES
    TaskQueue(tmp_path).post(StepManifest("session", versions={**code_versions(), library: "9.0.0"}))
    with pytest.raises(UsageError, match=rf"has {library} .* instead of 9\.0\.0"):
        help_once(tmp_path, StepManifest("session"))


def test_who_helped_ends_with_the_work_unless_its_own_is_another(tmp_path: Path) -> None:
    TaskQueue(tmp_path).post(StepManifest("session"))
    with pytest.raises(FinishedElsewhere, match="session has finished the work; this process helped with 0 tasks"):
        help_once(tmp_path, StepManifest("session", state="finished"))
    TaskQueue(tmp_path).post(StepManifest("session"))
    help_once(tmp_path, StepManifest("session", state="finished"), "another part")
    failure = Failure.of(UsageError("--threshold 3"))
    TaskQueue(tmp_path).post(StepManifest("session"))
    with pytest.raises(UsageError, match="--threshold 3"):
        help_once(tmp_path, StepManifest("session", state="failed", failure=failure))


def test_the_tasks_of_a_session_that_was_killed_are_taken_down(queues: tuple[TaskQueue, TaskQueue]) -> None:
    queue, _ = queues
    queue.close()
    assert queue.read() is None and not queue.fence(STEP).exists()
    queue.post(ended := posted(STEP, state="finished"))
    queue.close()
    assert queue.read() == ended
