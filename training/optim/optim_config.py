"""OptimConfig: the options of the optimizer; and the learning-rate schedule."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from gristmill.arguments import one_of
from gristmill.config import INT64, Range
from gristmill.errors import UsageError, require
from training.model.model_config import is_lookup
from training.optim.optimizer_kinds import check_optimizer_name
from training.own_code import call_own, is_own, load_own

Part = Literal["hidden", "embeddings", "head", "norms", "biases"]
MATRICES: tuple[Part, ...] = ("hidden", "embeddings", "head")

SCHEDULES = ("cosine", "linear", "constant", "wsd")
_MIN_LR = 1e-4  # the default where the peak is above it


@dataclass(frozen=True)
class OptimConfig:
    """An optimizer, with linear warm-up and a decay of the learning rate, and gradient clipping."""

    RANGES: ClassVar[dict[str, Range]] = {
        "steps": Range(1, INT64),
        **dict.fromkeys(("warmup_steps", "warmup_from", "decay_steps", "cooldown_steps"), Range(0, INT64)),
        **dict.fromkeys(("lr", "eps", "outer_lr"), Range(0, above=True)),
        **dict.fromkeys(("min_lr", "weight_decay", "z_loss", "max_grad_norm"), Range(0)),
        **dict.fromkeys(("betas", "muon_momentum", "ema_decay", "outer_momentum"), Range(0, math.nextafter(1, 0))),
    }

    name: str = "adamw"
    """adamw, muon, sgd, or FILE.py:CLASS, an optimizer of yours. muon: Muon for the matrices of the blocks and AdamW
    for everything else, with the same lr and weight_decay. sgd: no momentum, no weight decay; for tests, as AdamW
    hides errors in a gradient's scale."""
    steps: int = 1000
    """Training steps of the whole run, including those before a resume."""
    lr: float = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    min_lr: float | None = None
    """Learning rate at the end of the decay; by default 1e-4, or lr / 10 where lr is below 1e-4."""
    warmup_steps: int = 50
    """Steps of the linear warm-up."""
    warmup_from: int = 0
    """Step after which the warm-up, and with it the schedule, begins: 0, or the step of the checkpoint that a branch
    continues, which then warms up again (with allow_lr_jump)."""
    schedule: str = "cosine"
    """Learning rate after the warm-up. cosine, linear: falls to min_lr at decay_steps. constant: stays at lr. wsd
    (warm-up, stable, decay): stays at lr, then falls to min_lr in the last cooldown_steps before decay_steps.
    FILE.py:FUNCTION: a function of yours."""
    cooldown_steps: int = 0
    """wsd: steps of the decay; 0: none, for a run from whose checkpoints decays branch off (--branch_from)."""
    cooldown_shape: Literal["linear", "1-sqrt"] = "linear"
    """wsd: shape of the decay (Hägele et al. 2024, section 3)."""
    decay_steps: int = 0
    """Step at which the learning rate has decayed to min_lr, where it stays; 0: optim.steps. To extend a finished run,
    give the value of the run before to keep its learning rate; another value changes it from the next step on."""
    weight_decay: float = 0.1
    """Weight decay of the parts of the model that decay_parts names."""
    decay_parts: tuple[Part, ...] = MATRICES
    """Parts of the model that decay. hidden: matrices of the blocks; embeddings: of tokens and positions, and a tied
    output matrix; head: an untied output matrix; norms; biases."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    eps: float = 1e-8
    """Epsilon of AdamW's denominator."""
    muon_momentum: float = 0.95
    """Decay rate of Muon's momentum."""
    z_loss: float = 0.0
    """Coefficient of a z-loss, the squared logarithm of the softmax's denominator, which is minimised along with the
    loss and reported separately; 0: none. PaLM used 1e-4."""
    ema_decay: float = 0.0
    """Decay rate of an exponential moving average of the weights, which checkpoints include; 0: none. eval.ema
    evaluates it, and export_hf --ema exports it."""
    outer_lr: float = 0.7
    """With parallel.local_steps: learning rate of the outer optimizer, SGD with Nesterov momentum. With 1 and an
    outer_momentum of 0, the new weights are the mean of the replicas' weights."""
    outer_momentum: float = 0.9
    """With parallel.local_steps: momentum of the outer optimizer."""
    max_grad_norm: float = 1.0
    """Maximum gradient norm: the 2-norm over all parameters; 0 disables clipping."""

    @property
    def last_decay_step(self) -> int:
        """`decay_steps`, or `steps` where that is 0."""
        return self.decay_steps or self.steps

    @property
    def final_lr(self) -> float:
        """`min_lr`, with its default filled in."""
        if self.min_lr is not None:
            return self.min_lr
        return _MIN_LR if self.lr >= _MIN_LR or self.schedule == "constant" else self.lr / 10

    @property
    def warmup_end(self) -> int:
        """Return the steps after which the warm-up has ended."""
        return self.warmup_from + self.warmup_steps

    def decays(self, name: str, global_shape: tuple[int, ...]) -> bool:
        """Return whether a parameter decays."""
        return part_of(name, global_shape) in self.decay_parts

    def check(self) -> None:
        """Raise UsageError for an unknown optimizer or schedule, or a decay that does not fit these or the run."""
        check_optimizer_name(self.name)
        if self.schedule not in SCHEDULES and not is_own(self.schedule):
            advice = one_of(self.schedule, SCHEDULES)
            raise UsageError(f"optim.schedule is {self.schedule}; {advice}, and FILE.py:FUNCTION is one of yours")
        end = self.last_decay_step
        require(
            self.final_lr <= self.lr or self.schedule == "constant",
            f"optim.min_lr is {self.min_lr} and optim.lr {self.lr}: the learning rate would rise to its end; "
            f"try --optim.min_lr {self.lr / 10:g}",
        )
        require(
            self.schedule == "wsd" or self.cooldown_shape == "linear",
            f"optim.cooldown_shape is {self.cooldown_shape} and optim.schedule {self.schedule}, which has no cooldown; "
            "try --optim.schedule wsd, or --optim.cooldown_shape linear",
        )
        require(  # a run within its warm-up, as a short one with the default, never comes to the decay
            self.schedule not in ("cosine", "linear") or not 0 < self.decay_steps < self.warmup_end < self.steps,
            f"optim.warmup_steps is {self.warmup_steps} and optim.decay_steps {self.decay_steps}: the decay would end "
            f"within the warm-up, until step {self.warmup_end}; try a lower --optim.warmup_steps, or a later "
            "--optim.decay_steps",
        )
        require(
            self.schedule == "wsd" or not self.cooldown_steps,
            f"optim.cooldown_steps is {self.cooldown_steps} and optim.schedule {self.schedule}, which has no cooldown; "
            "try --optim.schedule wsd, or --optim.cooldown_steps 0",
        )
        require(
            self.schedule != "constant" or not self.decay_steps,
            f"optim.decay_steps is {self.decay_steps} and optim.schedule constant, which does not decay; "
            "try --optim.schedule linear, or --optim.decay_steps 0",
        )
        require(
            self.cooldown_steps <= end,
            f"optim.cooldown_steps is {self.cooldown_steps}, and the decay ends at step {end}: it is longer than the "
            f"run; try --optim.cooldown_steps {max(1, end // 5)}",
        )
        require(
            not self.cooldown_steps or self.warmup_end + self.cooldown_steps <= end,
            f"optim.warmup_steps {self.warmup_steps} and optim.cooldown_steps {self.cooldown_steps} are together more "
            f"than the {end - self.warmup_from} steps until the end of the decay; try --optim.warmup_steps "
            f"{max(0, end - self.warmup_from - self.cooldown_steps)}",
        )


