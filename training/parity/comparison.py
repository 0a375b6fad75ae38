"""Comparison: runs a case of the parity certificate and compares it with one process and with the traffic theory."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from training.distributed.rank_pool import RankError, RankPool
from training.parity.cases import Case
from training.parity.traffic import Traffic, Volume
from training.parity.worker import RankResult, ShardValues, run_case
from training.sharding.shard_spec import ShardSpec, assemble_shards

# Largest allowed relative difference: rounding, and its growth over three steps
LIMITS = {"fp64": 1e-10, "fp32": 1e-5}


@dataclass(frozen=True)
class CaseResult:
    """Result of a case, compared with one process.

    `loss`, `gradient`, `weight`: largest absolute difference over the largest absolute value; nan if not compared.
    """

    case: Case
    seconds: float
    loss: float = float("nan")
    gradient: float = float("nan")
    weight: float = float("nan")
    counted: Traffic = field(default_factory=dict)
    """Traffic of the rank that communicates the most bytes."""
    error: str = ""
    """Error that prevented the comparison: a rank failed, or elements are in no rank's shards."""
    mismatch: str = ""
    """First difference between ranks that hold the same shard, or else between counted and expected traffic."""

    @property
    def largest_difference(self) -> float:
        """The largest of the three differences; nan if one is nan."""
        return float(torch.tensor([self.loss, self.gradient, self.weight]).max())

    @property
    def passed(self) -> bool:
        """True if all differences are within the limit, ranks agree and traffic equals theory."""
        return not self.error and not self.mismatch and self.largest_difference <= LIMITS[self.case.precision]

    @property
    def reason(self) -> str:
        """Reason of failure; empty if it passed."""
        if self.error:
            return self.error
        limit = LIMITS[self.case.precision]
        above = [name for name in ("loss", "gradient", "weight") if not getattr(self, name) <= limit]
        difference = f"{' and '.join(above)} differ by {self.largest_difference:.1e} from one process" if above else ""
        return "; ".join(filter(None, [self.mismatch, difference]))


@dataclass(frozen=True)
class GlobalResult:
    """The results of all ranks, assembled to global tensors."""

    losses: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    mismatch: str
    """First difference between ranks that hold the same shard, compared bitwise; empty if there is none."""


class Certifier:
    """Runs cases in a pool of ranks and compares each with one process, whose result is cached."""

    def __init__(self, ranks: RankPool, job: Callable[[Case], RankResult] = run_case) -> None:
        """`job` is what each rank of a case runs; tests pass one with a planted fault."""
        self.ranks, self.job = ranks, job
        self._references: dict[Case, GlobalResult] = {}

    def certify(self, case: Case) -> CaseResult:
        """Run and compare a case; failures are part of the result, never raised."""
        started = time.monotonic()
        try:
            reference = self._reference(case.single_process)
            started = time.monotonic()
            results = self.ranks.run(case.processes, self.job, case)
            found = assemble_ranks(results)
        except (RankError, AssertionError) as error:
            return CaseResult(case, time.monotonic() - started, error=str(error) or "an assertion failed")
        busiest = max((r.counted for r in results), key=lambda traffic: sum(v.bytes for v in traffic.values()))
        return CaseResult(
            case,
            time.monotonic() - started,
            _relative_difference({"": found.losses}, {"": reference.losses}),
            _relative_difference(found.gradients, reference.gradients),
            _relative_difference(found.weights, reference.weights),
            busiest,
            mismatch=found.mismatch or traffic_difference(results),
        )

    def _reference(self, case: Case) -> GlobalResult:
        if case not in self._references:
            self._references[case] = assemble_ranks(self.ranks.run(1, run_case, case))
        return self._references[case]


def assemble_ranks(results: Sequence[RankResult]) -> GlobalResult:
    """Sum the ranks' losses and assemble their shards. Raises AssertionError if elements are held by no rank.

    A shard that several ranks hold is taken from the first of them.
    """
    losses = torch.tensor([r.losses for r in results], dtype=torch.float64).sum(0)
    gradients, mismatch = _assemble([r.gradients for r in results])
    weights, later_mismatch = _assemble([r.weights for r in results])
    return GlobalResult(losses, gradients, weights, mismatch or later_mismatch)


def _assemble(ranks: Sequence[ShardValues]) -> tuple[dict[str, Tensor], str]:
    shards: dict[str, dict[ShardSpec, Tensor]] = {}
    mismatch = ""
    for rank, held in enumerate(ranks):
        for name, spec, values in held:
            if not spec.numel:
                continue
            assert values is not None, f"rank {rank} has no gradient of {name}"
            first = shards.setdefault(name, {}).setdefault(spec, values)
            if not mismatch and not torch.equal(first, values):
                mismatch = f"rank {rank} has other values of {name} from {spec.offset} than a rank before it"
    return {name: assemble_shards(found) for name, found in shards.items()}, mismatch


def _relative_difference(found: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Largest absolute difference over the largest absolute value of all reference tensors."""
    assert found.keys() == reference.keys(), f"parameters {sorted(found.keys() ^ reference.keys())} are missing"
    largest = max(float(t.abs().max()) for t in reference.values())
    differences = torch.stack([(found[name] - t).abs().max() for name, t in reference.items()])
    return float(differences.max()) / largest


def traffic_difference(results: Sequence[RankResult]) -> str:
    """Describe the first difference between counted and expected traffic; empty if there is none."""
    nothing = Volume(0, 0)
    for rank, result in enumerate(results):
        for key in sorted(result.counted.keys() | result.expected.keys()):
            counted, expected = result.counted.get(key, nothing), result.expected.get(key, nothing)
            if counted != expected:
                axis, operation = key
                return (
                    f"rank {rank} takes part in {counted.calls} {operation} of {counted.bytes} bytes on axis {axis}; "
                    f"theory has {expected.calls} of {expected.bytes}"
                )
    return ""
