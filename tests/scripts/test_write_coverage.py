"""docs/reference/coverage.md lists what the parity certificate runs."""

import pytest

from gristmill_parity.certificate import plan_certificate
from gristmill_parity.feature_cases import feature_cases
from scripts.write_coverage import COVERAGE, LAYOUTS, coverage


def test_every_case_is_in_one_row() -> None:
    for case in plan_certificate(False, 8).cases:
        assert sum(has(case) for has in LAYOUTS.values()) == 1, case


@pytest.mark.skipif(bool(feature_cases()[1]), reason="some cases cannot run here")
def test_the_page_is_written_from_the_certificate() -> None:
    assert COVERAGE.read_text(encoding="utf-8") == coverage(), "run python scripts/write_coverage.py"
