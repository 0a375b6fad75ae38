"""Processes that a user's function starts: what would hold up the end of a stage, or read its documents, is refused."""

import mmap
import multiprocessing
import os
import time
from types import TracebackType
from typing import Self

from gristmill.errors import UsageError

_SECONDS = 0.2  # in which a process that was forked during the call may come back from the function
_forks = [0]  # how often this process was forked; Python calls the hook to its end
os.register_at_fork(after_in_parent=lambda: _forks.append(_forks.pop() + 1))


class ChildProcesses:
    """Context: a call of the function `name`, and the processes that it starts.

    Raises UsageError at its end if one of them is a copy of this process that went on with the task, or is neither
    ended nor a daemon, so that Python would wait for it at the end of this process; such processes are ended.
    """

    def __init__(self, name: str) -> None:
        self.name, self.pid, self.forks = name, os.getpid(), _forks[0]
        self.before = set(multiprocessing.active_children())
        self._copied = mmap.mmap(-1, 1)  # shared with copies of this process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end_copy()
        left = [child for child in multiprocessing.active_children() if not child.daemon and child not in self.before]
        for child in left:
            child.kill()
            child.join()
        if kind is None and self._has_copy():
            raise UsageError(
                f"{self.name} forked this process, and the copy read or yielded documents, too: only the process in "
                "which the function is called may. End the copy by os._exit(), or give texts to a multiprocessing.Pool"
            )
        if kind is None and left:
            raise UsageError(
                f"{self.name} left {len(left)} of its processes running, and the stage would wait for them: end them "
                "before it returns, as `with` does for a pool, or start them with daemon=True"
            )

    def end_copy(self) -> None:
        """End this process if it is a copy: it shares the open files of the task, and the pipe to the driver."""
        if os.getpid() != self.pid:
            self._copied[0] = 1
            os._exit(1)

    def _has_copy(self) -> bool:
        end = time.monotonic() + _SECONDS * (_forks[0] > self.forks)
        while not self._copied[0] and time.monotonic() < end:
            time.sleep(0.01)
        return bool(self._copied[0])
