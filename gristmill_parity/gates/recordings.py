"""Recordings: where the recorded steps of two runs first differ, the tensor, the rank and what it looks like."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from gristmill.errors import InputError
from gristmill.wording import count_of
from gristmill_parity.gates.difference import Comparison, FirstDifference
from gristmill_parity.recording.compare import compare
from gristmill_parity.recording.files import Entry, RankRecording, Recording, RecordingError
from gristmill_parity.recording.perturb import BASE, PERTURBED
from gristmill_parity.recording.recorder import STATE
from training.profiling.record_config import RECORDINGS, recording_of

_AFTER_UPDATE = ("weight", f"{STATE} *")
"""AdamW makes whole steps of what is rounding in a gradient, so that no layout has another's weights."""


@dataclass(frozen=True)
class RecordedStep:
    """Comparison of two runs' recordings of a step: a sentence, and the first difference if there is one."""

    said: str
    difference: FirstDifference | None = None


def compare_recordings(comparison: Comparison) -> Iterator[RecordedStep]:
    """Yield what the recordings say of each step that one of the runs recorded.

    Of one layout every bit is to be equal. Other layouts are compared in the first step in which they are other ones:
    both had the same weights then. Raises InputError for recordings that cannot be compared.
    """
    first = comparison.first.folder
    second = comparison.second.folder
    recorded_in_first = _recorded_steps(first)
    recorded_in_second = _recorded_steps(second)
    begins = max(comparison.steps[0], comparison.last_exact + 1)
    for step in sorted(recorded_in_first | recorded_in_second):
        if step not in comparison.steps:
            continue
        if step not in recorded_in_first or step not in recorded_in_second:
            lacking = second if step in recorded_in_first else first
            yield RecordedStep(f"recording of step {step}: not compared, {lacking} has none")
            continue
        one = recording_of(first, step)
        other = recording_of(second, step)
        try:
            if step <= comparison.last_exact:
                yield _compare_bits(step, one, other)
            elif step == begins and any(_has_reference(folder) for folder in (one, other)):
                yield _compare_to_rounding(step, one, other)
            else:
                yield RecordedStep(
                    f"recording of step {step}: not compared, weights of different layouts differ after step {begins}; "
                    f"let both runs begin from a checkpoint of step {step - 1} (--branch_from)"
                )
        except RecordingError as error:
            raise InputError(f"recording of step {step}: {error}") from error


def _recorded_steps(folder: Path) -> set[int]:
    """Return the steps of which a run has a recording."""
    names = [path.name.removeprefix("step-") for path in (folder / RECORDINGS).glob("step-*")]
    return {int(name) for name in names if name.isdecimal()}


def _compare_bits(step: int, one: Path, other: Path) -> RecordedStep:
    """Compare two recordings of one layout, by the hashes of all tensors."""
    first = Recording(one / BASE)
    second = Recording(other / BASE)
    earliest: tuple[int, RankRecording, Entry] | None = None
    count = 0
    for rank, twin in zip(first.ranks, second.ranks, strict=False):
        hashes = dict(_numbered(twin))
        for position, (key, entry) in enumerate(_numbered(rank)):
            count += 1
            same = hashes.get(key)
            if same is not None and same.hash == entry.hash:
                continue
            if earliest is None or position < earliest[0]:
                earliest = (position, rank, entry)
            break
    if earliest is None:
        return RecordedStep(
            f"recording of step {step}: {count_of(count, 'tensor')} of {count_of(len(first.ranks), 'rank')} are equal "
            "bit for bit"
        )
    _, rank, entry = earliest
    how = f"other bits on rank {rank.rank}; expected every bit to be equal"
    is_after_update = any(fnmatchcase(entry.key.kind, pattern) for pattern in _AFTER_UPDATE)
    if not is_after_update and _has_reference(one):
        verdict = compare(one, other / BASE, _AFTER_UPDATE)
        how += f". {_indented(str(replace(verdict, step=step)))}"
    return RecordedStep("", FirstDifference(step, f"{entry.key}", how))


def _numbered(rank: RankRecording) -> Iterator[tuple[tuple[object, ...], Entry]]:
    """Yield the tensors of a rank, in the order of their recording, with a name that no other one has."""
    seen = Counter[tuple[object, ...]]()
    for entry in rank.entries:
        name = (entry.key, entry.call, entry.again)
        seen[name] += 1
        yield (*name, seen[name]), entry


def _compare_to_rounding(step: int, one: Path, other: Path) -> RecordedStep:
    """Compare two recordings of other layouts; that of fewer ranks is the reference."""
    reference, run = sorted((one, other), key=_reference_order)
    verdict = replace(compare(reference, run / BASE, _AFTER_UPDATE), step=step)
    if verdict.is_clean:
        return RecordedStep(
            f"recording of step {step}: {count_of(verdict.compared, 'tensor')} are equal but for rounding; the largest "
            f"difference is {verdict.share:.0%} of its tolerance"
        )
    _, _, text = str(verdict).partition(": ")  # without the tensor and the step, which FirstDifference says
    return RecordedStep("", FirstDifference(step, verdict.tensor, f"in {run.parents[1]} {_indented(text)}"))


def _reference_order(folder: Path) -> tuple[bool, int]:
    """Return a sort key: recordings with perturbed passes first, then those of fewer ranks."""
    return not _has_reference(folder), len(Recording(folder / BASE).ranks)


def _has_reference(folder: Path) -> bool:
    """Return whether a recording has perturbed passes."""
    return any(folder.glob(f"{PERTURBED}-*"))


def _indented(text: str) -> str:
    return text.replace("\n", "\n  ")
