"""Fixture: the input of the small stage."""

from pathlib import Path

import pytest


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of the files a, b and c."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "abc":
        (folder / name).write_text(f"text {name}\n")
    return folder
