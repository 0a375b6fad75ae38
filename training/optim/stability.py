"""What is done about a step that would do harm: a loss or gradient that is not finite, or a loss that leaps.

Every process judges by the same two numbers, summed over all of them: so all decide alike.
"""

import math
from dataclasses import dataclass
from typing import Literal

from gristmill.errors import UsageError

_MEMORY = 0.99  # of the running mean and variance of the loss: about the last hundred steps
_WARMUP = 50  # steps before a leap can be told from a beginning


@dataclass(frozen=True)
class StabilityConfig:
    """What is done about a step whose loss or gradient is not finite, or whose loss leaps."""

    policy: Literal["skip", "stop"] = "skip"
    """skip: leave the parameters as they are and go on; stop: end the run, to go on from the last checkpoint.
    An overflow of fp16 that a smaller scale of the loss can mend is skipped either way."""
    budget: int = 20
    """Steps that may be skipped among any thousand; one more ends the run."""
    leap: float = 0.0
    """A loss leaps if it is so many standard deviations above its running mean; 0: never."""
    loss_scale: float = 65536.0
    """fp16: what the loss is multiplied by at first, so that small gradients are not lost. Halved where that is too
    much, doubled after `growth` steps in which it was not (Micikevicius et al. 2018, section 3.2)."""
    growth: int = 2000
    floor: float = 1.0
    """fp16: the smallest scale; if even that is too much, the run ends."""

    def check(self) -> None:
        """Raise UsageError for values that no run could have."""
        for name, value, least in (("budget", self.budget, 0), ("leap", self.leap, 0), ("growth", self.growth, 1)):
            if value < least:
                raise UsageError(f"stability.{name} is {value}; wanted {least} or more")
        if not 0 < self.floor <= self.loss_scale:
            raise UsageError(
                f"stability.floor {self.floor} and loss_scale {self.loss_scale}: wanted 0 < floor <= loss_scale"
            )


class Stability:
    """Judges each step, and keeps the scale of the loss; its state is a few numbers that a checkpoint keeps."""

    def __init__(self, config: StabilityConfig, precision: str) -> None:
        self.config, self.scales = config, precision == "fp16"
        self.scale = config.loss_scale if self.scales else 1.0
        self.grown = 0  # steps since the scale was last changed
        self.skipped: list[int] = []  # steps, the last thousand's
        self.seen, self.mean, self.variance = 0, 0.0, 0.0
        self.fault = ""  # why the last step was not accepted

    def accepts(self, step: int, loss: float, norm: float) -> bool:
        """Whether the parameters are to be updated with this step's gradients, of 2-norm `norm`.

        Raises UsageError where the policy, the budget or the floor of the scale ends the run.
        """
        self.fault = fault = self._fault(loss, norm)
        if not fault:
            self._remember(loss)
            return True
        overflow = self.scales and math.isfinite(loss) and not math.isfinite(norm)
        if overflow:
            self._halve(step)
        advice = (
            "go on from the last checkpoint with a lower --optim.lr, more --optim.warmup_steps, or --precision fp32"
        )
        if self.config.policy == "stop" and not overflow:
            raise UsageError(f"{fault} at step {step}, and stability.policy is stop; {advice}")
        self.skipped = [s for s in self.skipped if s > step - 1000] + [step]
        if len(self.skipped) > self.config.budget:
            raise UsageError(
                f"{fault} at step {step}: {len(self.skipped)} of the last thousand steps had to be skipped, "
                f"and stability.budget is {self.config.budget}; {advice}"
            )
        return False

    @property
    def state(self) -> dict[str, float]:
        """Finite numbers by name."""
        numbers = {"scale": self.scale, "grown": self.grown, "seen": self.seen}
        numbers |= {"mean": self.mean, "variance": self.variance}
        return numbers | {f"skipped.{i}": step for i, step in enumerate(self.skipped)}

    @state.setter
    def state(self, numbers: dict[str, float]) -> None:
        self.scale = numbers["scale"] if self.scales else 1.0
        self.grown, self.seen = int(numbers["grown"]), int(numbers["seen"])
        self.mean, self.variance = numbers["mean"], numbers["variance"]
        self.skipped = [int(value) for name, value in numbers.items() if name.startswith("skipped.")]

    def _fault(self, loss: float, norm: float) -> str:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the gradient's norm is {norm}" + (f" with a loss scale of {self.scale:g}" if self.scales else "")
        limit = self.mean + self.config.leap * math.sqrt(self.variance)
        if self.config.leap and self.seen >= _WARMUP and loss > limit:
            return f"the loss leaps to {loss:.4f} from {self.mean:.4f} ± {math.sqrt(self.variance):.4f}"
        return ""

    def _remember(self, loss: float) -> None:
        self.seen += 1
        self.grown += 1
        if self.scales and self.grown >= self.config.growth:
            self.scale, self.grown = self.scale * 2, 0
        weight = max(1 / self.seen, 1 - _MEMORY)
        before, self.mean = self.mean, self.mean + weight * (loss - self.mean)
        self.variance += weight * ((loss - before) * (loss - self.mean) - self.variance)

    def _halve(self, step: int) -> None:
        if self.scale / 2 < self.config.floor:
            raise UsageError(
                f"fp16 gradients overflow at step {step} with a loss scale of {self.scale:g}, and stability.floor is "
                f"{self.config.floor:g}; try --precision bf16, or a lower --optim.lr"
            )
        self.scale, self.grown = self.scale / 2, 0