def part_of(name: str, global_shape: tuple[int, ...]) -> Part:
    """Return the part that a parameter belongs to; a tied matrix is an embedding, and "hidden" is any other matrix.

    >>> part_of("blocks.0.attention.q.weight", (8, 8)), part_of("blocks.0.attention.q.bias", (8,))
    ('hidden', 'biases')
    """
    if name.endswith(("bias", "sinks")):
        return "biases"
    if len(global_shape) < 2:
        return "norms"
    if is_lookup(name):
        return "embeddings"
    return "head" if name.startswith("head.") else "hidden"


def learning_rate(step: int, config: OptimConfig) -> float:
    """Return learning rate of step 0, 1, …: linear warm-up to `lr`, then as `config.schedule` says, at last `final_lr`.

    Of a schedule that begins after step `warmup_from` the rates of the steps before have no meaning.

    The cosine is that of Loshchilov & Hutter 2017 ("SGDR", equation 5) without restarts; WSD is of Hu et al. 2024
    (MiniCPM, section 4), its decay of Hägele et al. 2024 (section 3).

    >>> config = OptimConfig(steps=10, lr=1.0, min_lr=0.1, warmup_steps=2)
    >>> [round(learning_rate(step, config), 3) for step in (0, 1, 2, 9)]
    [0.5, 1.0, 0.966, 0.1]
    """
    if config.warmup_from <= step < config.warmup_end:
        return config.lr * (step - config.warmup_from + 1) / config.warmup_steps
    if is_own(config.schedule):
        return _own_rate(step, config)
    if step < (start := decay_start(config)):
        return config.lr
    progress = min(1.0, (step + 1 - start) / max(1, config.last_decay_step - start))
    return config.final_lr + (config.lr - config.final_lr) * _share(progress, config)


