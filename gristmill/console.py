"""Console on standard output, for tables: its errors are one line, and a reader that has ended ends the program."""

import sys
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table

from gristmill.errors import OutputError, wrap_write_errors
from gristmill.processes import discard_output


class OutputConsole(Console):
    """Console whose errors are an OutputError, or the end of the program if its reader has ended."""

    def print(self, *objects: Any, **options: Any) -> None:
        parts = list[Any]()
        for item in objects:
            if isinstance(item, Group):
                parts += item.renderables
            else:
                parts.append(item)
        wide = self.options.update(width=10_000)
        for part in parts:
            if isinstance(part, Table):  # rather than cut a number: the terminal breaks its lines
                self.width = max(self.width, Measurement.get(self, wide, part).minimum)
        try:
            with wrap_write_errors(Path("standard output")):
                super().print(*objects, **options)
        except OutputError:
            discard_output()
            raise

    def on_broken_pipe(self) -> None:
        discard_output()
        sys.exit(0)  # the reader, such as `head`, has read enough


def wide_console() -> Console:
    """Return a console on standard output; 160 columns wide if that is no terminal, so that tables are not cut."""
    if sys.stdout is not None and sys.stdout.isatty():  # None: closed, as by `>&-`
        return OutputConsole(soft_wrap=True)
    return OutputConsole(soft_wrap=True, width=160)
