"""Verdict: the first tensor of a run that is wrong, in two to five sentences."""

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "none", "not summed", "mixed", "factor", "missing term", "zero", "shifted", "other order", "transposed", "stale",
    "computed again", "scaled rows", "copies differ", "noise", "other",
]  # fmt: skip


@dataclass(frozen=True)
class Pattern:
    """Pattern that a wrong tensor makes beside the right one."""

    kind: Kind
    sentence: str
    axes: tuple[str, ...] = ()
    """The axes that it points to, the likeliest first."""
    factor: float = 1.0


@dataclass(frozen=True)
class Verdict:
    """Verdict of `compare`: nothing is wrong, or the first tensor outside its tolerance."""

    pattern: Pattern
    name: str = ""
    kind: str = ""
    """The tensor's: output, input gradient, own gradient, weight, …"""
    step: int = 0
    rank: int = 0
    """The rank where it is worst."""
    where: str = ""
    """The part that is worst."""
    relative: float = 0.0
    """2-norm of the difference over that of the tensor."""
    share: float = 0.0
    """The difference over its tolerance: of the first outside it, else the largest of all."""
    compared: int = 0
    outside: int = 0
    """Tensors outside their tolerance, of those compared."""
    notes: tuple[str, ...] = field(default=())

    @property
    def is_clean(self) -> bool:
        """Return whether no tensor is outside its tolerance."""
        return self.pattern.kind == "none"

    @property
    def tensor(self) -> str:
        """Return the name and kind of the tensor."""
        return f"{self.name} {self.kind}"

    def __str__(self) -> str:
        if self.is_clean:
            text = (
                f"No difference: {self.compared:,} tensors are those of the reference, up to rounding; the largest "
                f"difference is {self.share:.0%} of its tolerance."
            )
            return " ".join([text, *self.notes])
        where = f"rank {self.rank}"
        if self.where:
            where += f", {self.where}"
        lines = [
            f"The first wrong tensor is {self.tensor} in step {self.step}: it differs by {self.relative:.1e} of its "
            f"norm, {self.share:,.3g} times what rounding explains.",
            f"It is worst on {where}.",
            self.pattern.sentence,
        ]
        return "\n".join([*lines, *self.notes])
