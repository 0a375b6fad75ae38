"""Scores of single items of lm_eval's tasks, with the texts of each: a JSON line for each item.

What knows the training text reads them, and says which items are in it (gristmill contamination).
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gristmill.errors import InputError, UsageError, wrap_read_errors
from gristmill.storage.local import atomic_write_bytes


class ItemScore(msgspec.Struct):
    """An item of a task: its number there, its texts, and its value in each metric.

    `texts` are the fields of the item's record that its question or right answer contains. `aggregations` says for each
    metric by which of lm_eval's functions a task's score is made of all values.
    """

    task: str
    item: int
    texts: list[str]
    metrics: dict[str, Any]
    aggregations: dict[str, str]


def item_scores(results: dict[str, Any]) -> Iterator[ItemScore]:
    """Yield the items of lm_eval's results, which have samples. A filter's metrics are named `metric,filter`."""
    for task, samples in results["samples"].items():
        aggregations = _aggregations(results["configs"][task])
        items = dict[int, ItemScore]()
        for sample in samples:
            number = sample["doc_id"]
            if number not in items:
                items[number] = ItemScore(task, number, _texts(sample), {}, {})
            suffix = "" if sample["filter"] == "none" else f",{sample['filter']}"
            for metric in sample["metrics"]:
                if metric in aggregations:
                    items[number].metrics[metric + suffix] = sample[metric]
                    items[number].aggregations[metric + suffix] = aggregations[metric]
        yield from items.values()


def _aggregations(config: dict[str, Any]) -> dict[str, str]:
    """Return by metric the name of the function that makes the task's score; none for functions of the task's own."""
    from lm_eval.api.registry import AGGREGATION_REGISTRY, get_metric_aggregation

    names = {function: name for name, function in AGGREGATION_REGISTRY.items()}
    aggregations = dict[str, str]()
    for entry in config.get("metric_list") or []:
        metric = str(entry["metric"])
        given = entry.get("aggregation")
        name = given if isinstance(given, str) else names.get(given or get_metric_aggregation(metric))
        if name:
            aggregations[metric] = name
    return aggregations


def _texts(sample: dict[str, Any]) -> list[str]:
    """Return the fields of an item's record that its question or right answer contains, each once."""
    asked = [str(sample["target"])]
    for arguments in _right_arguments(sample):
        asked += [argument for argument in arguments if isinstance(argument, str)]
    fields = dict.fromkeys(_strings(sample["doc"]))
    return [text for text in fields if text.strip() and any(text.strip() in part for part in asked)]


def _right_arguments(sample: dict[str, Any]) -> list[Any]:
    """Return what the model is asked of the right answer; all that it is asked where none is known as the right one."""
    arguments: list[Any] = list(sample["arguments"])
    target = sample["target"]
    if isinstance(target, int) and 0 <= target < len(arguments):
        return [arguments[target]]
    of_target = [each for each in arguments if len(each) > 1 and str(each[1]).strip() == str(target).strip()]
    return of_target or arguments


def _strings(value: Any) -> Iterator[str]:
    """Yield all texts in a record, in lists and records within it, too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)


def write_item_scores(path: Path, items: Iterable[ItemScore]) -> None:
    """Write items, a JSON line for each."""
    encoder = msgspec.json.Encoder(enc_hook=_plain_number)
    atomic_write_bytes(path, b"".join(encoder.encode(item) + b"\n" for item in items))


def _plain_number(value: Any) -> Any:
    """Return a number of numpy, as some of lm_eval's metrics are, as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} in an item's scores")


def read_item_scores(path: Path) -> list[ItemScore]:
    """Read items. Raises UsageError where there is no such file or no item in it, InputError where one is damaged."""
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file; make it with gristmill evaluate --tasks … --items {path}")
    with wrap_read_errors(path):
        lines = path.read_bytes().splitlines()
    items = list[ItemScore]()
    for number, line in enumerate(lines, 1):
        try:
            items.append(msgspec.json.decode(line, type=ItemScore))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(
                f"{path}:{number}: expected an item that gristmill evaluate --items wrote, got {line[:40]!r} ({error})"
            ) from error
    if not items:
        raise UsageError(f"{path} is empty; make it with gristmill evaluate --tasks … --items {path}")
    return items


def aggregate(items: Iterable[ItemScore]) -> dict[str, float]:
    """Return the score of some items of one task in each metric, as lm_eval computes it; {} of no items."""
    from lm_eval.api.registry import get_aggregation

    values = dict[str, list[Any]]()
    aggregations = dict[str, str]()
    for item in items:
        for metric, value in item.metrics.items():
            values.setdefault(metric, []).append(value)
            aggregations[metric] = item.aggregations[metric]
    scores = dict[str, float]()
    for metric, name in aggregations.items():
        function = get_aggregation(name)
        if function is not None:
            scores[metric] = float(function(values[metric]))
    return scores
