"""Tasks of lm_eval on a checkpoint: found by name or file, run, and reported."""

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from gristmill.wording import count_of
from training.language_model import LanguageModel
from training.tasks.find_tasks import data_errors, find_gold, find_tasks, quiet
from training.tasks.item_scores import item_scores, write_item_scores

Scores = dict[str, dict[str, float]]


def run_tasks(
    model: LanguageModel,
    tasks: Sequence[str],
    folder: Path | None,
    limit: int,
    fewshot: int | None,
    batch_size: int,
    items: Path | None = None,
) -> Scores:
    """Return the metrics of each task, and its `items`, on the first rank of a machine; every rank calls it.

    `tasks`: names of lm_eval's tasks, or of those in `folder`, or .yaml files. `limit`: items of each, from the first;
    0: all. `items` is a file for the scores of single items. Raises UsageError for a task that is not known, or whose
    data cannot be read.
    """
    with quiet():
        from lm_eval import evaluator, simple_evaluate

        from training.tasks.lm_eval_model import GristmillLM

        manager, names = find_tasks(tasks, folder)
        evaluator.get_git_commit_hash = lambda: None  # git would say that this folder is no repository
        with data_errors(names):
            loaded = manager.load(names)
            _require_golds(loaded["tasks"], limit)
            manager.load = lambda *_: loaded  # which would read all data again
            results = simple_evaluate(
                GristmillLM(model, batch_size),
                tasks=names,
                num_fewshot=fewshot,
                limit=limit or None,
                task_manager=manager,
                log_samples=items is not None,
                bootstrap_iters=0,
            )
    if results is None:  # lm_eval gives results to the first rank alone
        return {}
    if items is not None:
        write_item_scores(items, item_scores(results))
    return {name: _metrics(values, results["n-samples"].get(name)) for name, values in results["results"].items()}


def _require_golds(tasks: Mapping[str, Any], limit: int) -> None:
    """Raise UsageError for an item without a right answer, which lm_eval would count as answered wrongly."""
    for name, task in tasks.items():
        if task.OUTPUT_TYPE != "multiple_choice" or task.multiple_input or callable(task.config.process_results):
            continue  # their right answers are elsewhere
        for doc in islice(task.eval_docs, limit or None):
            find_gold(name, task, doc, len(task.doc_to_choice(doc)))


def report_lines(scores: Scores) -> list[str]:
    """Return a line for each task: its metrics, and its number of items."""
    lines = []
    for name, metrics in scores.items():
        values = [f"{metric} {value:.4f}" for metric, value in metrics.items() if metric != "items"]
        lines.append(f"{name}: {', '.join(values)} ({count_of(int(metrics['items']), 'item')})")
    return lines


def _metrics(values: dict[str, Any], counts: dict[str, int] | None) -> dict[str, float]:
    """Return the numbers by metric; lm_eval's "acc,none" is that of the filter "none"."""
    numbers = {
        name.removesuffix(",none"): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and "_stderr" not in name and math.isfinite(value)
    }
    numbers.pop("sample_len", None)
    return numbers | {"items": (counts or {}).get("effective", 0)}
