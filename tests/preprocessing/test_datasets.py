"""Weights: parsing and errors. (Their effect: test_shuffle_holdout.)"""

import pytest

from gristmill.errors import UsageError
from preprocessing.datasets import source_weights


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("boook=2", "names boook: the corpus has the sources book, c4"),
        ("book=-1", "0 or more"),
        ("book=nan", "0 or more"),
        ("book=inf", "0 or more"),
        ("book", "source=epochs"),
        ("book=two", "source=epochs"),
        ("none.toml", "wanted a TOML file"),
    ],
)
def test_invalid_weights_are_rejected(given: str, wanted: str) -> None:
    with pytest.raises(UsageError, match=wanted):
        source_weights(given, ["book", "c4"])


def test_sources_without_a_weight_get_one_epoch() -> None:
    assert source_weights("book=0", ["book", "wikipedia", "blogs"]) == {"blogs": 1.0, "book": 0.0, "wikipedia": 1.0}
