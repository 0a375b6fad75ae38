"""Loss-spike and overflow protection: skips or stops at bad steps, and scales the loss for fp16.

All ranks take the same decision, because it depends on two all-reduced numbers only: the loss and the gradient norm.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from gristmill.config import INT64, Range
from gristmill.errors import UsageError, require

_EMA_DECAY = 0.99  # of the loss's running mean and variance: about the last hundred steps
_WARMUP_STEPS = 50  # before that, the falling loss of a new run would count as spikes
_WINDOW = 1000  # steps over which skipped steps are counted
# of the same run neither the learning rate nor the precision can be changed
_ADVICE = (
    "start a new run (another --out_dir, --init_from a checkpoint if there is one) with a lower --optim.lr, more "
    "--optim.warmup_steps, or --precision bf16 or fp32"
)


@dataclass(frozen=True)
class StabilityConfig:
    """Policy for bad steps (loss or gradient norm not finite, or a loss spike), and fp16's loss scaling."""

    RANGES: ClassVar[dict[str, Range]] = {
        "max_skipped_steps": Range(0, INT64),
        "loss_spike_sigma": Range(0),
        "scale_growth_interval": Range(1, INT64),
        **dict.fromkeys(("initial_loss_scale", "min_loss_scale"), Range(0, above=True)),
    }

    policy: Literal["skip", "stop"] = "skip"
    """skip: discard a bad step's gradients and continue; stop: end the run, which can resume from its last
    checkpoint. An fp16 overflow that a smaller loss scale can fix is always skipped."""
    max_skipped_steps: int = 20
    """Maximum number of skipped steps in any 1000 consecutive ones, fp16 overflows not counted; one more ends the
    run."""
    loss_spike_sigma: float = 0.0
    """A loss this many standard deviations above its running mean is a spike; 0: never."""
    initial_loss_scale: float = 65536.0
    """fp16: initial loss scale: the loss is multiplied by it, so that small gradients do not underflow. Halved after
    an overflow, doubled after `scale_growth_interval` steps without one (Micikevicius et al. 2018, section 3.2)."""
    scale_growth_interval: int = 2000
    """fp16: steps without an overflow before the loss scale is doubled."""
    min_loss_scale: float = 1.0
    """fp16: smallest loss scale; an overflow at this scale ends the run."""

    def check(self) -> None:
        """Raise UsageError for a smallest loss scale above the initial one."""
        require(
            self.min_loss_scale <= self.initial_loss_scale,
            f"stability.min_loss_scale {self.min_loss_scale} is above initial_loss_scale {self.initial_loss_scale}; "
            f"try --stability.min_loss_scale {self.initial_loss_scale}",
        )


class Stability:
    """Accepts or rejects each step, and holds the loss scale; its state is saved in checkpoints."""

    def __init__(self, config: StabilityConfig, precision: str) -> None:
        self.config = config
        self.scales_loss = precision == "fp16"
        self.scale = config.initial_loss_scale if self.scales_loss else 1.0
        self.steps_at_scale = 0  # steps since the scale last changed
        self.skipped: list[int] = []  # steps skipped among the last _WINDOW
        self.steps_seen = 0
        self.mean = 0.0
        self.variance = 0.0
        self.fault = ""  # why the last step was rejected; empty if it was accepted

    def accepts(self, step: int, loss: float, norm: float) -> bool:
        """Return whether to update the parameters with this step's gradients.

        `loss`: mean in nats/token; `norm`: 2-norm of the gradients; both over all ranks. Raises UsageError if the
        policy, the number of skipped steps or the smallest loss scale ends the run.
        """
        self.fault = fault = self._fault(loss, norm)
        if not fault:
            self._update_statistics(loss)
            return True
        if self.scales_loss and math.isfinite(loss) and not math.isfinite(norm):
            self._halve_scale(step)
            return False
        if self.config.policy == "stop":
            raise UsageError(f"{fault} at step {step}, and stability.policy is stop; {_ADVICE}")
        self.skipped = [s for s in self.skipped if s > step - _WINDOW] + [step]
        if len(self.skipped) > self.config.max_skipped_steps:
            raise UsageError(
                f"{fault} at step {step}: {len(self.skipped)} of the last {_WINDOW} steps were skipped, "
                f"and stability.max_skipped_steps is {self.config.max_skipped_steps}; {_ADVICE}"
            )
        return False

    @property
    def state(self) -> dict[str, float]:
        """Return the state to save: finite numbers by name."""
        numbers: dict[str, float] = {"scale": self.scale} if self.scales_loss else {}  # a branch may begin to scale
        numbers |= {"grown": self.steps_at_scale, "seen": self.steps_seen}
        numbers |= {"mean": self.mean, "variance": self.variance}
        return numbers | {f"skipped.{i}": step for i, step in enumerate(self.skipped)}

    @state.setter
    def state(self, numbers: dict[str, float]) -> None:
        numbers = self.state | numbers  # an imported checkpoint has none
        self.steps_at_scale = int(numbers["grown"])
        self.steps_seen = int(numbers["seen"])
        self.scale = numbers["scale"] if self.scales_loss else 1.0
        self.mean = numbers["mean"]
        self.variance = numbers["variance"]
        self.skipped = [int(value) for name, value in numbers.items() if name.startswith("skipped.")]

    def _fault(self, loss: float, norm: float) -> str:
        """Return the reason to reject the step; empty if it is good."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            at_scale = f" with a loss scale of {self.scale:g}" if self.scales_loss else ""
            return f"the gradient norm is {norm}{at_scale}"
        limit = self.mean + self.config.loss_spike_sigma * math.sqrt(self.variance)
        if self.config.loss_spike_sigma and self.steps_seen >= _WARMUP_STEPS and loss > limit:
            return f"the loss spikes to {loss:.4f} from {self.mean:.4f} ± {math.sqrt(self.variance):.4f}"
        return ""

    def _update_statistics(self, loss: float) -> None:
        """Update the loss's running mean and variance; double the loss scale after enough steps without overflow."""
        self.steps_seen += 1
        self.steps_at_scale += 1
        if self.scales_loss and self.steps_at_scale >= self.config.scale_growth_interval:
            self.scale = self.scale * 2
            self.steps_at_scale = 0
        weight = max(1 / self.steps_seen, 1 - _EMA_DECAY)
        before = self.mean
        self.mean = self.mean + weight * (loss - self.mean)
        self.variance += weight * ((loss - before) * (loss - self.mean) - self.variance)

    def _halve_scale(self, step: int) -> None:
        if self.scale / 2 < self.config.min_loss_scale:
            raise UsageError(
                f"fp16 gradients overflow at step {step} with a loss scale of {self.scale:g}, and "
                f"stability.min_loss_scale is {self.config.min_loss_scale:g}; {_ADVICE}"
            )
        self.scale = self.scale / 2
        self.steps_at_scale = 0
