"""ExecutionContext: the executor of a stage's tasks, or of all stages of a run, its scratch folder and its lock."""

import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gristmill.engine.execution.call import Executor
from gristmill.engine.execution.local import LocalExecutor
from gristmill.engine.execution.progress import log_seconds
from gristmill.engine.execution.shards import shard_executor
from gristmill.engine.execution.staging import Scratch, open_scratch
from gristmill.engine.execution.task_queue import TaskQueue
from gristmill.engine.options import RunOptions
from gristmill.errors import UsageError
from gristmill.storage.files import list_names, remove_files, write_file
from gristmill.storage.lock import lease_seconds, stage_lock
from gristmill.storage.stores import store_of


class ExecutionContext(NamedTuple):
    """An executor, its scratch space, and a function that raises OutputError if the lock was lost.

    `dead` has processes whose locks were taken over when this one got its own: see Lease.
    """

    executor: Executor
    scratch: Scratch
    check_lock: Callable[[], None]
    dead: set[str]


@contextmanager
def open_execution_context(options: RunOptions, lock: Path, work: str = "") -> Iterator[ExecutionContext]:
    """Context: hold the lock of a stage or a run, and have what its options ask for.

    With --shard this process helps others that do the same `work` while it waits. Raises FinishedElsewhere if they have
    finished it, UsageError if they have other versions, or if a time in the environment is none.
    """
    for read in (lease_seconds, log_seconds):
        read()  # a wrong one is refused at once: the first use may be in the middle of the work
    if _is_importing_script():
        raise UsageError(
            "a worker process imports the script that called a stage, and would call it again: call it under "
            "`if __name__ == '__main__':`"
        )
    run = options.of_run
    if run:
        scratch = run.scratch
        if isinstance(run.executor, LocalExecutor):
            scratch = scratch.with_heartbeat(lock)
        with stage_lock(lock, options.quiet, dead=run.dead, heartbeat=scratch.heartbeat) as check:
            yield run._replace(check_lock=check, scratch=scratch)
        return
    dead = set[str]()
    acquire = partial(stage_lock, lock, options.quiet, dead=dead)
    with ExitStack() as stack:
        is_private = bool(options.shard) or options.executor == "ray"
        near: Path | None = None
        folder = options.scratch
        if not store_of(lock).needs_copies:
            near = lock.with_suffix(".scratch")  # outputs are renamed from there, not copied
            stack.callback(_remove_empty, near)
            if is_private:
                folder = folder or near
        scratch = stack.enter_context(open_scratch(folder, options.scratch_bytes, is_private))
        sweep = partial(shutil.rmtree, near or "", ignore_errors=True)  # with what killed processes left
        queue = TaskQueue(lock.with_suffix(".queue"))
        executor: Executor
        if options.shard:
            local = stack.enter_context(LocalExecutor(options.processes))
            executor = team = stack.enter_context(shard_executor(local, queue.folder, options, work, scratch))
            check = stack.enter_context(acquire(while_waiting=team.help))
            team.reject_finished()
            stack.callback(sweep)
            stack.enter_context(team.in_charge())
        elif options.executor == "ray":
            from gristmill.engine.execution.ray import NodeScratch, ray_executor  # an optional dependency

            check = stack.enter_context(acquire())
            queue.close()
            stack.callback(sweep)
            fence = stack.enter_context(_fence(lock))
            copies = NodeScratch(secrets.token_hex(8), folder and folder.absolute(), options.scratch_bytes, fence)
            executor = stack.enter_context(ray_executor(options.address, options.memory_per_worker, copies))
        else:
            worker_lock = lock if store_of(lock).has_file_locks else None  # orphans do no harm if outputs are staged
            executor = stack.enter_context(LocalExecutor(options.processes, worker_lock))
            scratch = scratch.with_heartbeat(lock)
            check = stack.enter_context(acquire(heartbeat=scratch.heartbeat))
            queue.close()
            stack.callback(sweep)
        yield ExecutionContext(executor, scratch, check, dead)


@contextmanager
def _fence(lock: Path) -> Iterator[Path]:
    """Context: a file that is there as long as the process with the lock is in charge: late tasks of others see it."""
    folder = lock.parent.absolute()
    name = f"{lock.name}.fence-"
    fence = folder / f"{name}{secrets.token_hex(8)}"
    remove_files(folder / left for left in list_names(folder) if left.startswith(name))
    write_file(fence, b"")
    try:
        yield fence
    finally:
        remove_files([fence])


def _is_importing_script() -> bool:
    """Return whether this is a worker process that is importing, as `__mp_main__`, the script that has started it."""
    script = sys.modules.get("__mp_main__")
    is_worker = script is not None and script.__name__ == "__mp_main__"  # else it is a name of the driver's own script
    return is_worker and script is not sys.modules["__main__"]


def _remove_empty(folder: Path) -> None:
    """Remove a folder if it is there and nothing is in it."""
    with suppress(OSError):
        folder.rmdir()
