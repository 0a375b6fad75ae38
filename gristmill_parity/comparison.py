"""Comparison: runs a case of the parity certificate and compares it with one process and with the traffic theory."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from gristmill_parity.cases import Case
from gristmill_parity.reference import GlobalResult, run_reference
from gristmill_parity.runs.outcome import read_outcome
from gristmill_parity.runs.reference import run_reference_of_run
from gristmill_parity.runs.run_case import RunCase
from gristmill_parity.runs.shards import write_token_data
from gristmill_parity.runs.stint import RUN, Stint, run_stint
from gristmill_parity.worker import RankResult, ShardValues, run_case
from training.distributed.rank_pool import RankError, RankPool
from training.parallel.traffic_inputs import Traffic, Volume
from training.sharding.shard_spec import ShardSpec, assemble_shards

QUANTITIES = ("loss", "logits", "gradient", "weight")
_ALWAYS = ("loss", "gradient", "weight")  # of other quantities some cases have none
# Largest allowed relative difference: rounding, and its growth over three steps
LIMITS = {"fp64": 1e-10, "fp32": 1e-5}
_EPSILON = {"bf16": 2.0**-7, "fp16": 2.0**-10}
_TRANSFORMERS_LIMIT = 1e-5  # its Llama computes norms and rotary angles in float32: measured 4e-7 of a gradient
_SMALL = 0.1  # gradients below this share of the average one are compared with it: keys' biases have none but rounding


def limits(case: Case) -> dict[str, float]:
    """Return the largest allowed relative difference by quantity.

    In bf16 and fp16 each block is worth one epsilon of gradients and logits forward, and one backward (measured: under
    half of that); a loss is a mean over tokens, and an update a small part of a weight: both are worth one epsilon.
    """
    if case.precision in _EPSILON:
        epsilon = _EPSILON[case.precision]
        of_blocks = 2 * case.layers * epsilon
        return {"gradient": of_blocks, "logits": of_blocks, "loss": epsilon, "weight": epsilon}
    if case.reference == "transformers" and case.model.positions in ("rope", "alibi"):
        return dict.fromkeys(QUANTITIES, _TRANSFORMERS_LIMIT)
    return dict.fromkeys(QUANTITIES, LIMITS[case.precision])


@dataclass(frozen=True)
class CaseResult:
    """Result of a case, compared with its reference."""

    case: Case
    seconds: float
    differences: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(_ALWAYS, float("nan")))
    """Relative differences by quantity (see `differences`); nan if a rank failed."""
    counted: Traffic = field(default_factory=dict)
    """Traffic of the rank that communicates the most bytes."""
    error: str = ""
    """Error that prevented the comparison: a rank failed, or elements are in no rank's shards."""
    mismatch: str = ""
    """First difference between ranks that hold the same shard, else between the ranks that hold one and those that the
    placement table names, else between counted and expected traffic."""

    @property
    def largest_difference(self) -> float:
        """Return the largest of the differences; nan if one is nan."""
        return _largest(self.differences.values())

    @property
    def share_of_limit(self) -> float:
        """Return the largest of the differences over their limits; nan if one is nan."""
        allowed = limits(self.case)
        shares = [value / allowed[name] for name, value in self.differences.items()]
        return _largest(shares)

    @property
    def passed(self) -> bool:
        """Return whether all differences are within the limits, ranks agree and traffic equals theory."""
        return not self.error and not self.mismatch and not self._above

    @property
    def _above(self) -> dict[str, float]:
        """Return the differences that are not within their limits, which nan is not either."""
        allowed = limits(self.case)
        return {name: value for name, value in self.differences.items() if not value <= allowed[name]}

    @property
    def reason(self) -> str:
        """Return the reason of failure; empty if it passed."""
        if self.error:
            return self.error
        reasons = [self.mismatch] if self.mismatch else []
        above = self._above
        if above:
            reference = self.case.reference.replace("plain", "the plain")
            reasons.append(f"{' and '.join(above)} differ by {_largest(above.values()):.1e} from {reference}")
        return "; ".join(reasons)


def _largest(values: Iterable[float]) -> float:
    """Return the maximum; nan if one is nan."""
    return float(torch.tensor(list(values)).max())


