"""TemporaryFiles: which tasks write the temporary files of a run, and which must run again as a file is needed."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gristmill.engine.staleness.done_tasks import DoneTasks, with_rejects
from gristmill.engine.task import Task, paths_read_by
from gristmill.paths import name_of


class TemporaryFiles:
    """Files that are removed at the end of a run, and the tasks that write them.

    A task of a later run may need such a file once more.

    `list_folders` lists the folders of some files, before they are looked for.
    """

    def __init__(self, done: DoneTasks, list_folders: Callable[[Iterable[Path]], None]) -> None:
        self.done = done
        self.list_folders = list_folders
        self._writers: dict[str, tuple[str, Task]] = {}  # step and task, by name of the file

    def add(self, step: str, task: Task) -> None:
        """Remember the temporary files that a task writes."""
        temporary = [name_of(path) for path in task.outputs if self.done.is_temporary(path)]
        for name in with_rejects(temporary):
            self._writers[name] = (step, task)

    def missing_for(self, tasks: Sequence[Task]) -> dict[str, list[Task]]:
        """Return the tasks by step, in order, that must write again what `tasks` need, and what the writers need."""
        needed: dict[str, dict[str, Task]] = {}
        while tasks:
            writers = list[Task]()
            temporary = [path for path in paths_read_by(tasks) if name_of(path) in self._writers]
            self.list_folders(temporary)
            for path in temporary:
                step, task = self._writers[name_of(path)]
                tasks_of_step = needed.setdefault(step, {})
                if task.name not in tasks_of_step and not self.done.is_present(path):
                    tasks_of_step[task.name] = task
                    writers.append(task)
            tasks = writers
        steps = dict.fromkeys(step for step, _ in self._writers.values())
        return {step: list(needed[step].values()) for step in steps if needed.get(step)}
