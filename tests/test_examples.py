"""The examples in docstrings give the results that they show."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("gristmill", "gristmill_cli", "gristmill_parity", "gristmill_planner", "preprocessing", "dedup", "training")
FILES = [path.relative_to(ROOT) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
MODULES = [
    ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    for path in FILES
    if ">>> " in (ROOT / path).read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module: str) -> None:
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted and not results.failed
