"""Hang detection: reports once why a distributed run ended, and names the rank that failed, died or hung.

When a rank dies or hangs, the other ranks' collectives fail as well. So the first rank that fails claims the report in
the rendezvous store, and all others stay silent. If it failed because another rank did not take part, it asks all
ranks for their activity, which a thread of each reads from the main thread's stack: a rank that does not answer is
dead or stopped, and a rank that answers but is not waiting in a collective has hung. Under NCCL no collective fails: a
rank whose GPU waits is noticed by its StallWatch.
"""

import json
import math
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from gristmill.errors import GristmillError
from training.distributed.collectives import wait
from training.distributed.command_line import write_error_file
from training.distributed.process_group import restart_prefix
from training.distributed.stall_watch import StallWatch
from training.distributed.stop_signals import StopSignals
from training.sharding.axis import Axis

_ANSWER_SECONDS = 3.0  # for the ranks to answer with their activity
_REPORT_SECONDS = 10.0  # for the first rank that failed to print its report
_POLL_SECONDS = 0.5  # between two checks of the store
_PACKAGE_DIR = Path(__file__).parents[1]
_TORCH_DIR = Path(dist.__file__).parent
_DISCONNECTED = re.compile(r"[Cc]onnection (closed|reset|refused)|Broken pipe|pair closure|connectFullMesh|Read error")
_TIMED_OUT = re.compile(r"[Tt]imed? ?out")

Stack = list[tuple[FrameType, int]]  # frames and their current lines; the innermost last


class Activity(NamedTuple):
    """The current call of a rank: `waiting` is True inside a collective; `text` describes the call."""

    waiting: bool
    text: str


