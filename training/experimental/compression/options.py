"""Gradient compression's options, and the check that it fits a layout."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from gristmill.config import Range
from gristmill.errors import require
from training.model.model_config import ModelConfig
from training.parallel.layout import Layout

DEFAULT_RANK = 4  # PowerSGD's, the largest of the paper's experiments


@dataclass(frozen=True)
class CompressionOptions(Layout):
    """A layout whose replicas may send compressed gradients."""

    compression: Literal["none", "powersgd", "int8"] = field(default="none", repr=False)
    """Compression of the gradients that replicas send, each remembering its error (error feedback). powersgd:
    approximations of rank `compression_rank` (Vogels et al. 2019); int8: 8-bit codes in blocks with a scale each."""
    compression_rank: int = field(default=DEFAULT_RANK, repr=False)
    """Rank of PowerSGD's approximations: a matrix of n x m numbers is sent as rank x (n + m)."""
    RANGES: ClassVar[dict[str, Range]] = {**Layout.RANGES, "compression_rank": Range(1, 2**31 - 1)}

    def describe_data(self) -> list[str]:
        first, *others = super().describe_data()
        rank = f" of rank {self.compression_rank}" * (self.compression == "powersgd")
        return [first + f" ({self.compression}{rank})" * (self.compression != "none"), *others]

    def unused(self) -> set[str]:
        return super().unused() | ({"compression", "compression_rank"} - self.compression_record().keys())

    def compression_record(self) -> dict[str, str | int]:
        """Return the options of compression that have an effect, by name; they change what a run computes."""
        rank = {"compression_rank": self.compression_rank} if self.compression == "powersgd" else {}
        return {"compression": self.compression, **rank} if self.compression != "none" else {}

    def check(self, processes: int, model: ModelConfig, seq_len: int) -> None:
        super().check(processes, model, seq_len)
        how = self.compression
        rank = self.compression_rank
        require(
            how == "powersgd" or rank == DEFAULT_RANK,
            f"parallel.compression_rank {rank} has no effect with parallel.compression {how}; "
            "try --parallel.compression powersgd",
        )
        if how == "none":
            return
        require(
            self.replicas > 1,
            f"parallel.compression {how} and one replica, which sends no gradients; try --parallel.dp 2, or "
            "--parallel.compression none",
        )
        require(
            self.zero == 0,
            f"parallel.compression {how} and parallel.zero {self.zero}: ZeRO sends the parameters of every step in "
            "full, so that compressed gradients save little; try --parallel.zero 0",
        )
        require(
            not self.reduce_bf16,
            f"parallel.compression {how} and parallel.reduce_bf16 are two ways to send less; try "
            "--parallel.reduce_bf16 false",
        )
        require(
            not model.tied or self.pp == 1,
            f"parallel.compression {how}, model.tied and parallel.pp {self.pp}: two stages have terms of the "
            "embedding's gradient, and what each leaves out is not one memory; try --model.tied false, or "
            "--parallel.pp 1",
        )

    def check_run(self, precision: str, recompute: str, compiled: bool) -> None:
        super().check_run(precision, recompute, compiled)
        require(
            self.compression == "none" or precision != "fp16",
            f"parallel.compression {self.compression} and precision fp16: what is left out would be "
            "remembered at another scale of the loss; try --precision bf16, or --parallel.compression none",
        )
