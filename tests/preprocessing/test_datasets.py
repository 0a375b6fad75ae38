"""Weights: what is no weight of a source that is there is refused. (What weights do: test_shuffle_holdout.)"""

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
def test_weights_that_are_none_are_refused(given: str, wanted: str) -> None:
    with pytest.raises(UsageError, match=wanted):
        source_weights(given, ["book", "c4"])


def test_sources_without_a_weight_are_taken_once() -> None:
    assert source_weights("book=0", ["book", "wikipedia", "blogs"]) == {"blogs": 1.0, "book": 0.0, "wikipedia": 1.0}
