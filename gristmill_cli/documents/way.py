"""The way of a document through a run: what became of it in each stage, in words."""

from dataclasses import dataclass
from typing import Any

from gristmill.io.documents import DocKey
from preprocessing.mixing.decisions import HELD_OUT_COPY


@dataclass(frozen=True)
class Fate:
    """The outcome of a document in a stage, in words."""

    stage: str
    outcome: str
    lines: tuple[str, ...] = ()  # of a list, to copy


@dataclass
class Way:
    """The way of a record through a run: its `title`, its fates by stage, and the lines of a list that take it down."""

    title: str
    fates: list[Fate]
    take_down: tuple[str, ...] = ()
    in_tokens: DocKey | None = None  # its key in what was mixed, where that was encoded


def describe_decision(row: dict[str, Any]) -> str:
    """Return what the mix decided on a document, given its row of the decisions."""
    copies = row["copies"]
    if copies == HELD_OUT_COPY:
        return "held out"
    if not copies:
        reason = str(row["reason"])
        if reason.startswith("left out"):
            return reason
        return f"left out: {reason}"
    if copies == 1:
        return "in the train set"
    return f"in the train set {copies} times"