def _own_rate(step: int, config: OptimConfig) -> float:
    """Learning rate of a step by a schedule of the user's, which knows the end of the decay, and not that of the run.

    So a run that is made longer keeps the rates that it had.
    """
    function = load_own(config.schedule, "optim.schedule")
    known = replace(config, steps=config.last_decay_step)
    rate = call_own(lambda: function(step, known), config.schedule, "optim.schedule")
    is_number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
    require(
        is_number and math.isfinite(rate) and rate >= 0,
        f"optim.schedule: {config.schedule} returned {rate!r} for step {step}; expected a learning rate, a number of 0 "
        "or more",
    )
    return float(rate)


def decay_start(config: OptimConfig) -> float:
    """Return the steps after which the learning rate begins to fall.

    Infinite if it never does, or as a user's function says.
    """
    if (
        config.schedule == "constant"
        or is_own(config.schedule)
        or (config.schedule == "wsd" and not config.cooldown_steps)
    ):
        return math.inf
    return config.last_decay_step - config.cooldown_steps if config.schedule == "wsd" else config.warmup_end


def describe_late_decay(config: OptimConfig) -> str:
    """Say that the run ends before its decay does, and at which rate; nothing where the decay fits, or there is none.

    >>> describe_late_decay(OptimConfig(steps=12, lr=1e-2, warmup_steps=2, decay_steps=1000)).partition(": ")[2]
    'the rate of step 12 is 1.00e-02, not 1.00e-04'
    """
    end = config.last_decay_step
    last = config.steps
    if decay_start(config) == math.inf or end <= last or config.lr == config.final_lr:
        return ""
    return (
        f"the learning rate's decay ends at step {end}, beyond this run's {last} steps: the rate of step {last} is "
        f"{learning_rate(last - 1, config):.2e}, not {config.final_lr:.2e}"
    )


def _share(progress: float, config: OptimConfig) -> float:
    """Return the share of `lr` - `final_lr` that is left after a share of the decay: 1 at its start, 0 at its end."""
    if config.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - (math.sqrt(progress) if config.cooldown_shape == "1-sqrt" else progress)
