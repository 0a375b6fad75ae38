"""Compare: the tensors of a run with the reference's, in order of computation; the first outside its tolerance."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from gristmill_parity.recording.assemble import Array, Copy, check_cover, copies_of, put, take, views_of
from gristmill_parity.recording.evidence import Evidence
from gristmill_parity.recording.files import Key, Recording, RecordingError
from gristmill_parity.recording.patterns import find_pattern
from gristmill_parity.recording.recorder import MODEL, PARAMETERS
from gristmill_parity.recording.reference import Reference, epsilon_of, rows_of
from gristmill_parity.recording.verdict import Pattern, Verdict


@dataclass(frozen=True)
class _Measured:
    """A tensor's difference from the reference."""

    key: Key
    share: float
    """Share of its tolerance."""
    relative: float
    copy: Copy
    """The copy that is off most."""


def compare(reference: str | Path, run: str | Path, leave_out: Sequence[str] = ()) -> Verdict:
    """Compare the recording of a run with that of its reference: the first tensor in order of computation that differs.

    `leave_out`: patterns of the kinds of tensors that are not compared, such as "weight" or "state *".
    Raises RecordingError, of one sentence, for recordings that cannot be compared.
    """
    with np.errstate(all="ignore"):  # values of a wrong run may be any
        wrong = Recording(run)
        for key in list(wrong.tensors):
            if any(fnmatchcase(key.kind, pattern) for pattern in leave_out):
                del wrong.tensors[key]
        right = Reference(Path(reference), wrong)
        verdict = _compare(right, wrong)
        note = _missing_gradients(right.base, wrong, leave_out)
        return verdict if verdict.is_clean or not note else replace(verdict, notes=(*verdict.notes, note))


def _compare(right: Reference, wrong: Recording) -> Verdict:
    _check_names(right.base, wrong)
    keys = [key for key in right.base.tensors if key in wrong.tensors]
    keys.sort(key=lambda key: key.step)
    _check_start(right, wrong, keys)
    first: _Measured | None = None
    largest = 0.0
    outside = 0
    for key in keys:
        try:
            measured = _measure(right, wrong, key)
        except RecordingError:
            if first is None:
                raise
            continue  # what comes after a fault may have any shape
        if measured is None:
            continue
        if measured.share > 1:
            outside += 1
            first = first or measured
        else:
            largest = max(largest, measured.share)
    again = _computed_again(wrong, keys, first.key if first else None)
    if again is not None:
        return again
    if first is None:
        return Verdict(Pattern("none", ""), share=largest, compared=len(keys))
    return _verdict(right, wrong, first, len(keys), outside)


def _missing_gradients(right: Recording, wrong: Recording, leave_out: Sequence[str]) -> str:
    """Say how many gradients of the reference the run does not have in its steps; nothing if it has all."""
    steps = {key.step for key in wrong.tensors}
    missing = [
        key
        for key in right.tensors
        if key not in wrong.tensors
        and key.step in steps
        and key.kind.endswith("gradient")
        and not any(fnmatchcase(key.kind, pattern) for pattern in leave_out)
    ]
    if not missing:
        return ""
    first = min(missing, key=lambda key: key.step)
    what = "gradient of the reference is" if len(missing) == 1 else "gradients of the reference are"
    return (
        f"{len(missing):,} {what} not in the run, first {first} in step {first.step}: a parameter without a gradient "
        "is not updated."
    )


