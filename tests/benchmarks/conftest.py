"""Benchmarks are tools of developers: their tests are thorough ones."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what is collected in this folder."""
    item.add_marker(pytest.mark.thorough)
