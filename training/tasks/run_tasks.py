"""Tasks of lm_eval on a checkpoint: found by name or file, run, and reported."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gristmill.errors import UsageError, require
from gristmill.wording import count_of
from training.language_model import LanguageModel
from training.tasks.harness import require_lm_eval

Scores = dict[str, dict[str, float]]


def run_tasks(
    model: LanguageModel, tasks: Sequence[str], folder: Path | None, limit: int, fewshot: int | None, batch_size: int
) -> Scores:
    """Return the metrics of each task, and its `items`, on the first rank of a machine; every rank calls it.

    `tasks`: names of lm_eval's tasks, or of those in `folder`, or .yaml files. `limit`: items of each, from the first;
    0: all. Raises UsageError for a task that is not known, or whose data cannot be read.
    """
    require_lm_eval("--tasks")
    with _quiet():
        from lm_eval import evaluator, simple_evaluate
        from lm_eval.tasks import TaskManager

        from training.tasks.lm_eval_model import GristmillLM

        files = [Path(task) for task in tasks if task.endswith(".yaml")]
        missing = [file for file in files if not file.is_file()]
        require(not missing, f"{missing[:1]}: there is no such file; expected a task of lm_eval")
        folders = [str(path) for path in dict.fromkeys([*([folder] if folder else []), *(f.parent for f in files)])]
        names = [_name_in(Path(task)) if Path(task) in files else task for task in tasks]
        manager = TaskManager(include_path=folders or None, include_defaults=False)
        if any(name not in manager.all_tasks for name in names):
            manager = TaskManager(include_path=folders or None)  # all of lm_eval's, which takes seconds
        unknown = [name for name in names if name not in manager.all_tasks]
        require(
            not unknown,
            f"tasks has {unknown[0] if unknown else ''}, which lm_eval does not know; expected one of its tasks, the "
            "name of a task in --task_folder, or a .yaml file",
        )
        evaluator.get_git_commit_hash = lambda: None  # git would say that this folder is no repository
        with _data_errors(names):
            found = simple_evaluate(
                GristmillLM(model, batch_size),
                tasks=names,
                num_fewshot=fewshot,
                limit=limit or None,
                task_manager=manager,
                log_samples=False,
                bootstrap_iters=0,
            )
    if found is None:  # lm_eval gives results to the first rank alone
        return {}
    return {name: _metrics(values, found["n-samples"].get(name)) for name, values in found["results"].items()}


def report_lines(scores: Scores) -> list[str]:
    """A line for each task: its metrics, and its number of items."""
    lines = []
    for name, metrics in scores.items():
        values = [f"{metric} {value:.4f}" for metric, value in metrics.items() if metric != "items"]
        lines.append(f"{name}: {', '.join(values)} ({count_of(int(metrics['items']), 'item')})")
    return lines


def _name_in(file: Path) -> str:
    """The name of the task in a .yaml file."""
    from lm_eval.tasks._yaml_loader import load_yaml
    from yaml import YAMLError

    try:
        name = load_yaml(file, resolve_func=False).get("task")
    except (YAMLError, ValueError, AttributeError) as error:
        first = " ".join(str(error).split())
        raise UsageError(f"{file} is no task of lm_eval ({first:.200}); expected YAML with task: NAME") from error
    require(isinstance(name, str), f"{file} names no task; expected task: NAME")
    return str(name)


def _metrics(values: dict[str, Any], counts: dict[str, int] | None) -> dict[str, float]:
    """Numbers by metric; lm_eval's "acc,none" is that of the filter "none"."""
    numbers = {
        name.removesuffix(",none"): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and "_stderr" not in name and math.isfinite(value)
    }
    numbers.pop("sample_len", None)
    return numbers | {"items": (counts or {}).get("effective", 0)}


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out notes of lm_eval."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _data_errors(names: Sequence[str]) -> Iterator[None]:
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
