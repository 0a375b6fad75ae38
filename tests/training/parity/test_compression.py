"""Rows of the certificate with compressed gradients: PowerSGD sends a gradient of low rank in full."""

import pytest

from tests.training.planted_faults import require_finite_difference
from training.distributed.rank_pool import RankPool
from training.parallel.compression.powersgd import PowerSGD
from training.parity.comparison import Certifier
from training.parity.feature_cases import _compression_cases, feature_case

(PRESET, LAYOUT, OPTIONS), _ = _compression_cases()
ROW = feature_case(PRESET, LAYOUT, **OPTIONS)


def test_powersgd_of_a_low_rank_gradient_is_an_all_reduce(rank_pool: RankPool) -> None:
    row = Certifier(rank_pool).certify(ROW)
    assert row.passed, row.reason


def own_sums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PowerSGD, "_sum", lambda self, parts: [part / 2 for part in parts])


def test_sums_that_are_not_of_all_turn_a_row_red(rank_pool: RankPool) -> None:
    require_finite_difference(rank_pool, own_sums, ROW, "gradient")
