"""Planted faults: a case of the certificate is run with one, in every rank, and must turn red for the right reason."""

import math
from collections.abc import Callable
from functools import partial

import pytest

from gristmill_parity.cases import Case
from gristmill_parity.comparison import Certifier
from gristmill_parity.worker import RankResult, run_case
from training.distributed.rank_pool import RankPool

Fault = Callable[[pytest.MonkeyPatch], None]


def run_with_fault(fault: Fault, chosen: Case) -> RankResult:
    """What a rank does: run the case with the fault."""
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        return run_case(chosen)


def require_finite_difference(rank_pool: RankPool, fault: Fault, chosen: Case, seen_in: str) -> None:
    """The row must be red by a finite difference in `seen_in`, loss or gradient."""
    result = Certifier(rank_pool, partial(run_with_fault, fault)).certify(chosen)
    assert not result.error, result.error  # a fault that raises proves nothing about the comparison
    assert not result.passed and 1e-6 < result.differences[seen_in] < math.inf, result.reason
    assert seen_in in result.reason
