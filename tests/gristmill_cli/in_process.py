"""A command of `gristmill` without a process of its own, which takes seconds to import torch."""

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest

from gristmill_cli.__main__ import main


def gristmill(*words: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process; return its exit code and what it printed.

    `environment`: variables that are read when the command runs, not when its modules are imported.
    """
    arguments = ["gristmill", *map(str, words)]
    output = io.StringIO()
    errors = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        patch.setattr(sys, "argv", arguments)
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())
