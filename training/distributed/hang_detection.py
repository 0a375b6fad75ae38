"""What ended a run of several processes, told once: by the process that failed, or about one that fell silent.

Processes that wait for each other fail together: where one dies or hangs, the others' collectives fail. So the
first to fail says so in the store they met in, and all others keep quiet. If it failed for want of another process,
all write there what they are doing, even those that notice nothing yet; whoever writes nothing is dead or stopped.
"""

import json
import math
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from gristmill.errors import GristmillError
from training.distributed.mesh import Axis, restart_attempt
from training.distributed.stop_signals import StopSignals

GRACE = 3.0  # seconds that the others have to say what they are doing
_PATIENCE = 10.0  # seconds for the first that failed to tell why
_PERIOD = 0.5  # seconds between looks at whether that is asked
_OURS, _TORCH = Path(__file__).parents[1], Path(dist.__file__).parent
_GONE = re.compile(r"[Cc]onnection (closed|reset|refused)|Broken pipe|pair closure|connectFullMesh|Read error")
_LATE = re.compile(r"[Tt]imed? ?out")

Frames = list[tuple[FrameType, int]]  # and their lines; the innermost last


class Doing(NamedTuple):
    """What a process is at: whether it waits for others there, and words for people."""

    waits: bool
    text: str


def lost_contact(error: BaseException | None) -> bool:
    """Whether a collective failed for want of another process."""
    return any(isinstance(e, RuntimeError) and (_GONE.search(str(e)) or _LATE.search(str(e))) for e in _chain(error))


@contextmanager
def watched() -> Iterator[None]:
    """End this process if the block raises, so that one of all processes tells why; alone, leave it to the caller.

    The processes that the launcher started have met in the store at MASTER_ADDR when it begins.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return
    store, rank, done = _open_store(), int(os.environ["RANK"]), threading.Event()
    arguments = (store, rank, threading.get_ident(), done)
    listening = threading.Thread(target=_listen, args=arguments, name="watch", daemon=True)
    listening.start()
    try:
        yield
    except Exception as error:
        with StopSignals():  # a launcher tells those who survive a death to end: they have something to say first
            _tell(error, store, rank)
            listening.join()  # which ends the process, if the store is still there
            os._exit(1)
    finally:
        done.set()
        listening.join()


def describe(frames: Frames) -> Doing:
    """What a stack of calls is at: the step, the collective, over which axis, the innermost line of ours."""
    ours = [(frame, line) for frame, line in frames if _OURS in Path(frame.f_code.co_filename).parents]
    ours = [(frame, line) for frame, line in ours if frame.f_code is not wait.__code__] or frames
    frame, line = ours[-1]
    place = f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{line})"
    steps = [f.f_locals["step"] for f, _ in ours if isinstance(f.f_locals.get("step"), int)]
    words = [f"step {steps[0]}"] if steps else []
    innermost = frames[-1][0].f_code
    waits = innermost is wait.__code__ or _TORCH in Path(innermost.co_filename).parents
    if waits:
        words.append(_collective([f for f, _ in frames]))
    elif innermost is not frame.f_code:
        words.append(f"{innermost.co_qualname} ({Path(innermost.co_filename).name}:{frames[-1][1]})")
    return Doing(waits, f"{', '.join(words)} in {place}" if words else place)


def wait(work: dist.Work, group: dist.ProcessGroup | None) -> None:
    """Wait for what was begun over `group`, which is here for `describe` to find."""
    assert group is None or isinstance(group, dist.ProcessGroup)
    work.wait()


def _collective(frames: Sequence[FrameType]) -> str:
    """The collective, of what, over which axis and with whom, as far as the calls' own variables tell."""
    call = frames[-1]
    name = call.f_code.co_name.strip("_")
    name = {"wait": "sum", "wait_batch_p2p": "send or receive"}.get(name, name)
    tensor = next((x for x in call.f_locals.values() if isinstance(x, Tensor)), None)
    of = f" of {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" if tensor is not None else ""
    return f"{name}{of} {_over(frames)}".rstrip()


def _over(frames: Iterable[FrameType]) -> str:
    for frame in reversed(list(frames)):
        known = frame.f_locals
        axis = known.get("axis") or getattr(known.get("self"), "axis", None)
        group = axis.group if isinstance(axis, Axis) else known.get("group")
        if isinstance(group, dist.ProcessGroup):
            ranks = dist.get_process_group_ranks(group)
            others = "all ranks" if len(ranks) == dist.get_world_size() else f"ranks {', '.join(map(str, ranks))}"
            return f"over {group.group_desc.removeprefix('mesh_').replace('default_pg', 'all')} ({others})"
        if "group" in known:
            return "over all ranks"
    return ""


