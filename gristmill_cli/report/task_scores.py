"""Section of a report on the scores in tasks that `gristmill evaluate RUN --tasks … --out RUN/scores.json` wrote."""

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from gristmill_cli.report.page import NOTHING, Number, Row, paragraph, pointer, section, table
from gristmill_cli.report.training_records import SCORES, TrainingRun

_NOTE = f"What gristmill evaluate wrote to {SCORES}, of the checkpoint that was the last one then."


def show_scores(runs: Sequence[TrainingRun]) -> Markup:
    """Return the section: a row for each metric of each task of each run."""
    rows = list[Row]()
    for run in runs:
        rows += _rows(run)
    if not rows:
        return NOTHING
    return section("Scores in tasks", paragraph(_NOTE, "soft"), table(["", "metric", "score", "items"], rows, "scores"))


def _rows(run: TrainingRun) -> Iterator[Row]:
    file = run.file_name(SCORES)
    for task, metrics in run.scores.items():
        items = Number(int(metrics["items"]), record=pointer(file, task, "items"))
        for metric, value in metrics.items():
            if metric != "items" and isinstance(value, int | float):
                score = Number(value, f"{value:.4f}", pointer(file, task, metric))
                yield [run.titled(task), metric, score, items]
