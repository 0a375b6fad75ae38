"""Data parallelism's options and their checks."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from gristmill.config import Range
from gristmill.errors import require


@dataclass(frozen=True)
class DataOptions:
    """Replicas of the model, and what of them is sharded over replicas (ZeRO)."""

    dp: int = 0
    """Data-parallel replicas, which read different sequences; 0: the number of ranks / (tp x pp x cp)."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage, sharded over replicas: 0 nothing; 1 optimizer state; 2 also gradients; 3 also parameters (FSDP)."""
    zero_group: int = 0
    """Hybrid sharding (HSDP): shard over groups of this many neighbouring replicas, replicate between groups; 0: one
    group."""
    reduce_bf16: bool = field(default=False, kw_only=True)
    """Sum gradients over replicas in bf16 instead of float32: half the bytes, less exact; with precision bf16 only."""
    RANGES: ClassVar[dict[str, Range]] = dict.fromkeys(("dp", "zero_group"), Range(0, 2**31 - 1))

    @property
    def shards_parameters(self) -> bool:
        """Return True with ZeRO-3, where FSDP gathers parameters when they are used.

        Otherwise each rank has them all.
        """
        return self.zero == 3

    def describe_data(self) -> list[str]:
        """Return the words for logs, such as "dp 4", "ZeRO-2"."""
        group = f" over {self.zero_group}" if self.zero_group != self.dp else ""
        return [f"dp {self.dp}"] + [f"ZeRO-{self.zero}{group}"] * (self.zero > 0)

    def check_data(self) -> None:
        """Raise UsageError unless ZeRO's groups divide the replicas."""
        require(
            self.zero > 0 or self.zero_group == 1,
            f"parallel.zero_group {self.zero_group} has no effect with parallel.zero 0; try --parallel.zero 2",
        )
        require(
            self.zero_group > 0 and self.dp % self.zero_group == 0,
            f"parallel.dp {self.dp} is not divisible by parallel.zero_group {self.zero_group}; try one of its divisors",
        )

    def check_precision(self, precision: str) -> None:
        """Raise UsageError for sums in bf16 of gradients that are not."""
        require(
            not self.reduce_bf16 or precision == "bf16",
            f"parallel.reduce_bf16 and precision {precision}: only the gradients of bf16 are sent in bf16; "
            "try --precision bf16, or --parallel.reduce_bf16 false",
        )
