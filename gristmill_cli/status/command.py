"""Command: how far the runs in an output folder are: stages or steps, who works, and what it has cost."""

import re
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.console import Group
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from gristmill.command import command
from gristmill.engine.execution.progress import StepNote, count_records
from gristmill.engine.execution.task_queue import StepManifest, TaskQueue
from gristmill.engine.staleness.ledger import Ledger
from gristmill.errors import UsageError
from gristmill.io.files import RUN_FILE, STATE_DIR
from gristmill.paths import spell_urls
from gristmill.storage.files import is_file, is_folder, list_folder, list_names, read_files
from gristmill.storage.lock import is_locked, lease_seconds
from gristmill.storage.stores import store_of
from gristmill.wording import count_of
from gristmill_cli.run_config import recorded_options
from gristmill_cli.stages.pipeline import stages_in_run
from gristmill_cli.status.training import TrainingStatus, training_status

_DEPTH = 2  # of the folders below that hold state: OUT/dup/.gristmill
_RUN = "run"
_LOCK = ".lock"
_QUEUE = ".queue"
_HOLDER = re.compile(r"process (\d+) on (.+), since (.+)")


class WorkingProcess(msgspec.Struct):
    """A process that works, or has."""

    name: str
    host: str
    process: int
    role: str  # "in charge" or "helps"
    since: str  # by its own clock
    alive: bool
    running: list[str] = []
    tasks_done: int = 0
    retried: int = 0
    core_hours: float = 0.0


class RunStatus(msgspec.Struct):
    """A stage or a run that works or was killed, or a session with --shard that has ended."""

    name: str
    folder: str
    state: str  # "working", "stopped" (it was killed), "finished" or "failed"
    holder: str = ""  # the process in charge, or that was when it was killed
    step: str = ""
    tasks: int = 0  # of the step
    tasks_done: int = 0
    tasks_running: int = 0
    retried: int = 0
    core_hours: float = 0.0
    error: str = ""
    records: int = 0  # of done tasks that the stage has not yet put into its ledger
    processes: list[WorkingProcess] = []

    @property
    def line(self) -> str:
        """Return all but the processes, in one line."""
        parts = [f"{self.name} in {self.folder}: {self.state}"]
        if self.tasks:
            progress = f"{self.step}: {self.tasks_done:,} of {count_of(self.tasks, 'task')} done"
            if self.tasks_running:
                progress += f", {self.tasks_running:,} taken"
            parts.append(progress)
        elif self.records:
            parts.append(f"{count_of(self.records, 'task')} done in this run of the stage")
        if self.retried:
            parts.append(f"{self.retried:,} retried")
        if self.core_hours:
            parts.append(f"{self.core_hours:,.2f} core hours so far")
        if self.state == "stopped" and self.holder:
            parts.append(f"{self.holder} was in charge")
        if self.error:
            parts.append(self.error)
        return "; ".join(parts)


class Status(msgspec.Struct):
    """All runs of an output folder, and the stages of `gristmill run`, if it is one of a run."""

    works: list[RunStatus]
    stages: dict[str, str]  # name: "finished", "running", "stopped" or "waiting"
    training: TrainingStatus | None = None  # of the --out_dir of a training run

    def stages_in(self, state: str) -> list[str]:
        """Return the names of the stages in a state, in order."""
        return [name for name, state_of_stage in self.stages.items() if state_of_stage == state]


