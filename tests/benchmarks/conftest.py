"""Benchmarks are tools of developers: their tests are thorough ones."""

from pathlib import Path

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what is collected here."""
    if Path(__file__).parent in item.path.parents:
        item.add_marker(pytest.mark.thorough)
