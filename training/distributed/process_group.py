"""Process group: joins that of torchrun, gives each rank its device, and runs an action on rank 0 only."""

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from gristmill.errors import GristmillError, UsageError
from gristmill.wording import count_of
from training.distributed.command_line import write_error_file
from training.kernels.dispatch import kernels_for

Result = TypeVar("Result")

_START_TIMEOUT = timedelta(minutes=5)  # for all ranks to join
_REPORT_SECONDS = 30.0  # for the report on a hang under NCCL


def main_only(action: Callable[[], Result]) -> Result:
    """Run `action` on rank 0 and broadcast its result; a GristmillError it raises is raised on every rank."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except GristmillError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


@contextmanager
def init_distributed(device: Literal["auto", "cpu", "cuda"] = "auto", timeout: float = 60.0) -> Iterator[torch.device]:
    """Join the process group of torchrun (or torch.distributed.launch), or make one of a single rank.

    Yields this rank's device and destroys the group at the end; a group that the caller initialized is used and left
    open. `timeout`: seconds that a collective waits for other ranks. Raises UsageError for a missing GPU.
    """
    kind = _device_kind(device)
    rank_device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(rank_device)
    else:
        _share_cores()
    kernels_for(rank_device).prepare_process()
    ours = not dist.is_initialized()
    if ours:
        _init_process_group(kind, timeout)
    try:
        yield rank_device
    finally:
        if ours:
            dist.destroy_process_group()


def restart_prefix() -> str:
    """Return prefix of this restart's keys in torchrun's store, such as "attempt0": restarts may share one store."""
    return f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def _device_kind(asked: str) -> str:
    available = torch.cuda.is_available()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if asked == "cuda" and not available:
        raise UsageError("--device is cuda, but torch finds no GPU on this machine; try --device cpu")
    if asked != "cpu" and available and local_ranks > torch.cuda.device_count():
        raise UsageError(
            f"{count_of(local_ranks, 'process', 'processes')} and {count_of(torch.cuda.device_count(), 'GPU')} on this "
            "machine; "
            "try a lower --nproc_per_node, --device cpu, or srun with --gpus-per-node instead of --gpus-per-task"
        )
    return "cuda" if available and asked != "cpu" else "cpu"


def _share_cores() -> None:
    """Divide this machine's cores among its ranks, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def _init_process_group(kind: str, timeout: float) -> None:
    limit = group_timeout(kind, timeout)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
        return
    with _say_if_late(timeout):
        store, rank, size = _join_store()
    stored = store.multi_get([f"versions {number}" for number in range(size)])
    try:
        _require_same_versions([versions.decode() for versions in stored])
    except UsageError:
        wait_for_all(store, "compared", size, timedelta(seconds=timeout))  # rank 0 may be the store
        raise
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except RuntimeError as error:
        raise UsageError(
            f"rank {rank} and the other {size - 1} could not connect within --timeout, {timeout:g} s: one has died, or "
            f"the machine is busy; try a higher --timeout ({str(error).strip().splitlines()[0]:.150})"
        ) from error


@contextmanager
def _say_if_late(seconds: float) -> Iterator[None]:
    """Say what is waited for when the other ranks have not come after so many seconds."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    limit = _START_TIMEOUT.total_seconds()
    line = (
        f"rank {os.environ['RANK']} has waited {seconds:g} s for all of {os.environ['WORLD_SIZE']} ranks to start and "
        f"meet at {address}, and waits {limit:g} s at most: see whether the others run, with the same MASTER_ADDR and "
        "MASTER_PORT, and whether another program listens there"
    )
    timer = threading.Timer(seconds, print, [line], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if seconds < limit:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _join_store() -> tuple[dist.Store, int, int]:
    """Return the store that all ranks have joined, this rank, and how many there are.

    Raises UsageError where they have not in time.
    """
    store, rank, size = _meet()
    # torchrun may keep one store over restarts, which still has the addresses of dead processes
    store = dist.PrefixStore(restart_prefix(), store)
    store.set(f"versions {rank}", f"{_describe_versions()} on {socket.gethostname()}")
    if not wait_for_all(store, "started", size, _START_TIMEOUT):  # a start may take longer than a collective waits
        raise UsageError(
            f"only {store.add('started', 0)} of {size} ranks started within {_START_TIMEOUT.total_seconds():g} s; "
            "look for the others' errors in the launcher's output"
        )
    return store, rank, size


def _describe_versions() -> str:
    """Return the versions that decide whether ranks understand each other, and compute the same."""
    try:
        own = version("gristmill")
    except PackageNotFoundError:  # a checkout that was not installed
        own = "(not installed)"
    return f"gristmill {own}, torch {torch.__version__}"


def _require_same_versions(of_ranks: Sequence[str]) -> None:
    """Raise UsageError where a rank has other versions than rank 0; each is `VERSIONS on HOST`."""
    first = of_ranks[0]
    expected = first.rpartition(" on ")[0]
    for rank, versions in enumerate(of_ranks):
        if versions.rpartition(" on ")[0] != expected:
            raise UsageError(
                f"rank {rank} has {versions}, and rank 0 has {first}: expected the same on all nodes; install the same "
                "versions, such as by pip install -c constraints.txt"
            )


def _meet() -> tuple[dist.Store, int, int]:
    """Reach the store of all ranks, of which rank 0 is the server unless the launcher is; also this rank, and how many.

    Raises UsageError where nothing can listen or answers at MASTER_ADDR:MASTER_PORT.
    """
    rank = os.environ["RANK"]
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    alone = (
        f"rank {rank} found no other rank at {address}; look for their errors in the launcher's output, and see "
        "whether another program listens there"
    )
    # torch waits without an end for what a program says that takes its connection
    end = threading.Timer(_START_TIMEOUT.total_seconds() * 1.1, _end_process, [alone])
    end.daemon = True
    end.start()
    try:
        return next(dist.rendezvous("env://", timeout=_START_TIMEOUT))
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise UsageError(
                f"rank {rank} cannot listen at {address}, as another program does; try another MASTER_PORT"
            ) from error
        raise UsageError(alone) from error
    finally:
        end.cancel()


def _end_process(message: str) -> None:
    """End the process, whose main thread is stuck, as a user's error does."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    write_error_file(f"error: {message}")
    os._exit(UsageError.exit_code)


def group_timeout(kind: str, timeout: float) -> timedelta:
    """Return how long a collective waits. NCCL aborts the process then: StallWatch must have reported before."""
    return timedelta(seconds=timeout + (_REPORT_SECONDS if kind == "cuda" else 0.0))


def wait_for_all(store: dist.Store, what: str, size: int, timeout: timedelta) -> bool:
    """Wait until every rank says that it is `what`; False if not all of them do in time: one may have failed."""
    if store.add(what, 1) == size:
        store.set(f"all {what}", "")
    try:
        store.wait([f"all {what}"], timeout)
    except dist.DistStoreError:
        return False
    return True