@contextmanager
def report_failures(watch: StallWatch) -> Iterator[None]:
    """Run the block; if it raises, one rank prints a report and every process ends. A single rank raises the error.

    So it does if `watch`, of this thread, says that the block has stalled.
    Requires RANK, WORLD_SIZE and MASTER_ADDR/PORT, as torchrun sets them, and the process group's store to be up.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return
    store = _open_store()
    rank = int(os.environ["RANK"])
    store.set(f"host{rank}", socket.gethostname())
    done = threading.Event()
    arguments = (store, rank, threading.get_ident(), done, watch)
    monitor = threading.Thread(target=_monitor, args=arguments, name="hang detection", daemon=True)
    monitor.start()
    try:
        yield
    except Exception as error:
        with StopSignals():  # a launcher sends SIGTERM to the surviving ranks: print the report before ending
            _report(error, store, rank, describe_stack(_stack_of(error)))
            monitor.join()  # which ends the process, unless the store is gone
            os._exit(1)
    finally:
        done.set()
        monitor.join()


def is_peer_failure(error: BaseException | None) -> bool:
    """Return whether the error, or one that caused it, is a collective that failed because of another rank."""
    return any(isinstance(cause, RuntimeError) and _blames_peer(str(cause)) for cause in _causes(error))


def _blames_peer(message: str) -> bool:
    return bool(_DISCONNECTED.search(message) or _TIMED_OUT.search(message))


def diagnose(
    activities: dict[int, Activity], silent: list[int], timed_out: bool, hosts: Mapping[int, str] = MappingProxyType({})
) -> str:
    """Build the report on ranks that hung or died: the ranks at fault, then each activity and the ranks that share it.

    `activities` by rank; `silent` are the ranks that did not answer; `timed_out`: the first error was a timeout, and
    not a closed connection. `hosts` are the names of the ranks' machines, where there are several.
    """
    hung = [rank for rank, activity in activities.items() if not activity.waiting]
    if silent and timed_out:
        lines = [
            f"error: {_format_ranks(silent, hosts)} did not respond: stopped, or disconnected from the other ranks"
        ]
    elif silent:
        lines = [f"error: {_format_ranks(silent, hosts)} died without an error message: killed, or out of memory"]
    elif hung:
        whom = "it" if len(hung) == 1 else "them"
        lines = [f"error: {_format_ranks(hung, hosts)} hung; the other ranks timed out waiting for {whom}"]
    else:
        lines = ["error: deadlock: all ranks are waiting for each other"]
    by_text = sorted(activities.items(), key=lambda item: (item[1].waiting, item[1].text))
    for activity, same in groupby(by_text, key=lambda item: item[1]):
        ranks = _format_ranks(sorted(rank for rank, _ in same), hosts)
        state = "waiting" if activity.waiting else "running"
        lines.append(f"    {ranks}: {state}: {activity.text}")
    return "\n".join(lines)


def describe_stack(stack: Stack, gpu_busy: bool = False) -> Activity:
    """Describe a stack: the training step, the collective and its axis, and the innermost line of this package.

    With unfinished work on its GPU a rank waits, too: of the others, or to get in.
    """
    ours = [(frame, line) for frame, line in stack if _is_ours(frame)] or stack
    frame, line = ours[-1]
    function = f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{line})"
    words = list[str]()
    steps = [frame.f_locals["step"] for frame, _ in ours if isinstance(frame.f_locals.get("step"), int)]
    if steps:
        words.append(f"step {steps[0]}")
    innermost_frame, innermost_line = stack[-1]
    innermost = innermost_frame.f_code
    waiting = innermost is wait.__code__ or _TORCH_DIR in Path(innermost.co_filename).parents
    if waiting:
        words.append(_describe_collective([frame for frame, _ in stack]))
    elif innermost is not ours[-1][0].f_code:
        words.append(f"{innermost.co_qualname} ({Path(innermost.co_filename).name}:{innermost_line})")
    if gpu_busy:
        words.append("its GPU at work")
    text = f"{', '.join(words)} in {function}" if words else function
    return Activity(waiting or gpu_busy, text)


def _is_ours(frame: FrameType) -> bool:
    """Return whether a frame is of this package, and does not only wait for a collective."""
    return _PACKAGE_DIR in Path(frame.f_code.co_filename).parents and frame.f_code is not wait.__code__


def _describe_collective(frames: Sequence[FrameType]) -> str:
    """Describe the innermost call: name, tensor, axis and ranks, where its local variables show them."""
    call = frames[-1]
    name = call.f_code.co_name.strip("_")
    name = {"wait": "asynchronous communication", "wait_batch_p2p": "send or receive"}.get(name, name)
    of_tensor = ""
    tensors = [value for value in call.f_locals.values() if isinstance(value, Tensor)]
    if tensors:
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        of_tensor = f" of {dtype} {tuple(tensors[0].shape)}"
    return f"{name}{of_tensor} {_describe_group(frames)}".rstrip()


def _describe_group(frames: Iterable[FrameType]) -> str:
    """Return the axis and ranks of the innermost frame that has a local `axis`, `self.axis` or `group`."""
    for frame in reversed(list(frames)):
        known = frame.f_locals
        axis = known.get("axis") or getattr(known.get("self"), "axis", None)
        group = axis.group if isinstance(axis, Axis) else known.get("group")
        if isinstance(group, dist.ProcessGroup):
            ranks = dist.get_process_group_ranks(group)
            members = "all ranks"
            if len(ranks) < dist.get_world_size():
                members = f"ranks {', '.join(map(str, ranks))}"
            return f"over {group.group_desc.removeprefix('mesh_').replace('default_pg', 'all')} ({members})"
        if "group" in known:
            return "over all ranks"
    return ""


def _open_store() -> dist.Store:
    """Open a second connection to torchrun's store: the process group's may be blocked by another thread."""
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))
    return dist.PrefixStore(f"{restart_prefix()}/hang_detection", store)


def _monitor(store: dist.Store, rank: int, thread: int, done: threading.Event, watch: StallWatch) -> None:
    """Once a rank has failed: answer with the activity of `thread` if asked, and end this process after the report.

    Reports a stall, as the main thread cannot.
    """
    deadline = math.inf
    with suppress(RuntimeError):  # the store ends with rank 0's process, which may have finished normally
        while not done.wait(_POLL_SECONDS) and time.monotonic() < deadline:
            if deadline == math.inf and watch.stalled():
                stall = RuntimeError(f"] GPU timed out after {watch.seconds:g} s")
                _report(stall, store, rank, describe_stack(_stack_of_thread(thread), gpu_busy=True))
            if store.check(["failed"]):
                deadline = min(deadline, time.monotonic() + _REPORT_SECONDS)
                if store.check(["asked"]) and not store.check([f"activity{rank}"]):
                    activity = describe_stack(_stack_of_thread(thread), watch.busy())
                    store.set(f"activity{rank}", json.dumps(activity))
                if store.check(["reported"]):
                    break
    # wait: the rank that failed first must exit first, as torchrun names the first in its summary
    if deadline < math.inf and not done.wait(1.0):
        write_error_file("ended because another rank failed")
        os._exit(1)  # at once: nothing may block in a collective


def _report(error: Exception, store: dist.Store, rank: int, activity: Activity) -> None:
    """If this rank is the first to fail, print the report and end this process; `activity`: where it failed."""
    try:
        first = store.add("failed", 1) == 1
        if is_peer_failure(error):
            store.set(f"activity{rank}", json.dumps(activity))
        if first:
            text = _format_report(error, store, rank)
            print(text, file=sys.stderr, flush=True)
            write_error_file(text)
            store.set("reported", "")
            os._exit(error.exit_code if isinstance(error, GristmillError) else 1)
    except RuntimeError:
        print(
            f"error: rank {rank} lost the connection to the other ranks and to their store: {activity.text}",
            file=sys.stderr,
        )


def _format_report(error: Exception, store: dist.Store, rank: int) -> str:
    if isinstance(error, GristmillError):
        return f"error: {error}"
    if not is_peer_failure(error):
        inside = error.__traceback__.tb_next if error.__traceback__ else None  # without report_failures' own frame
        trace = "".join(traceback.format_exception(error.with_traceback(inside))).rstrip()
        return f"error: rank {rank} failed: {type(error).__name__}: {error}\n{trace}"
    size = int(os.environ["WORLD_SIZE"])
    activities = _collect_activities(store, size)
    message = next(str(cause) for cause in _causes(error) if _blames_peer(str(cause)))
    silent = sorted(set(range(size)) - set(activities))
    report = diagnose(activities, silent, bool(_TIMED_OUT.search(message)), _hosts_of_ranks(store, size))
    message = message.rpartition("] ")[2].partition(". ")[0]  # without gloo's source line and its advice
    return f"{report}\n    first noticed by rank {rank}: {message:.120}\n    {_advice()}"


def _collect_activities(store: dist.Store, size: int) -> dict[int, Activity]:
    """Ask every rank for its activity; return the answers that arrive in time, by rank."""
    store.set("asked", "")
    activities = dict[int, Activity]()
    deadline = time.monotonic() + _ANSWER_SECONDS
    while len(activities) < size and time.monotonic() < deadline:
        time.sleep(0.05)
        for other in set(range(size)) - set(activities):
            if store.check([f"activity{other}"]):
                activities[other] = Activity(*json.loads(store.get(f"activity{other}")))
    return activities


def _hosts_of_ranks(store: dist.Store, size: int) -> dict[int, str]:
    """Return the names of the ranks' machines; none where all are on one."""
    hosts = dict[int, str]()
    for rank in range(size):
        if store.check([f"host{rank}"]):
            hosts[rank] = store.get(f"host{rank}").decode()
    return hosts if len({*hosts.values()}) > 1 else {}


def _advice() -> str:
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        return "torchrun restarts all ranks; they resume from the last checkpoint"
    return "run the same command to resume from the last checkpoint; torchrun --max-restarts 3 restarts automatically"


def _format_ranks(ranks: Sequence[int], hosts: Mapping[int, str] = MappingProxyType({})) -> str:
    """Return ranks as words, with their machines, where those are known.

    >>> _format_ranks([1, 2, 3], {1: "node1", 2: "node2", 3: "node2"})
    'ranks 1, 2, 3 (on node1, node2)'
    """
    named = dict.fromkeys(hosts[rank] for rank in ranks if rank in hosts)
    where = f" (on {', '.join(named)})" if named else ""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, ranks))}{where}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, its cause, the cause's cause, …"""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _stack_of(error: BaseException) -> Stack:
    stack = Stack()
    for cause in _causes(error):
        stack += traceback.walk_tb(cause.__traceback__)
    return stack


def _stack_of_thread(thread: int) -> Stack:
    return list(traceback.walk_stack(sys._current_frames()[thread]))[::-1]
