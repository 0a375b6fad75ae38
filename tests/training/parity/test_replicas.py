"""Rows of the certificate of several steps with compressed gradients and local steps, and the faults that they notice.

The rows themselves run in test_independent.py, with all that have an independent reference.
"""

import pytest

from gristmill_parity.feature_cases import _replica_cases, feature_case
from tests.training.planted_faults import Fault, require_finite_difference
from training.distributed.rank_pool import RankPool
from training.experimental.compression import powersgd
from training.experimental.compression.bucket import CompressedBucket
from training.experimental.compression.int8 import Int8Sum
from training.experimental.local_steps import replicas
from training.experimental.local_steps.outer_optimizer import OuterOptimizer

POWERSGD, INT8, LOCAL = (feature_case(preset, layout, **options) for preset, layout, options in _replica_cases(False))
CASES = {"powersgd": POWERSGD, "int8": INT8, "local steps": LOCAL}
Patch = pytest.MonkeyPatch


def own_sums(patch: Patch) -> None:
    patch.setattr(powersgd, "all_reduce_as_one", lambda qs, group: [q.div_(2) for q in qs])


def memories_lost(patch: Patch) -> None:
    keep = CompressedBucket.keep

    def forgetful(self: CompressedBucket) -> None:
        keep(self)
        for error in self.errors.values():
            error.zero_()

    patch.setattr(CompressedBucket, "keep", forgetful)


def warm_starts_lost(patch: Patch) -> None:
    keep = CompressedBucket.keep

    def cold(self: CompressedBucket) -> None:
        first = self.qs
        keep(self)
        self.qs = first

    patch.setattr(CompressedBucket, "keep", cold)


def memory_of_sums_lost(patch: Patch) -> None:
    """What the codes of the sums leave out is in no memory."""
    finish = Int8Sum.finish

    def forgetful(self: Int8Sum) -> object:
        left = self._left.clone()
        found, exact = finish(self)
        self.flat.copy_(left.flatten()[: len(self.flat)])
        return found, exact

    patch.setattr(Int8Sum, "finish", forgetful)


def not_averaged(patch: Patch) -> None:
    patch.setattr(replicas, "mean_over", lambda axis: lambda tensors: [tensor.mul_(0.5) for tensor in tensors])


def momentum_lost(patch: Patch) -> None:
    step = OuterOptimizer.step

    def forgetful(self: OuterOptimizer, mean: object) -> None:
        step(self, mean)  # type: ignore[arg-type]
        for momentum in self.momenta.values():
            momentum.mul_(0.5)

    patch.setattr(OuterOptimizer, "step", forgetful)


FAULTS: list[tuple[str, Fault, str]] = [
    ("powersgd", own_sums, "gradient"),
    ("powersgd", memories_lost, "weight"),
    ("powersgd", warm_starts_lost, "weight"),
    ("int8", memories_lost, "weight"),
    ("int8", memory_of_sums_lost, "weight"),
    ("local steps", not_averaged, "gradient"),
    ("local steps", momentum_lost, "gradient"),
]


@pytest.mark.every(4)
@pytest.mark.parametrize(("row", "fault", "seen_in"), FAULTS, ids=[f"{row}-{f.__name__}" for row, f, _ in FAULTS])
def test_a_planted_fault_turns_a_row_red(rank_pool: RankPool, row: str, fault: Fault, seen_in: str) -> None:
    require_finite_difference(rank_pool, fault, CASES[row], seen_in)
