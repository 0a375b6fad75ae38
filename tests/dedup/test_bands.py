"""The choice of bands equals datasketch's; the plot shows its detection curve."""

from collections.abc import Callable

import numpy as np
import pytest
from datasketch.lsh import _optimal_param
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.bands import Bands, band_parameters, choose_bands, detection
from gristmill.errors import UsageError


def test_the_usual_choice() -> None:
    assert band_parameters(0.8, 128) == Bands(rows=13, bands=9)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 99), st.integers(2, 80), st.sampled_from([0.1, 0.5, 0.8]))
def test_the_choice_is_datasketchs(per_cent: int, permutations: int, weight: float) -> None:
    bands, rows = _optimal_param(per_cent / 100, permutations, weight, 1 - weight)
    assert band_parameters(per_cent / 100, permutations, weight) == Bands(rows, bands)


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9])
def test_datasketchs_choice_for_many_slots(threshold: float) -> None:
    bands, rows = _optimal_param(threshold, 256, 0.5, 0.5)
    assert band_parameters(threshold, 256) == Bands(rows, bands)


def test_detection_is_what_chance_does() -> None:
    chance = np.random.default_rng(0)
    for similarity in (0.5, 0.8, 0.9):
        agree = chance.random((20_000, 14, 8)) < similarity
        found = agree.all(axis=2).any(axis=1).mean()
        assert found == pytest.approx(float(detection(similarity, 8, 14)), abs=0.015)
    assert detection([0, 1], 13, 9).tolist() == [0, 1]


def test_a_weight_moves_the_curve() -> None:
    careful, greedy = band_parameters(0.8, 128, 0.9), band_parameters(0.8, 128, 0.1)
    assert detection(0.8, *careful) < detection(0.8, *band_parameters(0.8, 128)) < detection(0.8, *greedy)


def test_as_many_slots_as_a_signature_may_have() -> None:
    rows, bands = band_parameters(0.8, 4096)
    assert 4000 < rows * bands <= 4096
    assert band_parameters(0.8, 1) == Bands(1, 1)


@pytest.mark.parametrize(
    "bad",
    [{"threshold": 1.5}, {"threshold": float("nan")}, {"permutations": 0}, {"false_positive_weight": -1},
     {"range": 13}, {"bands": 9}, {"range": 13, "bands": 10}, {"range": 0, "bands": 9}],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_chosen(bad: dict) -> None:
    with pytest.raises(UsageError, match="expected"):
        choose_bands(**bad)


@pytest.mark.parametrize("similarity", [-0.1, 2, float("nan"), [0.5, 1.1]])
def test_what_is_no_similarity(similarity: object) -> None:
    with pytest.raises(UsageError, match="expected Jaccard similarities, 0 to 1"):
        detection(similarity, rows=13, bands=9)


def test_the_command_draws_its_choice(run: Callable) -> None:
    shown = run("python dedup/bands.py --threshold 0.8 --permutations 128").stdout
    assert "9 bands of 13 rows" in shown
    assert "--range 13 --bands 9" in shown
    picture = [line.partition("│")[2] for line in shown.splitlines() if "│" in line]
    assert len(picture) == 12
    assert [line.count("█") for line in picture] == sorted(line.count("█") for line in picture)
    assert "39.9 %" in shown
    assert "92.9 %" in shown


def test_the_command_shows_a_choice_of_ones_own(run: Callable) -> None:
    assert "14 bands of 8 rows" in run("python dedup/bands.py --range 8 --bands 14 --permutations 112").stdout
    assert "expected both" in run("python dedup/bands.py --range 8", fails=2).stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"range": 13, "bands": 9, "false_positive_weight": 0.1}, "has no effect on given bands"),
        ({"range": 13, "bands": 9, "permutations": 64}, "at most the 64 permutations"),
    ],
)
def test_options_without_effect_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_bands(**options)
