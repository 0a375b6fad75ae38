"""Tasks of lm_eval: found by name, in a folder, or as files."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gristmill.errors import UsageError, require
from training.tasks.harness import require_lm_eval

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


def find_tasks(tasks: Sequence[str], folder: Path | None) -> tuple["TaskManager", list[str]]:
    """Return a manager that knows the tasks, and their names.

    `tasks`: names of lm_eval's tasks, or of those in `folder`, or .yaml files. Raises UsageError for one that is none.
    """
    require_lm_eval("--tasks")
    from lm_eval.tasks import TaskManager

    files = [Path(task) for task in tasks if task.endswith(".yaml")]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise UsageError(f"{missing[0]}: there is no such file; expected a task of lm_eval")
    folders = [str(path) for path in dict.fromkeys([*([folder] if folder else []), *(f.parent for f in files)])]
    names = [_name_in(Path(task)) if Path(task) in files else task for task in tasks]
    manager = TaskManager(include_path=folders or None, include_defaults=False)
    if any(name not in manager.all_tasks for name in names):
        manager = TaskManager(include_path=folders or None)  # all of lm_eval's, which takes seconds
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise UsageError(
            f"tasks has {unknown[0]}, which lm_eval does not know; expected one of its tasks, the name of a task in "
            f"--task_folder, or a .yaml file{_advice(unknown[0], manager.all_tasks)}"
        )
    return manager, names


def _advice(unknown: str, tasks: Sequence[str]) -> str:
    """Return what may have been meant by a task that there is not."""
    if Path(unknown).is_dir():
        return f"; {unknown} is a folder: give it by --task_folder, and names of its tasks"
    similar = get_close_matches(unknown, tasks, 1)
    return f"; did you mean {similar[0]}?" if similar else ""


def _name_in(file: Path) -> str:
    """Return the name of the task in a .yaml file."""
    from lm_eval.tasks._yaml_loader import load_yaml
    from yaml import YAMLError

    try:
        name = load_yaml(file, resolve_func=False).get("task")
    except (YAMLError, ValueError, AttributeError) as error:
        first = " ".join(str(error).split())
        raise UsageError(f"{file} is no task of lm_eval ({first:.200}); expected YAML with task: NAME") from error
    require(isinstance(name, str), f"{file} names no task; expected task: NAME")
    return str(name)


def find_gold(name: str, task: Any, doc: Any, count: int) -> int:
    """Return the number of an item's right answer, of `count` ones. Raises UsageError where it has none."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return 0
    target = task.doc_to_target(doc)
    first = target[0] if isinstance(target, list) and target else target
    if isinstance(first, str) and not first.isdigit():
        choices = task.doc_to_choice(doc)
        first = choices.index(first) if first in choices else -1
    gold = int(first) if isinstance(first, int | float | str) else -1
    if not 0 <= gold < count:
        raise UsageError(f"task {name} has an item without a right answer ({target!r}); expected one of its choices")
    return gold


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out notes of lm_eval, and progress bars of its data where nobody watches."""
    require_lm_eval("--tasks")
    import datasets

    logger = logging.getLogger("lm_eval")
    before = logger.level
    shows_bars = not datasets.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(before)
        if shows_bars:
            datasets.enable_progress_bars()


@contextmanager
def data_errors(names: Sequence[str]) -> Iterator[None]:
    """Say in one sentence that the data of a task cannot be read."""
    try:
        yield
    except (OSError, ValueError) as error:  # of datasets: no such file, no network, no such split
        if isinstance(error, UsageError):
            raise
        first = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"the data of tasks {', '.join(names)} cannot be read ({type(error).__name__}: {first:.200}); expected "
            "files that are there, or a data set of the Hub that can be reached"
        ) from error
