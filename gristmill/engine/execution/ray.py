"""RayExecutor: runs the tasks of a step as Ray tasks; only paths, counts and done records pass through Ray.

All outputs are staged, as Ray runs a task again when it has lost sight of a node that still works on it. Nothing is
kept in Ray: if the driver dies, the same command resumes from what is done.

A task whose process died runs again in a child of Ray's worker, which survives: it says on which document that was, or
sets that aside, as LocalExecutor does.
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow
import ray
from ray.exceptions import RayError, RayTaskError

from gristmill.engine.execution.call import Call
from gristmill.engine.execution.local import LocalExecutor
from gristmill.engine.execution.shards import attempt, check_same_code, code_versions
from gristmill.engine.execution.staging import open_scratch
from gristmill.engine.execution.task_queue import Failure
from gristmill.errors import GristmillError, UsageError

_WINDOW = 4  # tasks in flight for each core of the cluster: thousands of waiting ones slow its scheduler down
_LOOK_SECONDS = 1.0  # between two looks at how many cores the cluster has
_CONNECT_SECONDS = 10.0
_RETRIES = 5  # of a task whose worker or node was lost


@dataclass(frozen=True)
class NodeScratch:
    """Where tasks on a node work on copies: in `folder`, None: that of the node's temporary files.

    `size`: what the tasks of `run` take together on each node; `fence`: see Scratch.
    """

    run: str
    folder: Path | None = None
    size: int | None = None
    fence: Path | None = None


class LostWorker(Exception):
    """Ray gave a task up, as its process or its node died."""


class RayExecutor:
    """Runs calls on the Ray cluster that this process is connected to; each takes a core and `memory` bytes."""

    def __init__(self, memory: int, scratch: NodeScratch) -> None:
        self.scratch = scratch
        self.retried = 0
        task = ray.remote(_run_call)
        shared = {"num_cpus": 1, "memory": memory, "scheduling_strategy": "SPREAD"}
        self._run_once = task.options(**shared, max_retries=0)
        self._run = task.options(**shared, max_retries=_RETRIES)

    def _submit(self, call: Call, is_watched: bool) -> Any:
        """Submit a call; return Ray's reference to its result. `is_watched`: it runs in a child of Ray's worker."""
        ends_itself = call.sets_aside or bool(call.foreign)  # most likely, and then a watched one says where
        run = self._run_once if ends_itself and not is_watched else self._run
        return run.remote(call.with_absolute_paths(), self.scratch, code_versions(), is_watched)

    def run(self, calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
        """Run calls as Executor.run does. Raises GristmillError if Ray gives a task up.

        After an error no task is cancelled: ray.shutdown ends running ones, and the fence keeps out what they write.
        Ray 2.60 aborts the process that cancels a task which has just ended.
        """
        pending: dict[Any, int] = {}
        watched = set[int]()  # positions of calls whose process died
        waiting = iter(enumerate(calls))
        window = 1
        looked = -_LOOK_SECONDS
        while True:
            if time.monotonic() - looked > _LOOK_SECONDS:  # each look asks the head node, which takes a millisecond
                window = max(1, int(_WINDOW * ray.cluster_resources().get("CPU", 1)))
                looked = time.monotonic()
            while len(pending) < window and (following := next(waiting, None)):
                pending[self._submit(following[1], is_watched=False)] = following[0]
            if not pending:
                return
            references = list(pending)
            ray.wait(references, num_returns=1)
            for done in ray.wait(references, num_returns=len(references), timeout=0)[0]:  # all: a look is linear
                position = pending.pop(done)
                call = calls[position]
                try:
                    result, retried = _result(done)
                except LostWorker as error:
                    if position in watched:
                        raise GristmillError(_describe_loss(call, str(error))) from error
                    watched.add(position)
                    pending[self._submit(call, is_watched=True)] = position
                    continue
                self.retried += retried
                yield position, result


@contextmanager
def ray_executor(address: str, memory: int, scratch: NodeScratch) -> Iterator[RayExecutor]:
    """Context: a connection to the cluster at `address`; '': RAY_ADDRESS, or else a cluster of this machine's own.

    Raises UsageError if there is none, or a task could run nowhere in it.
    """
    host, _, port = (address or os.environ.get("RAY_ADDRESS", "")).rpartition(":")
    try:
        if host and port.isdecimal() and "/" not in host:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        with _own_sigterm():
            ray.init(address or None, log_to_driver=False, logging_level=logging.ERROR, runtime_env=_code())
    except Exception as error:  # Ray raises a plain one if a node of its own does not start
        first = str(error).strip().split("\n")[0]
        raise UsageError(
            f"--address {address or 'of RAY_ADDRESS'}: no Ray cluster answers at this address ({first}). Check that it "
            "runs; if it needs a token, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        ) from error
    try:
        _check_room(memory)
        yield RayExecutor(memory, scratch)
    finally:
        ray.shutdown()


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Context: SIGTERM is handled as before in the end; Ray would end the process in its own way, with C++ traces."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _code() -> dict[str, Any]:
    """Where nodes look for modules: this project's, which they see on a shared disk or have installed, then a user's.

    A user's are on the PYTHONPATH of the driver, or of the node, which Ray puts in.
    """
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))  # nodes have other working folders
    folders = [str(Path(__file__).resolve().parents[3]), *map(os.path.abspath, named), "${PYTHONPATH}"]
    return {"env_vars": {"PYTHONPATH": os.pathsep.join(folders)}}


def _check_room(memory: int) -> None:
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    nodes = [resources for resources in alive if resources.get("CPU", 0) >= 1]
    largest = max((node.get("memory", 0) for node in nodes), default=0)
    if not nodes:
        raise UsageError("the Ray cluster has no node with CPU cores: add one")
    if largest < memory:
        raise UsageError(
            f"a task takes {memory:,} bytes, but no node of the Ray cluster offers more than {largest:,.0f}: give a "
            "smaller --memory, or more --workers, so that each task takes a smaller share"
        )


def _result(reference: Any) -> tuple[Any, int]:
    """Return the result of a call, and how often it was tried again.

    Raises its error as it was raised, and LostWorker where Ray gave it up.
    """
    try:
        result, _, retried = ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, GristmillError):
            raise error.cause from error
        raise GristmillError(str(error)) from error
    except RayError as error:
        raise LostWorker(str(error).strip().split("\n")[0]) from error
    if isinstance(result, Failure):
        raise result.error()
    return result, retried


def _describe_loss(call: Call, why: str) -> str:
    where = ""
    if call.task_run:
        where = f" {call.task_run.task.name}"
    if call.foreign:
        where += f" in {call.foreign}"
    return (
        f"Ray gave up on a task{where} after {_RETRIES} retries: {why}. If nodes ran out of memory, give a larger "
        "--memory or fewer --workers, so that fewer tasks run at once; then run the same command again to resume"
    )


def _run_call(
    call: Call, scratch: NodeScratch, versions: Mapping[str, str], is_watched: bool
) -> tuple[Any, float, int]:
    """Run a call on a node of the cluster, in a scratch folder of its own."""
    check_same_code(versions, f"the node {socket.gethostname()}")
    pyarrow.set_cpu_count(1)  # Ray gives each task a core
    with open_scratch(scratch.folder, scratch.size, is_private=True, group=scratch.run) as own:
        this = call.task_run
        if this is not None:
            budget = this.budget.on_this_machine() if this.budget else None
            call = replace(call, task_run=this.on(replace(own, fence=scratch.fence), budget))
        if is_watched:
            return _attempt_in_child(call)
        return attempt(call)


def _attempt_in_child(call: Call) -> Any:
    """Run a call in a child of this process; documents on which it dies are set aside, if the call says so.

    Raises WorkerDied, which names the document, if they are not.
    """
    with LocalExecutor(1) as executor:
        pending = {executor.submit(Call(attempt, {"call": call}, call.foreign, None, call.sets_aside)): 0}
        results = [outcome for _, outcome in executor.take_finished(pending)]
    return results[0]
