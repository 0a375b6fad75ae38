"""The project's layout: layers, sizes of folders and files, what a module's first line says."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "gristmill",
    "gristmill_cli",
    "gristmill_parity",
    "gristmill_planner",
    "preprocessing",
    "dedup",
    "training",
    "benchmarks",
)
FILES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
LINES, FILES_IN_A_FOLDER = 450, 20


def test_imports_follow_the_layers() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_folders_are_small() -> None:
    sizes = Counter(path.parent for path in FILES if path.name != "__init__.py" and path.parts[0] != "benchmarks")
    assert {str(folder): size for folder, size in sizes.items() if size > FILES_IN_A_FOLDER} == {}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_file_is_short_and_says_what_it_is(path: Path) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    assert source.count("\n") <= LINES
    first = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    assert first.endswith((".", ":")), f"{path} does not begin with one sentence that says what it is: {first!r}"
