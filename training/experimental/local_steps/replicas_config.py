"""ReplicasConfig: options of replicas that are runs of their own and meet in a folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from gristmill.config import Range
from gristmill.errors import require
from gristmill.storage.stores import store_of
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import MemoryConfig
from training.optim.optim_config import OptimConfig

_MOST = 2**31 - 1


@dataclass(frozen=True)
class ReplicasConfig:
    """Replicas that take local steps, each started by its own launcher, and average their weights through a folder.

    Like parallel.local_steps, where one launcher starts all replicas; here a replica may stop and return on its own.
    """

    RANGES: ClassVar[dict[str, Range]] = {
        **dict.fromkeys(("count", "local_steps"), Range(1, _MOST)),
        "number": Range(0, _MOST),
        "deadline": Range(0, above=True),
    }

    folder: Path | None = None
    """Folder that all replicas can see, for the changes of their local steps; without it the run is not a replica."""
    count: int = 1
    """Number of replicas; each reads its part of every global batch, even while others are away."""
    number: int = 0
    """Number of this replica, from 0; each has its own out_dir."""
    local_steps: int = 50
    """Steps of a replica between two synchronizations."""
    deadline: float = 30.0
    """Seconds that a replica waits for the others at each synchronization. Replicas that do not come are left out, and
    not waited for again until they return."""

    def check(self, local_steps: int, timeout: float) -> None:
        """Raise UsageError for options that exclude each other.

        `local_steps` of parallel; `timeout`: seconds after which a rank that waits gives up.
        """
        if self.folder is None:
            self._check_absent()
            return
        require(
            store_of(self.folder).has_file_locks,
            f"replicas.folder {self.folder} is in a bucket: replicas meet by files that appear at once and are locked; "
            "try a folder that all of them see, on NFS or Lustre",
        )
        require(
            self.number < self.count,
            f"replicas.number is {self.number}, and replicas.count {self.count}; expected 0 to {self.count - 1}",
        )
        require(
            not local_steps,
            f"replicas.folder and parallel.local_steps {local_steps}: replicas meet in a folder, or in one launcher; "
            "try --parallel.local_steps 0, with --replicas.local_steps",
        )
        require(
            self.deadline < timeout,
            f"replicas.deadline {self.deadline:g} and timeout {timeout:g}: ranks would take the one that waits for "
            f"other replicas for a dead one; try --timeout {2 * self.deadline:g}",
        )

    def _check_absent(self) -> None:
        """Without a folder no option has an effect."""
        given = {name: getattr(self, name) for name in ("count", "number", "local_steps", "deadline")}
        changed = [f"{name} {value:g}" for name, value in given.items() if value != getattr(ReplicasConfig, name)]
        local = self.local_steps if self.local_steps > 1 else ReplicasConfig.local_steps
        require(
            not changed,
            f"replicas.{' and '.join(changed)} without replicas.folder: there is no place to meet; try "
            f"--replicas.folder FOLDER, or --parallel.local_steps {local} for replicas in one launcher",
        )

    def record(self) -> dict[str, Any]:
        """Return the options that decide a run's results, by name; empty if it is not a replica."""
        if self.folder is None:
            return {}
        return {f"replicas.{name}": getattr(self, name) for name in ("count", "number", "local_steps")}


def check_local_steps(
    layout: ParallelConfig,
    runs: ReplicasConfig,
    optim: OptimConfig,
    memory: MemoryConfig,
    norms: int,
    timeout: float,
) -> None:
    """Raise UsageError for what does not go together with the local steps of a resolved `layout`.

    `norms`: profile.norms, the steps between norms of layers; `timeout`: seconds that a rank waits for another.
    """
    runs.check(layout.local_steps, timeout)
    if runs.folder is not None:
        require(
            layout.compression == "none",
            f"parallel.compression {layout.compression} and replicas.folder: compressed gradients are not tried with "
            "outer steps; try --parallel.compression none",
        )
        _check_options("replicas.local_steps", runs.local_steps, optim, memory, norms)
    elif layout.local_steps:
        _check_layout(layout)
        _check_options("parallel.local_steps", layout.local_steps, optim, memory, norms)
    else:
        _check_outer_optimizer(optim)


def _check_layout(layout: ParallelConfig) -> None:
    steps = layout.local_steps
    smaller_group = max((n for n in range(1, layout.dp) if layout.dp % n == 0), default=1)
    require(
        not layout.zero or layout.dp == 1 or layout.zero_group < layout.dp,
        f"parallel.zero {layout.zero} shards over all {layout.dp} replicas, so none has its own weights for "
        f"parallel.local_steps {steps}; try --parallel.zero_group {smaller_group}, or --parallel.zero 0",
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
    rest = optim.steps % steps
    require(
        not rest,
        f"optim.steps {optim.steps} is not divisible by {name} {steps}: the last {rest} steps of the replicas would "
        f"not be averaged; try --optim.steps {optim.steps - rest + steps}",
    )
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
        f"profile.norms {norms} and {name} {steps}: each replica has its own norms; try --profile.norms 0",
    )


def _check_outer_optimizer(optim: OptimConfig) -> None:
    """Without local steps there is no outer optimizer."""
    for name in ("outer_lr", "outer_momentum"):
        given = getattr(optim, name)
        default = getattr(OptimConfig, name)
        require(
            given == default,
            f"optim.{name} is {given}, and parallel.local_steps 0: there is no outer optimizer; "
            f"try --parallel.local_steps 50, or leave --optim.{name} out",
        )
