"""A case of the parity certificate against one process: how far apart they are, and what is wrong."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from training.distributed.rank_pool import RankError, RankPool
from training.parity.cases import Case
from training.parity.traffic import Traffic, Volume
from training.parity.worker import Held, Seen, measure
from training.sharding.shard_spec import ShardSpec, assemble_shards

# The largest difference, relative to the largest number of the kind: rounding, and how it spreads in three steps
LIMITS = {"fp64": 1e-10, "fp32": 1e-5}


@dataclass(frozen=True)
class Row:
    """What became of a case. Differences from one process are relative to the largest number compared."""

    case: Case
    seconds: float
    loss: float = float("nan")
    gradient: float = float("nan")
    weight: float = float("nan")
    counted: Traffic = field(default_factory=dict)
    """Of the process with the most bytes."""
    wrong: str = ""
    """What else is wrong: a process that failed, elements in no process, replicas or traffic that differ."""

    @property
    def worst(self) -> float:
        return float(torch.tensor([self.loss, self.gradient, self.weight]).max())  # nan, if there is one

    @property
    def green(self) -> bool:
        return not self.wrong and self.worst <= LIMITS[self.case.precision]

    @property
    def reason(self) -> str:
        """Why it is red."""
        far = [n for n in ("loss", "gradient", "weight") if not getattr(self, n) <= LIMITS[self.case.precision]]
        compared = self.worst == self.worst or not self.wrong  # a failure leaves nothing to compare
        apart = f"{' and '.join(far)} differ by {self.worst:.1e} from one process" if far and compared else ""
        return "; ".join(filter(None, [self.wrong, apart]))


@dataclass(frozen=True)
class Whole:
    """What all processes of a case have to show, put together."""

    losses: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    disagreement: str
    """Where processes hold the same part and differ in a bit of it: the first such place."""


class Certifier:
    """Runs cases in `ranks` and compares each with one process, which runs once for all that it is compared with."""

    def __init__(self, ranks: RankPool, job: Callable[[Case], Seen] = measure) -> None:
        self.ranks, self.job = ranks, job
        self._alone: dict[Case, Whole] = {}

    def certify(self, case: Case) -> Row:
        started = time.monotonic()
        try:
            alone = self._run_alone(case.alone)
            started = time.monotonic()
            seen = self.ranks.run(case.processes, self.job, case)
            whole = put_together(seen)
        except (RankError, AssertionError) as error:
            return Row(case, time.monotonic() - started, wrong=str(error) or "an assertion failed")
        busiest = max((s.counted for s in seen), key=lambda t: sum(v.bytes for v in t.values()))
        return Row(
            case,
            time.monotonic() - started,
            _distance({"": whole.losses}, {"": alone.losses}),
            _distance(whole.gradients, alone.gradients),
            _distance(whole.weights, alone.weights),
            busiest,
            whole.disagreement or traffic_difference(seen),
        )

    def _run_alone(self, case: Case) -> Whole:
        if case not in self._alone:
            self._alone[case] = put_together(self.ranks.run(1, measure, case))
        return self._alone[case]


def put_together(seen: Sequence[Seen]) -> Whole:
    """AssertionError where parts are missing. Of those that several processes hold, the first one's counts."""
    losses = torch.tensor([s.losses for s in seen], dtype=torch.float64).sum(0)
    gradients, differ = _gather([s.gradients for s in seen])
    weights, differ_later = _gather([s.weights for s in seen])
    return Whole(losses, gradients, weights, differ or differ_later)


def _gather(held: Sequence[Held]) -> tuple[dict[str, Tensor], str]:
    specs: dict[str, dict[ShardSpec, Tensor]] = {}
    differ = ""
    for rank, parts in enumerate(held):
        for name, spec, values in parts:
            if not spec.numel:
                continue
            assert values is not None, f"rank {rank} has no gradient of {name}"
            known = specs.setdefault(name, {}).setdefault(spec, values)
            if not differ and not torch.equal(known, values):
                differ = f"rank {rank} has other values of {name} from {spec.offset} than a rank before it"
    return {name: assemble_shards(found) for name, found in specs.items()}, differ


def _distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys(), f"parameters {sorted(ours.keys() ^ theirs.keys())} are missing"
    largest = max(float(t.abs().max()) for t in theirs.values())
    apart = torch.stack([(ours[name] - t).abs().max() for name, t in theirs.items()])
    return float(apart.max()) / largest


def traffic_difference(seen: Sequence[Seen]) -> str:
    """The first difference between what was counted and what theory has, in words; or nothing."""
    nothing = Volume(0, 0)
    for rank, s in enumerate(seen):
        for key in sorted(s.counted.keys() | s.expected.keys()):
            counted, expected = s.counted.get(key, nothing), s.expected.get(key, nothing)
            if counted != expected:
                axis, operation = key
                return (
                    f"rank {rank} takes part in {counted.calls} {operation} of {counted.bytes} bytes on axis {axis}; "
                    f"theory has {expected.calls} of {expected.bytes}"
                )
    return ""
