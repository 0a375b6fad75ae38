"""Expert parallelism's options, and the check that a model and its replicas fit them."""

from dataclasses import dataclass, field
from typing import ClassVar

from gristmill.config import Range
from gristmill.errors import require
from training.model.model_config import ModelConfig


@dataclass(frozen=True)
class ExpertOptions:
    """Ranks over which the experts of sparse layers are divided."""

    ep: int = field(default=1, repr=False)
    """Expert-parallel ranks: neighbouring data-parallel ranks (and those of cp) have different experts, and send each
    other the tokens that chose them."""
    RANGES: ClassVar[dict[str, Range]] = {"ep": Range(1, 2**31 - 1)}

    def check_expert(self, model: ModelConfig, replicas: int, shards: int) -> None:
        """Raise UsageError unless ep divides the experts, and the ranks that are to have them."""
        ep = self.ep
        if ep == 1:
            return
        possible = ", ".join(str(n) for n in range(1, model.experts + 1) if model.experts % n == replicas % n == 0)
        require(
            model.experts > 0,
            f"parallel.ep {ep} divides experts, and the model is dense; try --parallel.ep 1, or --model.experts 8",
        )
        require(
            model.experts % ep == 0,
            f"model.experts {model.experts} are not divisible by parallel.ep {ep}; {possible} are possible",
        )
        require(
            replicas % ep == 0,
            f"the {replicas} ranks of parallel.dp x cp are not divisible by parallel.ep {ep}; {possible} are possible",
        )
        require(
            shards % ep == 0 or ep % shards == 0,
            f"the {shards} ranks over which ZeRO shards are not divisible by parallel.ep {ep}, nor the other way; try "
            f"--parallel.ep {shards}",
        )


def is_expert(name: str) -> bool:
    """True for a parameter that has a matrix for each expert."""
    return ".experts." in name