def _open_store() -> dist.Store:
    """Its own connection: another's could be in use by a thread that waits."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))
    return dist.PrefixStore(f"{restart_attempt()}/watch", store)


def _listen(store: dist.Store, rank: int, thread: int, done: threading.Event) -> None:
    """Once a process has failed, write what `thread` is doing if that is asked, and end when all is told."""
    until = math.inf
    with suppress(RuntimeError):  # the store is gone, and with it the process that held it: it may have been done
        while not done.wait(_PERIOD) and time.monotonic() < until:
            if store.check(["failed"]):
                until = min(until, time.monotonic() + _PATIENCE)
                if store.check(["asked"]) and not store.check([f"doing{rank}"]):
                    lines = list(traceback.walk_stack(sys._current_frames()[thread]))
                    store.set(f"doing{rank}", json.dumps(describe(lines[::-1])))
                if store.check(["told"]):
                    break
    if until < math.inf and not done.wait(1.0):  # the launcher shall find first the one that failed first
        _write_error_file("ended because another process had failed")
        os._exit(1)  # not held up by anything that waits for the others


def _tell(error: Exception, store: dist.Store, rank: int) -> None:
    """Say what ended the run, and end this process, if it is the first to fail."""
    try:
        first = store.add("failed", 1) == 1
        if lost_contact(error):
            store.set(f"doing{rank}", json.dumps(describe(_frames(error))))
        if first:
            text = _explain(error, store, rank)
            print(text, file=sys.stderr, flush=True)
            _write_error_file(text)
            store.set("told", "")
            os._exit(error.exit_code if isinstance(error, GristmillError) else 1)
    except RuntimeError:
        place = describe(_frames(error)).text
        print(f"error: rank {rank} lost the others, and the store in which they met: {place}", file=sys.stderr)


def _explain(error: Exception, store: dist.Store, rank: int) -> str:
    if isinstance(error, GristmillError):
        return f"error: {error}"
    if not lost_contact(error):
        inside = error.__traceback__.tb_next if error.__traceback__ else None  # of the block that is watched
        trace = "".join(traceback.format_exception(error.with_traceback(inside))).rstrip()
        return f"error: rank {rank} failed: {type(error).__name__}: {error}\n{trace}"
    store.set("asked", "")
    size = int(os.environ["WORLD_SIZE"])
    answers, until = dict[int, Doing](), time.monotonic() + GRACE
    while len(answers) < size and time.monotonic() < until:
        time.sleep(0.05)
        for other in set(range(size)) - set(answers):
            if store.check([f"doing{other}"]):
                answers[other] = Doing(*json.loads(store.get(f"doing{other}")))
    met = next(str(e) for e in _chain(error) if _GONE.search(str(e)) or _LATE.search(str(e)))
    accused = accuse(answers, sorted(set(range(size)) - set(answers)), late=bool(_LATE.search(met)))
    met = met.rpartition("] ")[2].partition(". ")[0]  # without the place in gloo's source, and its advice
    return f"{accused}\n    rank {rank} was the first to notice: {met:.120}\n    {_advice()}"


def accuse(answers: dict[int, Doing], silent: list[int], late: bool) -> str:
    """The words for it: who is missing, and where those who answered were; a line for all of one answer."""
    busy = [rank for rank, doing in answers.items() if not doing.waits]
    if silent and late:
        lines = [f"error: no answer from {_ranks(silent)}: stopped, or cut off from the others"]
    elif silent:
        lines = [f"error: {_ranks(silent)} ended without a word: killed, or out of memory"]
    elif busy:
        lines = [f"error: the others waited in vain for {_ranks(busy)}"]
    else:
        lines = ["error: the processes wait for each other"]
    by_text = sorted(answers.items(), key=lambda item: (item[1].waits, item[1].text))
    for doing, same in groupby(by_text, key=lambda item: item[1]):
        ranks = _ranks(sorted(rank for rank, _ in same))
        lines.append(f"    {ranks}: {'waited for others' if doing.waits else 'busy'}: {doing.text}")
    return "\n".join(lines)


def _advice() -> str:
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        return "torchrun starts all of them anew, and they go on from the last checkpoint"
    return "the same command goes on from the last checkpoint; torchrun --max-restarts 3 does so by itself"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _frames(error: BaseException) -> Frames:
    return [frame for e in _chain(error) for frame in traceback.walk_tb(e.__traceback__)]


def _write_error_file(text: str) -> None:
    """Where torchrun looks for what it puts into its own report."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": text.splitlines()[0], "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}))
