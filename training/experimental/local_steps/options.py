"""Checks that local steps fit the other options of a run."""

from gristmill.errors import require
from training.experimental.local_steps.meeting_config import MeetingConfig
from training.memory.memory_config import MemoryConfig
from training.optim.optim_config import OptimConfig
from training.parallel.layout import ParallelConfig


def check_local_steps(
    layout: ParallelConfig, meeting: MeetingConfig, optim: OptimConfig, memory: MemoryConfig, norms: int, timeout: float
) -> None:
    """Raise UsageError for what does not go together with the local steps of a resolved `layout`.

    `norms`: profile.norms, the steps between norms of layers; `timeout`: seconds that a rank waits for another.
    """
    meeting.check(optim.steps, layout.local_steps, timeout)
    if meeting.folder is not None:
        require(
            layout.compression == "none",
            f"parallel.compression {layout.compression} and replicas.folder: compressed gradients are not tried with "
            "outer steps; try --parallel.compression none",
        )
        _check_options("replicas.local_steps", meeting.local_steps, optim, memory, norms)
    elif layout.local_steps:
        _check_layout(layout, optim.steps)
        _check_options("parallel.local_steps", layout.local_steps, optim, memory, norms)
    else:
        _check_outer_optimizer(optim)


def _check_layout(layout: ParallelConfig, all_steps: int) -> None:
    steps = layout.local_steps
    rest = all_steps % steps
    require(
        not rest,
        f"optim.steps {all_steps} is not divisible by parallel.local_steps {steps}: the last {rest} steps of the "
        f"replicas would not be averaged; try --optim.steps {all_steps - rest + steps}",
    )
    require(
        not layout.zero or layout.dp == 1 or layout.zero_group < layout.dp,
        f"parallel.zero {layout.zero} shards over all {layout.dp} replicas, of which none has weights of its own for "
        f"parallel.local_steps {steps}; try --parallel.zero_group {_smaller_group(layout.dp)}, or --parallel.zero 0",
    )
    require(
        layout.cp == 1 or layout.zero > 0,
        f"parallel.cp {layout.cp} without ZeRO and parallel.local_steps {steps}: ranks that share sequences would take "
        "local steps apart; try --parallel.zero 1 --parallel.zero_group 1",
    )
    require(
        layout.compression == "none",
        f"parallel.compression {layout.compression} and parallel.local_steps {steps}: replicas send no gradients "
        "between outer steps; try --parallel.compression none",
    )


def _check_options(name: str, steps: int, optim: OptimConfig, memory: MemoryConfig, norms: int) -> None:
    require(
        not optim.ema_decay,
        f"optim.ema_decay {optim.ema_decay} and {name} {steps}: the average would be of one replica's "
        "weights; try --optim.ema_decay 0",
    )
    require(
        memory.parameters == "device",
        f"memory.parameters {memory.parameters} and {name} {steps}: the shared weights are on the "
        "device, like the replica's; try --memory.parameters device",
    )
    require(
        not norms,
        f"profile.norms {norms} and {name} {steps}: each replica has norms of its own; try --profile.norms 0",
    )


def _smaller_group(dp: int) -> int:
    return max((n for n in range(1, dp) if dp % n == 0), default=1)


def _check_outer_optimizer(optim: OptimConfig) -> None:
    """Without local steps there is no outer optimizer."""
    for name in ("outer_lr", "outer_momentum"):
        given, default = getattr(optim, name), getattr(OptimConfig, name)
        require(
            given == default,
            f"optim.{name} is {given}, and parallel.local_steps 0: there is no outer optimizer; "
            f"try --parallel.local_steps 50, or leave --optim.{name} out",
        )
