"""Command: write one HTML page of a run, of data or of training, for a browser, without network."""

from pathlib import Path

from rich.text import Text
from tyro.conf import Positional

from gristmill.errors import UsageError, require
from gristmill.paths import spell_urls
from gristmill.storage.files import is_folder, write_file
from gristmill_cli.report.data import sections
from gristmill_cli.report.page import page
from gristmill_cli.report.records import read_data_run
from gristmill_cli.report.training import training_sections
from gristmill_cli.report.training_records import is_training_run, read_training_runs
from gristmill_cli.run_config import is_data_run


def report(runs: Positional[tuple[Path, ...]], out: Path | None = None) -> Text:
    """Write one HTML page about a run of the data pipeline or about training runs: alarms first, then its records.

    For data: where documents went, duplicates, tokens, times and options. For training: losses, learning rate, norms,
    speed, memory, pipeline schedule and sampled texts; several runs share the same plots. The page is one file that
    needs no network and has no script. The same records give the same bytes.

    Args:
        runs: The --out of a `gristmill run`, finished or not, or the --out_dir of training runs; also
            s3://bucket/folder.
        out: The page to write; by default report.html in the folder of the run, or of several runs comparison.html in
            that of the first.

    Raises:
        UsageError: a folder is not of a run, or matplotlib is not installed.
    """
    require(bool(runs), "expected the folder of a run, got none; try gristmill report OUT")
    first = runs[0]
    file = "report.html"
    if len(runs) > 1:  # a comparison leaves the first run's own page as it is
        file = "comparison.html"
    target = out or first / file
    if is_training_run(first) or len(runs) > 1:
        training_runs = read_training_runs(runs)
        title = first.resolve().name
        if len(runs) > 1:
            title = ", ".join(run.name for run in training_runs)
        write_file(target, page(f"gristmill: {title}", training_sections(training_runs, title)))
    elif is_data_run(first):
        write_file(target, page(f"gristmill: {first.name}", sections(read_data_run(first))))
    else:
        require(is_folder(first), f"{first}: there is no such folder; expected the folder of a run")
        raise UsageError(
            f"{first}: expected the --out of a gristmill run, got no run.json of one in it, or the --out_dir of a "
            f"training run, got no metrics.jsonl; try gristmill status {first}"
        )
    return Text(spell_urls(f"report: {target}"))