def _measure(right: Reference, wrong: Recording, key: Key) -> _Measured | None:
    """Measure a tensor's difference; None if there is nothing to compare."""
    pieces = wrong.tensors[key]
    copies = copies_of(pieces, wrong)
    base = right.base.tensors[key][0].entry
    check_cover(copies, base.piece.shape, wrong.folder)
    if not base.sketch:
        return _measure_integers(right, key, copies)
    if base.offset < 0 or any(piece.entry.offset < 0 for piece in pieces):
        return _measure_sketches(right, key, copies, epsilon_of(pieces[0].entry.dtype))
    expected = right.tensor(key)
    assert expected is not None
    tolerance = right.tolerance(key, expected, epsilon_of(pieces[0].entry.dtype))
    uncertain = right.uncertain(key)
    norm = float(np.linalg.norm(expected))
    worst: _Measured | None = None
    differences = list[Array]()
    for _, view in views_of(copies):
        difference = np.zeros(expected.shape)
        shares = list[tuple[float, Copy]]()
        for copy in view:
            off = copy.values() - take(expected, copy.index)
            if uncertain is not None:
                off = np.where(take(uncertain, copy.index), 0.0, off)
            put(difference, copy.index, off)
            box = np.zeros(expected.shape)
            put(box, copy.index, off)
            of_box = np.linalg.norm(rows_of(box), axis=1)
            shares.append((_share_of_rows(of_box, tolerance.of_rows), copy))
        off_norm = float(np.linalg.norm(difference))
        by_rows, copy = max(shares, key=lambda pair: pair[0])
        share = _ratio(off_norm, tolerance.of_tensor)
        if tolerance.of_tensor:  # else of rows, too, and any difference is too much
            share = max(share, by_rows)
        for other in differences:
            between = float(np.linalg.norm(difference - other))
            share = max(share, _ratio(between, tolerance.of_copies))
        differences.append(difference)
        if worst is None or share > worst.share:
            worst = _Measured(key, share, _ratio(off_norm, norm), copy)
    return worst


def _ratio(off: float, of: float) -> float:
    """Return a difference as a share of a number that may be 0; infinite for one that is not a number."""
    if off == 0:
        return 0.0
    if np.isnan(off) or of == 0:
        return np.inf
    return off / of


