"""Works: the stages and runs whose state is in an output folder: who works on each, what is done, what it has cost."""

import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
import psutil

from gristmill.engine.executors.board import Board, Posting
from gristmill.engine.executors.presence import ProcessState
from gristmill.engine.records import Ledger
from gristmill.engine.report import StepNote
from gristmill.io.files import STATE_DIR
from gristmill.storage.files import list_folder, list_names, read_files
from gristmill.storage.lease import lease_seconds
from gristmill.urls import spell_urls
from gristmill_cli.run_config import StageName
from gristmill_cli.status.holders import Holder, find_holders

_DEPTH = 2  # of the folders below that hold state: OUT/dup/.gristmill
_RUN, _LOCK, _BOARD = "run", ".lock", ".board"
_CURRENT = {"working": "running", "stopped": "stopped"}  # state of the first stage not finished, by the run's


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


class Work(msgspec.Struct):
    """A stage or a run that goes on or was killed, or a session on a board that has ended."""

    name: str
    folder: str
    state: str  # "working", "stopped" (it was killed), "finished" or "failed"
    holder: str = ""  # who is in charge, or was when he was killed
    step: str = ""
    tasks: int = 0  # of the step
    tasks_done: int = 0
    tasks_running: int = 0
    retried: int = 0
    core_hours: float = 0.0
    error: str = ""
    records: int = 0  # of done tasks that the stage has not yet put into its ledger
    processes: list[WorkingProcess] = []


class Status(msgspec.Struct):
    """All works of an output folder, and the stages of `gristmill run`, if it is one of a run."""

    works: list[Work]
    stages: dict[str, str]  # name: "finished", "running", "stopped" or "waiting"


def find_status(out: Path) -> Status:
    """What is going on in `out` and the folders below it."""
    names = [state / name for state in _state_folders(out) for name in sorted(list_names(state))]
    locks = [path for path in names if path.suffix == _LOCK]
    postings = {path.with_suffix(_LOCK): Board(path).read() for path in names if path.suffix == _BOARD}
    shared = {lock: posting for lock, posting in postings.items() if posting}
    holders = find_holders(locks, [lock for lock, posting in shared.items() if posting.state == "working"])
    works = [work for lock in dict.fromkeys([*locks, *shared]) for work in _works_at(lock, holders, shared.get(lock))]
    return Status(works, _run_stages(out, next((work.state for work in works if work.name == _RUN), "")))


def _state_folders(out: Path, depth: int = _DEPTH) -> Iterator[Path]:
    folders = sorted(set(list_names(out)) - list_folder(out).keys())
    for name in folders:
        if name == STATE_DIR:
            yield out / name
        elif depth and not name.startswith("."):
            yield from _state_folders(out / name, depth - 1)


def _works_at(lock: Path, holders: Mapping[Path, Holder], posting: Posting | None) -> Iterator[Work]:
    """The work that a lock is of, if there is one: a process that works alone leaves the posting of those before."""
    holder = holders.get(lock)
    if posting and (posting.state == "working" or not holder):
        yield _shared(lock, holder, posting)
    elif holder:
        yield _alone(lock, holder)


def _alone(lock: Path, holder: Holder) -> Work:
    """The work of one process."""
    records = sum(found.endswith(".json") for found in list_names(Ledger(lock.parent, lock.stem).loose))
    processes = _from_words(holder)
    found = Work(
        lock.stem, _folder_of(lock), "working" if holder.is_alive else "stopped", holder.words,
        records=records, processes=processes, core_hours=sum(each.core_hours for each in processes),
    )  # fmt: skip
    if told := StepNote.read(lock.parent, lock.stem):
        note, found.tasks_done = told
        found.step, found.tasks = note.name, note.tasks
        found.tasks_running = min(note.workers, note.tasks - found.tasks_done) if holder.is_alive else 0
    return found


def _shared(lock: Path, holder: Holder | None, posting: Posting) -> Work:
    """The work that a board tells of."""
    board, is_working = Board(lock.with_suffix(_BOARD)), posting.state == "working"
    look, processes = board.look(posting), _processes(board) if is_working else []
    is_held = holder is not None and holder.is_alive and any(each.alive for each in processes)
    state = posting.state if is_held or not is_working else "stopped"
    return Work(
        lock.stem, _folder_of(lock), state, holder.words if holder else "", posting.name, posting.tasks,
        len(look.done), len(look.taken.keys() - look.done - look.failed),
        posting.spent.retried + sum(each.retried for each in processes),
        posting.spent.core_seconds / 3600 + sum(each.core_hours for each in processes),
        posting.failure.message if posting.failure else "", processes=processes,
    )  # fmt: skip


def _folder_of(lock: Path) -> str:
    return spell_urls(str(lock.parent.parent))


def _processes(board: Board) -> list[WorkingProcess]:
    """The processes on a board; those on other hosts are watched until they give a sign of life, or should have."""
    before, alive = board.processes.states(), dict[str, bool]()
    for name, state in before.items():
        if state.host == socket.gethostname():
            alive[name] = psutil.pid_exists(state.process)
    now, deadline = before, time.monotonic() + lease_seconds() / 2
    while alive.keys() != before.keys() and time.monotonic() < deadline:
        time.sleep(min(0.5, lease_seconds() / 8))
        now = board.processes.states()
        alive |= {name: True for name, state in now.items() if name in before and state.beat != before[name].beat}
    return [_told(name, now.get(name, state), alive.get(name, False)) for name, state in before.items()]


def _told(name: str, state: ProcessState, alive: bool) -> WorkingProcess:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.started))
    return WorkingProcess(
        name, state.host, state.process, "in charge" if state.is_in_charge else "helps", since, alive,
        state.running if alive else [], state.tasks_done, state.retried,
        (state.core_seconds + state.own_seconds) / 3600,
    )  # fmt: skip


def _from_words(holder: Holder) -> list[WorkingProcess]:
    """The process that a lock names, with what it and its workers have cost if it is on this host."""
    if not holder.process:
        return []
    host, number, since = holder.process
    hours = _processor_seconds(number) / 3600 if holder.is_alive and holder.is_here else 0.0
    return [WorkingProcess(f"{host}-{number}", host, number, "in charge", since, holder.is_alive, core_hours=hours)]


def _processor_seconds(number: int) -> float:
    """Processor time of a process, of the workers it has, and of those that have ended."""
    seconds = 0.0
    try:
        process = psutil.Process(number)
        for each in (process, *process.children(recursive=True)):
            times = each.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    except psutil.Error:  # it ends just now
        pass
    return seconds


def _run_stages(out: Path, state: str) -> dict[str, str]:
    """The stages of the run in `out`, which is in this state, in order; none if there is no run."""
    for data in read_files([out / "run.json"]):
        try:
            options: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.DecodeError:
            return {}
        asked = {
            "apply": options.get("apply", {}).get("function"),
            "generate_exact_pairs": options.get("dedup", {}).get("exact"),
        }
        names = [name for name in get_args(StageName) if asked.get(name, True)]
        finished = {name.removesuffix(".json") for name in list_names(out / STATE_DIR / _RUN)}
        states = {name: "finished" if name in finished else "waiting" for name in names}
        current = next((name for name, state in states.items() if state == "waiting"), None)
        if current and state in _CURRENT:
            states[current] = _CURRENT[state]
        return states
    return {}