def status(out: Positional[Path], json: bool = False) -> Group | Text:
    """Show the progress of a run or a stage, on this machine and on others. Changes nothing.

    A process on another machine is watched for up to 15 s, half the time after which it would count as dead.

    Args:
        out: The output folder of a run, a stage or a training run; also s3://bucket/folder.
        json: Print JSON.
    """
    if not is_folder(out):
        raise UsageError(f"{out}: there is no such folder. Give the --out of a run, or a stage's output folder")
    report = find_status(out)
    if json:
        return Text(msgspec.json.encode(report).decode())
    if report.training is not None:
        return Group(*map(Text, report.training.lines))
    lines = list[str]()
    for state in ("finished", "running", "stopped", "waiting"):
        names = report.stages_in(state)
        if names:
            lines.append(f"stages {state}: {', '.join(names)}")
    is_working = False
    for work in report.works:
        lines.append(work.line)
        is_working |= work.state == "working"
    if not is_working:
        lines.append("nothing is running here")
    parts: list[Text | Table] = list(map(Text, lines))
    processes = dict[tuple[str, int], WorkingProcess]()  # one may work on a run, and on a stage of it
    for work in report.works:
        for process in work.processes:
            processes.setdefault((process.host, process.process), process)
    if processes:
        parts += [Text(), _table(list(processes.values()))]
    if not is_folder(out / STATE_DIR) and not (is_file(out / RUN_FILE) and report.stages):
        parts.append(Text(f"{out} is neither the --out of a run nor the output folder of a stage"))
    return Group(*parts)


def find_status(out: Path) -> Status:
    """Return the runs in `out` and the folders below it, and their states."""
    works = list[RunStatus]()
    for state in _state_folders(out):
        has_queue = dict[str, bool]()  # by the name of the work
        for file_name in sorted(list_names(state)):
            name, _, kind = file_name.rpartition(".")
            if f".{kind}" in (_LOCK, _QUEUE):
                has_queue[name] = has_queue.get(name, False) or f".{kind}" == _QUEUE
        for name, is_shared in has_queue.items():
            works += _find_work(state, name, is_shared)
    state_of_run = ""
    for work in works:
        if work.name == _RUN:
            state_of_run = work.state
            break
    stages = stages_of_run(out, state_of_run)
    if stages:
        return Status(works, stages)
    return Status(works, stages, training_status(out))


def _state_folders(out: Path, depth: int = _DEPTH) -> Iterator[Path]:
    for name in sorted(set(list_names(out)) - list_folder(out).keys()):
        if name == STATE_DIR:
            yield out / name
        elif depth and not name.startswith("."):
            yield from _state_folders(out / name, depth - 1)


def _find_work(state: Path, name: str, has_queue: bool) -> Iterator[RunStatus]:
    """Yield the work of a name in a state folder, if one runs, was killed or, with --shard, has ended."""
    lock = state / f"{name}{_LOCK}"
    queue = TaskQueue(state / f"{name}{_QUEUE}")
    first_line = next(read_files([lock]), b"").partition(b"\n")[0]
    holder = first_line.decode(errors="replace")
    manifest = queue.read() if has_queue else None
    work = RunStatus(name, spell_urls(str(state.parent)), "stopped", holder)
    if manifest and (manifest.state == "working" or not holder):  # else that of earlier processes
        _add_shards(work, queue, manifest)
    elif holder:
        _add_one_process(work, lock)
    else:
        return
    for process in work.processes:
        work.retried += process.retried
        work.core_hours += process.core_hours
    yield work


def _add_shards(work: RunStatus, queue: TaskQueue, manifest: StepManifest) -> None:
    """Add what the manifest of a step tells, and the heartbeats of processes."""
    states = queue.processes.states()
    tasks = queue.list_states(manifest)
    if manifest.state == "working":
        is_local_alive = dict[str, bool]()
        for name, state in states.items():
            if state.host == socket.gethostname():
                is_local_alive[name] = psutil.pid_exists(state.process)
        alive = _watch(is_local_alive, _beats(queue), lambda: _beats(queue))
        for name, state in states.items():
            process = WorkingProcess(
                name,
                state.host,
                state.process,
                role="in charge" if state.is_in_charge else "helps",
                since=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.started)),
                alive=alive.get(name, False),
                tasks_done=state.tasks_done,
                retried=state.retried,
                core_hours=(state.core_seconds + state.own_seconds) / 3600,
            )
            if process.alive:
                process.running = state.running
            work.processes.append(process)
    is_alive = any(process.alive for process in work.processes)
    work.state = manifest.state
    if manifest.state == "working" and not (work.holder and is_alive):
        work.state = "stopped"
    work.step = manifest.name
    work.tasks = manifest.tasks
    work.tasks_done = len(tasks.done)
    work.tasks_running = len(tasks.taken.keys() - tasks.done - tasks.failed)
    if manifest.failure:
        work.error = manifest.failure.message


