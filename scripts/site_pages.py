"""Pages of the site that are made when it is built: the help of all commands. A hook, named in mkdocs.yml."""

import contextlib
import io
import os
import re
import sys
import textwrap
from pathlib import Path
from unittest import mock

from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Append the help of all commands to their page."""
    if page.file.src_uri != "reference/commands.md":
        return markdown
    sys.path.insert(0, str(ROOT))
    from gristmill_cli.__main__ import GROUPS

    lines = [markdown]
    for title, commands in GROUPS.items():
        lines += ["", f"## {title.capitalize()}"]
        for name in commands:
            lines += ["", f"### gristmill {name}", "", "```text", _help(name), "```"]
    return "\n".join(lines)


def _help(name: str) -> str:
    """The help of a command, without colours and boxes; made in this process, as one for each takes half a minute."""
    from gristmill_cli.__main__ import main

    said = io.TextIOWrapper(io.BytesIO(), "utf-8")
    with (
        mock.patch.dict(os.environ, COLUMNS="88"),
        mock.patch.object(sys, "argv", ["gristmill", name, "--help"]),
        contextlib.redirect_stdout(said),
    ):
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"gristmill {name} --help ended with {end.code}") from end
    said.seek(0)
    kept = (line.strip("│").rstrip() for line in said.read().splitlines() if not line.startswith("╰"))
    lines = (line.strip("╭╮─ ").upper() if line.startswith("╭") else line for line in kept)
    wrapped = (textwrap.fill(line, 86) if line[:1].strip() else line for line in lines)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(wrapped)).strip()
