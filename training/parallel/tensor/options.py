"""Tensor parallelism's options, and the check that a model and its sequences fit them."""

import math
from dataclasses import dataclass
from typing import ClassVar

from gristmill.config import Range
from gristmill.errors import require
from training.model.model_config import ModelConfig
from training.parallel.size_error import require_size


@dataclass(frozen=True)
class TensorOptions:
    """Ranks over which every matrix is sharded, by rows or columns."""

    tp: int = 1
    """Tensor-parallel ranks: every matrix is sharded over them (Shoeybi et al. 2019, Megatron-LM)."""
    sequence_parallel: bool = False
    """With tp: shard the activations between the matrices along the sequence, which saves memory (Korthikanti et al.
    2022)."""
    RANGES: ClassVar[dict[str, Range]] = {"tp": Range(1, 2**31 - 1)}

    @property
    def sequence_shards(self) -> int:
        """Return the ranks that share the tokens of a sequence between the tensor-parallel regions."""
        return self.tp if self.sequence_parallel else 1

    @property
    def batch_shards(self) -> int:
        """Return the parts into which tensor-parallel ranks divide the sequences of a replica."""
        return 1

    @property
    def feature_shards(self) -> int:
        """Return the parts into which tensor-parallel ranks divide the features between two layers."""
        return 1

    def kv_copies(self, model: ModelConfig) -> int:
        """Ranks that have a copy of the same key-value head: more than 1 where there are more ranks than heads."""
        return kv_copies(model, self.tp)

    def attention_widths(self, model: ModelConfig) -> tuple[int, int]:
        """Return the features of the queries, and of the keys, of the heads of one tensor-parallel rank."""
        return model.q_width // self.tp, model.kv_width * kv_copies(model, self.tp) // self.tp

    def describe_tensor(self) -> list[str]:
        """Return the words for logs, such as "tp 2"."""
        return [f"tp {self.tp}" + " with sequence parallelism" * self.sequence_parallel] * (self.tp > 1)

    def check_tensor(self, model: ModelConfig, seq_len: int) -> None:
        """Raise UsageError unless tp divides the model, and with sequence parallelism the sequences."""
        tp = self.tp
        possible = possible_sizes(model)
        nearest = sorted(possible, key=lambda size: (size > tp, abs(tp - size)))
        for name in ("heads", "ffn_width", "expert_width"):
            size = getattr(model, name)
            fault = f"model.{name} {size} is not divisible by parallel.tp {tp}"
            require_size(size % tp == 0, fault, "tp", nearest)
        fault = f"model.kv_heads {model.kv_heads} is not divisible by parallel.tp {tp}, nor the other way"
        require_size(divides_heads(model, tp), fault, "tp", nearest)
        require(
            tp == 1 or not model.qk_norm_joint or model.norm == "rms",
            f"model.qk_norm_joint, model.norm {model.norm} and parallel.tp {tp}: only RMSNorm can be divided over all "
            "heads; try --model.norm rms, or --parallel.tp 1",
        )
        fault = f"a vocabulary of {model.vocab_size} is too small for parallel.tp {tp}"
        require_size(tp in possible, fault, "tp", nearest)
        require_size(
            not self.sequence_parallel or tp > 1,
            "parallel.sequence_parallel shards the sequence over parallel.tp, which is 1",
            "tp",
            [size for size in possible if size > 1],
            "--parallel.sequence_parallel false",
        )
        require(
            not self.sequence_parallel or seq_len % tp == 0,
            f"data.seq_len {seq_len} is not divisible by parallel.tp {tp}, over which sequence_parallel shards it; "
            f"try --data.seq_len {-(-seq_len // tp) * tp}",
        )


def kv_copies(model: ModelConfig, tp: int) -> int:
    """Neighbouring ranks that have the same head of keys and values: several where heads are fewer than ranks."""
    return max(1, tp // model.kv_heads)


def divides_heads(model: ModelConfig, tp: int) -> bool:
    """Return whether `tp` ranks divide the heads; of those of keys and values each has several, or several have one."""
    return model.heads % tp == 0 and (model.kv_heads % tp == 0 or tp % model.kv_heads == 0)


def possible_sizes(model: ModelConfig) -> list[int]:
    """Return the numbers of ranks that divide the model, in ascending order."""
    common = math.gcd(model.heads, model.ffn_width, model.expert_width)
    # with a smaller vocabulary the last rank could be left without a row
    return [
        n for n in range(1, common + 1) if common % n == 0 and divides_heads(model, n) and n * n <= model.vocab_size
    ]
