"""Expert parallelism's options, and the check that a model and its replicas fit them."""

from dataclasses import dataclass, field
from typing import ClassVar

from gristmill.config import Range
from training.model.model_config import ModelConfig
from training.parallel.size_error import require_size


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
        sizes = [size for size in range(model.experts, 0, -1) if model.experts % size == replicas % size == 0]
        nearest = sorted(sizes, key=lambda size: (size > ep, abs(ep - size)))
        fault = f"parallel.ep {ep} divides experts, but the model is dense"
        require_size(model.experts > 0, fault, "ep", [1], "--model.experts 8")
        fault = f"model.experts {model.experts} are not divisible by parallel.ep {ep}"
        require_size(model.experts % ep == 0, fault, "ep", nearest)
        fault = f"the {replicas} ranks of parallel.dp x cp are not divisible by parallel.ep {ep}"
        require_size(replicas % ep == 0, fault, "ep", nearest)
        fault = f"the {shards} ranks over which ZeRO shards are not divisible by parallel.ep {ep}, nor the other way"
        require_size(shards % ep == 0 or ep % shards == 0, fault, "ep", nearest)


def is_expert(name: str) -> bool:
    """Return True for a parameter that has a matrix for each expert."""
    return ".experts." in name