def _beats(queue: TaskQueue) -> dict[str, Any]:
    """Return the last heartbeat of each process that shares a queue, by its name."""
    return {name: state.beat for name, state in queue.processes.states().items()}


def _add_one_process(work: RunStatus, lock: Path) -> None:
    """Add what the lock tells of its holder, a single process, and its step note of the tasks."""
    match = _HOLDER.fullmatch(work.holder)
    host = ""
    number = 0
    if match:
        host = match[2]
        number = int(match[1])
    is_here = host == socket.gethostname()

    def content() -> dict[str, bytes]:
        return {"": next(read_files([lock]), b"")}

    if store_of(lock).has_file_locks:
        is_alive = is_locked(lock)
    else:
        known = dict[str, bool]()
        if is_here:
            known[""] = psutil.pid_exists(number)
        is_alive = _watch(known, content(), content)[""]
    work.state = "working" if is_alive else "stopped"
    work.records = count_records(Ledger(lock.parent, lock.stem).loose)
    if match:
        hours = 0.0
        if is_alive and is_here:
            hours = _processor_seconds(number) / 3600
        work.processes = [
            WorkingProcess(f"{host}-{number}", host, number, "in charge", match[3], is_alive, core_hours=hours)
        ]
    if noted := StepNote.read(lock.parent, lock.stem):
        note, work.tasks_done = noted
        work.step = note.name
        work.tasks = note.tasks
        if is_alive:
            work.tasks_running = min(note.workers, note.tasks - work.tasks_done)


def _watch(alive: Mapping[str, bool], before: Mapping[str, Any], read: Any) -> dict[str, bool]:
    """Return who is alive: as known, or as what a process renews changes while watched, half its lease at most."""
    alive = dict(alive)
    until = time.monotonic() + lease_seconds() / 2
    while before.keys() - alive.keys() and time.monotonic() < until:
        time.sleep(min(0.5, lease_seconds() / 8))
        now = read()
        for name in before.keys() - alive.keys():
            if name in now and now[name] != before[name]:
                alive[name] = True
    return dict.fromkeys(before, False) | alive


def _processor_seconds(number: int) -> float:
    """Return the processor time of a process, of its workers, and of ended workers."""
    try:
        process = psutil.Process(number)
        seconds = 0.0
        for worker in (process, *process.children(recursive=True)):
            times = worker.cpu_times()
            seconds += sum(times[:4])  # user and system time, and the times of ended children
    except psutil.Error:  # it ends just now
        return 0.0
    return seconds


def _table(processes: list[WorkingProcess]) -> Table:
    table = Table("process", "host", "since", "", "tasks done", "retried", "core hours", "runs now", box=None)
    for process in processes:
        role = process.role
        if not process.alive:
            role += "; dead"
        runs_now = "".join(process.running[:1])
        if len(process.running) > 1:
            runs_now += f" and {len(process.running) - 1:,} more"
        table.add_row(
            str(process.process), Text(process.host), process.since, role, f"{process.tasks_done:,}",
            f"{process.retried:,}", f"{process.core_hours:,.3f}", Text(runs_now),
        )  # fmt: skip
    return table


def stages_of_run(out: Path, state: str) -> dict[str, str]:
    """Return the stages of the run in `out`, which is in this state, in order; none if there is no run."""
    options = recorded_options(out)
    if "dedup" not in options:  # a training run has a file of the same name
        return {}
    finished = {name.removesuffix(".json") for name in list_names(out / STATE_DIR / _RUN)}
    of_current = {"working": "running", "stopped": "stopped"}.get(state, "waiting")  # the first that is unfinished
    states = dict[str, str]()
    for stage in stages_in_run(options):
        if stage.name in finished:
            states[stage.name] = "finished"
        else:
            states[stage.name] = of_current
            of_current = "waiting"
    return states


if __name__ == "__main__":
    command(status)