def _share_of_rows(off: Array, tolerance: Array) -> float:
    """Return the largest difference of a row as a share of its tolerance; a hundredth of the rows may be off more.

    In 16 bits a token near a border may choose another expert, which no perturbed run happened to do.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(off > 0, off / tolerance, 0.0)
    left_out = len(shares) // 100
    return float(np.sort(shares)[len(shares) - 1 - left_out]) if len(shares) else 0.0


def _measure_integers(right: Reference, key: Key, copies: Sequence[Copy]) -> _Measured | None:
    expected = right.tensor(key)
    if expected is None or any(held.entry.offset < 0 for copy in copies for held in copy.held):
        return None
    counts = [int((copy.values() != take(expected, copy.index)).sum()) for copy in copies]
    count = max(counts)
    copy = copies[counts.index(count)]
    return _Measured(key, np.inf if count else 0.0, count / max(1, copy.values().size), copy)


def _measure_sketches(right: Reference, key: Key, copies: Sequence[Copy], epsilon: float) -> _Measured | None:
    expected = right.sketch(right.base, key)
    tolerance = right.tolerance_of_sketch(key, expected, epsilon)
    norm = float(np.linalg.norm(expected))
    worst: _Measured | None = None
    for _, view in views_of(copies):
        total = np.sum([copy.sketch() for copy in view], axis=0)
        off = float(np.linalg.norm(total - expected))
        share = _ratio(off, tolerance)
        if worst is None or share > worst.share:
            worst = _Measured(key, share, _ratio(off, norm), view[0])
    return worst


def _computed_again(wrong: Recording, keys: Sequence[Key], before: Key | None) -> Verdict | None:
    """Return a verdict if the backward pass computed something again otherwise, before `before` was computed."""
    if before is not None and "gradient" not in before.kind and before.kind != "weight":
        return None
    for key in keys:
        if before is not None and key.step > before.step:
            break
        for held in wrong.again.get(key, []):
            # of any micro-batch: a pass that stops early, or is repeated, counts otherwise
            twins = [other for other in wrong.tensors[key] if other.rank.rank == held.rank.rank]
            if not twins or any(other.entry.hash == held.entry.hash for other in twins):
                continue
            norm = float(np.linalg.norm(held.entry.sketch))
            off = min(float(np.linalg.norm(np.subtract(other.entry.sketch, held.entry.sketch))) for other in twins)
            relative = off / norm if norm else float("inf")
            if relative < 8 * epsilon_of(held.entry.dtype):
                continue
            sentence = (
                "The backward pass computes it once more (activation checkpointing), and does not get what the forward "
                "pass had: something random, or changed in between, enters the block. Gradients are then those of "
                "other activations."
            )
            return Verdict(
                Pattern("computed again", sentence), key.name, f"{key.kind} (computed again)", key.step,
                held.rank.rank, "", relative, np.inf, len(keys), 1,
            )  # fmt: skip
    return None


def _verdict(right: Reference, wrong: Recording, first: _Measured, compared: int, outside: int) -> Verdict:
    key = first.key
    notes = list[str]()
    if outside > 1:
        notes.append(f"Of {compared:,} tensors {outside - 1:,} further ones are wrong.")
    evidence = _evidence(right, wrong, first)
    if evidence:
        pattern = find_pattern(evidence)
        where = evidence.where()
    else:
        sentence = f'Only sketches were kept: record both sides again with keep=["{key}"] to see where, and what it is.'
        pattern = Pattern("other", sentence)
        where = ""
    return Verdict(
        pattern, key.name, key.kind, key.step, first.copy.rank, where, first.relative, first.share, compared, outside,
        tuple(notes),
    )  # fmt: skip


def _evidence(right: Reference, wrong: Recording, measured: _Measured) -> Evidence | None:
    """Return what patterns look at; None if a side kept only sketches."""
    key = measured.key
    expected = right.tensor(key)
    if expected is None or any(held.entry.offset < 0 for held in wrong.tensors[key]):
        return None
    copies = copies_of(wrong.tensors[key], wrong)
    tolerance = right.tolerance(key, expected, epsilon_of(wrong.tensors[key][0].entry.dtype))
    return Evidence(wrong, key, expected, copies, measured.copy, tolerance.of_tensor, right.tensor)


def _pattern_of(right: Reference, wrong: Recording, measured: _Measured) -> Pattern:
    evidence = _evidence(right, wrong, measured)
    return find_pattern(evidence) if evidence else Pattern("other", "")


def _check_names(right: Recording, wrong: Recording) -> None:
    """Raise RecordingError for a parameter of one side that the other does not have, with the nearest name."""
    for recording in (right, wrong):
        if not _parameters(recording):
            raise RecordingError(f"{recording.folder} has no parameter; check names= in record()")
    for side, other in ((wrong, right), (right, wrong)):
        known = _parameters(other)
        unknown = sorted(_parameters(side) - known)
        if unknown:
            nearest = difflib.get_close_matches(unknown[0], known, 1, 0.0)
            raise RecordingError(
                f"{side.folder} has a parameter {unknown[0]} that {other.folder} does not have; the nearest name there "
                f"is {nearest[0]}: give record() a rename= that makes names equal"
            )


def _parameters(recording: Recording) -> set[str]:
    return {key.name for key in recording.tensors if key.kind in PARAMETERS}


def _check_start(right: Reference, wrong: Recording, keys: Iterable[Key]) -> None:
    """Raise RecordingError if the sides started from other weights, or had other data."""
    initial = [key for key in keys if key.kind == "initial weight"]
    off = list[_Measured]()
    for key in initial:
        measured = _measure(right, wrong, key)
        if measured is not None and measured.share > 1 and measured.relative > 1e-3:
            off.append(measured)
    is_known = bool(off) and _pattern_of(right, wrong, off[0]).kind not in ("other", "noise", "copies differ")
    drawn = [key for key in initial if not _is_constant(right, key)]
    if off and not is_known and len(off) > 0.8 * len(drawn):
        raise RecordingError(
            f"{wrong.folder} starts from other weights than {right.base.folder}: {len(off)} of {len(initial)} "
            f"parameters differ, {off[0].key.name} the first; load the same checkpoint on both sides"
        )
    data = Key(1, MODEL, "input")
    if data in right.base.tensors and data in wrong.tensors:
        held = right.base.tensors[data]
        measured = None if held[0].entry.sketch else _measure(right, wrong, data)
        if measured is not None and measured.share > 1 and _sorted_differs(right, wrong, data):
            raise RecordingError(
                f"{wrong.folder} had other data than {right.base.folder}: inputs of the first step differ from rank "
                f"{measured.copy.rank} on; give both sides the same batch"
            )


def _sorted_differs(right: Reference, wrong: Recording, key: Key) -> bool:
    """Return whether they are not the same tokens in another order."""
    expected = right.tensor(key)
    copies = copies_of(wrong.tensors[key], wrong)
    _, view = next(views_of(copies))
    values = np.concatenate([copy.values().ravel() for copy in view])
    return expected is None or not np.array_equal(np.sort(values), np.sort(expected.ravel()))


def _is_constant(right: Reference, key: Key) -> bool:
    """Return whether every model begins with such weights, as with the ones of a norm."""
    values = right.tensor(key)
    return values is not None and bool(np.all(values == values.flat[0]))
