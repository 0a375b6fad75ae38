"""Call: what an executor runs in a worker process; Executor: the interface of all that run calls."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from gristmill.engine.execution.task_run import TaskRun
from gristmill.engine.task import relocate

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Call:
    """A module-level function and its arguments, which can be pickled for a worker process.

    `task_run` is passed to the function first, if the call runs a task of a stage: an executor gives it the scratch
    folder and the memory of the process that runs it. `foreign` is the name of a user's function that it calls, which
    may end its process. `sets_aside`: it leaves out documents on which workers died, if it is made again.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    foreign: str = ""
    task_run: TaskRun | None = None
    sets_aside: bool = False

    def __call__(self) -> Any:
        if self.task_run is None:
            return self.function(**self.arguments)
        return self.function(self.task_run, **self.arguments)

    def with_absolute_paths(self) -> "Call":
        """Return the call with absolute paths, for a process with another working folder."""
        arguments = relocate(self.arguments, Path.absolute)
        return replace(self, arguments=arguments, task_run=relocate(self.task_run, Path.absolute))


class Calls(Sequence[Call], Generic[_Item]):
    """The calls of `tasks`; each is made by `make` when it is asked for, so that few are in memory at a time."""

    def __init__(self, tasks: Sequence[_Item], make: Callable[[_Item], Call]) -> None:
        self._tasks = tasks
        self._make = make

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return list(map(self._make, self._tasks[at]))
        return self._make(self._tasks[at])


class Executor(Protocol):
    """Runs the calls of a step, wherever that is."""

    @property
    def retried(self) -> int:
        """Return how many tasks were tried again so far, as object storage failed."""

    def run(self, calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
        """Run every call; yield (index in `calls`, result) as each one finishes. Raises the first error."""