class Certifier:
    """Runs cases in a pool of ranks and compares each with one process, whose result is cached."""

    def __init__(
        self,
        ranks: RankPool,
        job: Callable[[Case], RankResult] = run_case,
        stint: Callable[[Stint], None] = run_stint,
    ) -> None:
        """`job` is what each rank of a case runs, `stint` of a run; tests pass some with a planted fault."""
        self.ranks = ranks
        self.job = job
        self.stint = stint
        self._references: dict[Case, GlobalResult] = {}

    def certify(self, case: Case) -> CaseResult:
        """Run and compare a case; failures are part of the result, never raised."""
        started = time.monotonic()
        try:
            reference = self._reference(case.of_reference)
            started = time.monotonic()
            if isinstance(case, RunCase):
                measured = differences(case, self._train(case), reference)
                return CaseResult(case, time.monotonic() - started, measured)
            results = self.ranks.run(case.processes, self.job, case)
            assembled = assemble_ranks(results)
            measured = differences(case, assembled, reference)
        except (RankError, AssertionError) as error:
            return CaseResult(case, time.monotonic() - started, error=str(error) or "an assertion failed")
        seconds = time.monotonic() - started
        mismatch = (
            assembled.mismatch or holder_difference(results, case.layout.local_replicas) or traffic_difference(results)
        )
        return CaseResult(case, seconds, measured, _busiest(results), mismatch=mismatch)

    def _train(self, case: RunCase) -> GlobalResult:
        """Run the trainer until the case's stop, and from there to its end."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_token_data(folder)
            until_stop = Stint(case, folder, case.layout, case.stop)
            to_end = Stint(case, folder, case.resumed, "done")
            for stint in (until_stop, to_end):
                self.ranks.run(stint.layout.processes, self.stint, stint)
            return read_outcome(folder / RUN, case)

    def _reference(self, case: Case) -> GlobalResult:
        if case not in self._references:
            if isinstance(case, RunCase):
                (self._references[case],) = self.ranks.run(1, run_reference_of_run, case)
            elif case.reference == "one process":
                self._references[case] = assemble_ranks(self.ranks.run(1, run_case, case))
            else:
                (self._references[case],) = self.ranks.run(1, run_reference, case)
        return self._references[case]


def _busiest(results: Sequence[RankResult]) -> Traffic:
    """Return the traffic of the rank that communicates the most bytes."""
    traffic = [result.counted for result in results]
    return max(traffic, key=lambda volumes: sum(volume.bytes for volume in volumes.values()))


def assemble_ranks(results: Sequence[RankResult]) -> GlobalResult:
    """Assemble the ranks' shards. Raises AssertionError if elements are held by no rank, or losses differ.

    A shard that several ranks hold is taken from the first of them.
    """
    for rank, result in enumerate(results):
        same = result.losses == results[0].losses
        assert same, f"rank {rank} reports losses {result.losses}, and rank 0 {results[0].losses}"
    losses = torch.tensor(results[0].losses, dtype=torch.float64)
    gradients, mismatch = _assemble([result.gradients for result in results])
    weights, later_mismatch = _assemble([result.weights for result in results])
    return GlobalResult(losses, gradients, weights, results[0].logits, mismatch or later_mismatch)


def _assemble(ranks: Sequence[ShardValues]) -> tuple[dict[str, Tensor], str]:
    """Return the global tensors by name, and the first difference between ranks that hold the same shard."""
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
    tensors = {name: assemble_shards(shards_of_tensor) for name, shards_of_tensor in shards.items()}
    return tensors, mismatch


def differences(case: Case, run: GlobalResult, reference: GlobalResult) -> dict[str, float]:
    """Return the relative differences of losses, gradients and weights, and of logits where they are compared.

    The largest absolute difference over the largest absolute value; of gradients against an independent reference, the
    largest of any tensor's 2-norms.
    """
    measured = {"loss": _relative_difference({"": run.losses}, {"": reference.losses})}
    if run.logits is not None and reference.logits is not None:
        measured["logits"] = _relative_difference({"": run.logits}, {"": reference.logits})
    if case.reference == "one process":
        measured["gradient"] = _relative_difference(run.gradients, reference.gradients)
    else:
        measured["gradient"] = _tensor_difference(run.gradients, reference.gradients)
    measured["weight"] = _relative_difference(run.weights, reference.weights)
    return measured


def _tensor_difference(run: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Return the largest 2-norm of a tensor's difference over its 2-norm, or over a small share of the average one."""
    _require_same_names(run, reference)
    everything = torch.cat([tensor.flatten() for tensor in reference.values()])
    average = float(everything.norm()) / everything.numel() ** 0.5
    shares = []
    for name, expected in reference.items():
        difference = float((run[name].double() - expected).norm())
        smallest_norm = _SMALL * average * expected.numel() ** 0.5
        shares.append(difference / max(float(expected.norm()), smallest_norm))
    return _largest(shares)


def _relative_difference(run: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Return the largest absolute difference over the largest absolute value of all reference tensors."""
    _require_same_names(run, reference)
    largest = max(float(expected.abs().max()) for expected in reference.values())
    differences = [(run[name] - expected).abs().max() for name, expected in reference.items()]
    return float(torch.stack(differences).max()) / largest


def _require_same_names(run: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    different = sorted(run.keys() ^ reference.keys())
    assert not different, f"parameters {different} are missing"


def holder_difference(results: Sequence[RankResult], replicas: int = 1) -> str:
    """Describe the first piece that more or fewer ranks hold, or count in a norm, than the table says; or empty.

    The table is that of one of the `replicas` with weights of their own.
    """
    ranks: dict[tuple[str, ShardSpec], set[int]] = {}
    counted: Counter[tuple[str, ShardSpec]] = Counter()
    copies: dict[tuple[str, ShardSpec], int] = {}
    for rank, result in enumerate(results):
        for piece in result.held:
            key = (piece.name, piece.spec)
            ranks.setdefault(key, set()).add(rank)
            counted[key] += piece.is_primary
            copies[key] = piece.copies
    for key, holders in ranks.items():
        name, spec = key
        held = (len(holders), counted[key])
        expected = (copies[key] * replicas, replicas)
        if spec.numel and held != expected:
            return (
                f"{held[0]} ranks hold {name} from {spec.offset}, and {held[1]} count it in the gradient norm; "
                f"the placement table has {expected[0]} and {expected[1]}"
            )
    return ""


def traffic_difference(results: Sequence[RankResult]) -> str:
    """Describe the first difference between counted and expected traffic; empty if there is none."""
    nothing = Volume(0, 0)
    for rank, result in enumerate(results):
        for key in sorted(result.counted.keys() | result.expected.keys()):
            counted = result.counted.get(key, nothing)
            expected = result.expected.get(key, nothing)
            if counted != expected:
                axis, operation = key
                return (
                    f"rank {rank} takes part in {counted.calls} {operation} of {counted.bytes} bytes on axis {axis}; "
                    f"theory has {expected.calls} of {expected.bytes}"
                )
    return ""
