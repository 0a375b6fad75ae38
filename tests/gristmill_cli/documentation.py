"""README and docs/: their commands, and a shell that runs these as a reader would."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

from tests.gristmill_cli.corpus import ROOT

DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")}
PAGES["README.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
ENTER = ". .venv/bin/activate\n"


def commands(page: str) -> list[str]:
    """The shell commands of a page, block by block."""
    return re.findall(r"```bash\n(.*?)```", PAGES[page], re.DOTALL)


def examples(page: str) -> list[str]:
    """The Python examples of a page."""
    return re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)


def shell(script: str, on_one_core: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a block from the project's root in this environment, and stop at its first error.

    `on_one_core`: commands work in their own processes, and start no workers.
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script.removeprefix(ENTER)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=_take_one_core if on_one_core else None,
    )


def _take_one_core() -> None:
    os.sched_setaffinity(0, {random.choice(list(os.sched_getaffinity(0)))})
