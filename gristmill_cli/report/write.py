"""Command: write one HTML page of a run, for a browser, without network."""

from pathlib import Path

from rich.text import Text
from tyro.conf import Positional

from gristmill.errors import UsageError
from gristmill.storage.files import write_file
from gristmill.urls import spell_urls
from gristmill_cli.report.data import sections
from gristmill_cli.report.page import page
from gristmill_cli.report.records import is_data_run, read_data_run


def report(run: Positional[Path], out: Path | None = None) -> Text:
    """Write one HTML page of a run: warnings, where documents went, what is alike, tokens, times and options.

    The page is one file that needs no network and has no script. The same records give the same bytes.

    Args:
        run: The --out of a `gristmill run`, finished or not; also s3://bucket/folder.
        out: The page; by default RUN/report.html.

    Raises:
        UsageError: the folder is not of a run, or matplotlib is not installed.
    """
    if not is_data_run(run):
        raise UsageError(
            f"{run}: expected the --out of a gristmill run, got no run.json of one in it; try gristmill status {run}"
        )
    target = out or run / "report.html"
    found = read_data_run(run)
    write_file(target, page(f"gristmill: {run.name}", sections(found)))
    return Text(spell_urls(f"report: {target}"))
