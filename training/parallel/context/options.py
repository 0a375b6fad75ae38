"""Context parallelism's options, and the check that a model and its sequences fit them."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from gristmill.config import Range
from gristmill.errors import require
from training.model.model_config import ModelConfig
from training.parallel.size_error import require_size
from training.parallel.tensor.options import TensorOptions, kv_copies


@dataclass(frozen=True)
class ContextOptions(TensorOptions):
    """Ranks over which the tokens of each sequence are divided; tensor parallelism may divide them once more."""

    cp: int = field(default=1, repr=False)
    """Context-parallel ranks: the tokens of each sequence are divided over them, so that each has 1 / cp of all
    activations. For parameters they are replicas, over which ZeRO shards too."""
    context: Literal["ring", "ulysses"] = field(default="ring", repr=False)
    """How tokens attend to those of other cp ranks. ring: keys and values circulate (Liu et al. 2023); ulysses: an
    all-to-all gives each rank all tokens of some heads (Jacobs et al. 2023)."""
    RANGES: ClassVar[dict[str, Range]] = {"cp": Range(1, 2**31 - 1)}

    @property
    def context_chunks(self) -> int:
        """Return chunks of a sequence that a rank has: of a ring two, an early and a late one, where cp divides it."""
        return 2 if self.cp > 1 and self.context == "ring" else 1

    @property
    def sequence_parts(self) -> int:
        """Number of equal parts into which a sequence must divide: chunks over cp ranks, tokens over tp ranks."""
        return self.cp * math.lcm(self.context_chunks, self.sequence_shards)

    def describe_context(self) -> list[str]:
        """Return the words for logs, such as "cp 2 (ring)"."""
        return [f"cp {self.cp} ({self.context})"] * (self.cp > 1)

    def check_context(self, model: ModelConfig, seq_len: int) -> None:
        """Raise UsageError unless the model's sequences, of `seq_len` tokens, can be divided over cp."""
        cp = self.cp
        tp = self.tp
        require_size(
            cp > 1 or self.context == "ring",
            f"parallel.context {self.context} has no effect with parallel.cp 1",
            "cp",
            range(2, model.heads + 1),
            "--parallel.context ring",
        )
        if cp == 1:
            return
        require(
            not model.query_layer,
            f"model.query_layer and parallel.cp {cp}: its queries are not divided yet; try --parallel.cp 1 and more "
            "--parallel.tp",
        )
        common = math.gcd(model.heads, model.kv_heads * kv_copies(model, tp)) // tp
        require_size(
            self.context == "ring" or common % cp == 0,
            f"model.heads {model.heads} and kv_heads {model.kv_heads} are not divisible by parallel.tp {tp} x "
            f"parallel.cp {cp}, over which ulysses divides them",
            "cp",
            [size for size in range(min(cp, common), 1, -1) if common % size == 0],
            "--parallel.context ring",
        )
        parts = self.sequence_parts
        of_tp = f" and its tokens over parallel.tp {tp}" if self.sequence_parallel else ""
        require(
            seq_len % parts == 0,
            f"data.seq_len {seq_len} is not divisible by {parts}: {self.context} divides a sequence into "
            f"{cp * self.context_chunks} chunks over parallel.cp {cp}{of_tp}; try --data.seq_len "
            f"{-(-seq_len // parts) * parts}",
        )

    def check_context_blocks(self, recompute: str, compiled: bool) -> None:
        """Raise UsageError for recomputation or compilation of blocks that cp does not support."""
        require(
            self.cp == 1 or self.context == "ring" or not compiled,
            f"compile and parallel.context {self.context}: blocks whose heads are exchanged are not compiled yet; "
            "try --compile false, or --parallel.context ring",
        )
        require(
            self.cp == 1 or not compiled or recompute != "full",
            f"compile and memory.recompute full with parallel.cp {self.cp}: a recomputed block is compiled in one "
            "piece, and a ring is not compiled; try --compile false, or --memory.recompute none",
        )
        require(
            self.cp == 1 or self.context != "ring" or recompute != "selective",
            "memory.recompute selective and parallel.context ring: it keeps the results of products, which for a ring "
            "include the scores of all tokens; try --memory.recompute full, or --parallel.cp 1",
        )
