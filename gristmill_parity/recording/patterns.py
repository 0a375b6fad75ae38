"""Patterns: what a wrong tensor looks like beside the right one, and what in a layout does such a thing."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from gristmill_parity.recording.assemble import Array, Copy, coordinate, mean_divisor, put, subsets, take
from gristmill_parity.recording.evidence import EXPLAINED, LEFT_IN_NOISE, Evidence, likely_axes, ratio_of
from gristmill_parity.recording.files import Key, RankTensor
from gristmill_parity.recording.moved import exchanged, shifted
from gristmill_parity.recording.recorder import MICRO_BATCH
from gristmill_parity.recording.scaled_rows import scaled_rows
from gristmill_parity.recording.verdict import Pattern

_LOW_PRECISION = 2.0**-7
"""Share of a tensor that rounding to 16 bits changes."""
_ALMOST_NOTHING = 0.1
"""Share of a tensor's norm that may be left where its largest term is missing."""


def find_pattern(evidence: Evidence) -> Pattern:
    """Return the first pattern that explains the difference; the more specific ones are tried first."""
    for find in (
        _nan,
        _zero,
        _zero_term,
        _stale,
        _not_summed,
        _factor,
        _terms,
        _almost_nothing,
        scaled_rows,
        _any_factor,
        _box_factor,
        _transposed,
        shifted,
        exchanged,
        _mixed,
    ):
        pattern = find(evidence)
        if pattern is not None:
            return pattern
    return _copies_differ(evidence) or _noise(evidence) or _other(evidence)


def _nan(evidence: Evidence) -> Pattern | None:
    count = int((~np.isfinite(evidence.values)).sum())
    if not count:
        return None
    sentence = f"{count:,} of its values are not finite: an overflow, or memory that was never written."
    return Pattern("other", sentence, likely_axes(evidence))


def _zero(evidence: Evidence) -> Pattern | None:
    """Return a tensor or worst piece of zeros."""
    values = evidence.worst.values()
    if values.any() or not take(evidence.expected, evidence.worst.index).any():
        return None
    axes = likely_axes(evidence)
    return Pattern("zero", "Its values are zeros: this rank's part was never computed, received or written.", axes)


def _zero_term(evidence: Evidence) -> Pattern | None:
    """Return a sum of which one rank's term, or one micro-batch's, is zero."""
    terms = list[RankTensor]()
    for copy in evidence.copies:
        terms += copy.held
    for axis in evidence.partial:
        zero = set[int]()
        others = set[int]()
        for held in terms:
            indices = others if any(held.entry.sketch) else zero
            indices.add(coordinate(held, axis))
        if zero and others and not zero & others:
            named = ", ".join(map(str, sorted(zero)))
            sentence = (
                f"The term of {axis} {named} of {len(zero | others)} is zero in the sum over {axis}: these sequences, "
                "or tokens, have no targets, or were dropped."
            )
            return Pattern("missing term", sentence, (axis,))
    return None


def _stale(evidence: Evidence) -> Pattern | None:
    """Return what the tensor was a step before, or with that of the step before added."""
    key = evidence.key
    for earlier in _earlier(key):
        values = evidence.reference(earlier)
        if values is None or np.allclose(values, evidence.expected, rtol=1e-12, atol=0):
            continue
        rows = evidence.expected.copy()  # of which some are those of before: ZeRO's ranks update some each
        if rows.ndim:
            wrong = evidence.wrong_slices(0)
            rows[wrong] = values[wrong]
        if evidence.explains(values) or evidence.explains(rows):
            sentence = (
                "It is what it was a step before: updates were not published or gathered, or are used before they "
                "arrive."
            )
            return Pattern("stale", sentence, likely_axes(evidence))
        if key.kind.endswith("gradient") and evidence.explains(values + evidence.expected):
            sentence = "It has the gradient of the step before in it: gradients were not set to zero."
            return Pattern("stale", sentence, likely_axes(evidence))
    return None


def _earlier(key: Key) -> Iterator[Key]:
    """Yield the tensor in earlier steps, the last one first."""
    for step in range(key.step - 1, 0, -1):
        yield Key(step, key.name, key.kind)
    if key.kind in ("used weight", "weight"):
        yield Key(0, key.name, "initial weight")


def _not_summed(evidence: Evidence) -> Pattern | None:
    """Return copies that differ, and whose sum or mean along axes is what is expected."""
    for axes in subsets(evidence.replicated):
        if not axes:
            continue
        groups = list(_groups_along(evidence, axes).values())
        if all(_are_equal(group) for group in groups):
            continue
        for is_mean, word, wrong in ((False, "sum", "summed"), (True, "mean", "averaged")):
            total = evidence.expected.copy()
            for group in groups:
                values = np.sum([copy.values() for copy in group], axis=0)
                put(total, group[0].index, values / len(group) if is_mean else values)
            left = float(np.linalg.norm(total - evidence.expected))
            if left <= max(EXPLAINED * evidence.off, min(evidence.tolerance, LEFT_IN_NOISE * evidence.off)):
                named = " and ".join(axes)
                sentence = (
                    f"Each rank along {named} has a term of its own, and their {word} is right: it was not {wrong} "
                    f"over {named}. {_of_a_missing_sum(evidence.key)}"
                )
                return Pattern("not summed", sentence, axes)
    return None


def _groups_along(evidence: Evidence, axes: Sequence[str]) -> dict[tuple[object, ...], list[Copy]]:
    """Return the copies of each box whose ranks differ along `axes` alone."""
    groups: dict[tuple[object, ...], list[Copy]] = {}
    for copy in evidence.copies:
        rest = tuple((axis, index) for axis, index in copy.coordinates if axis not in axes)
        groups.setdefault((copy.held[0].entry.piece.index, rest), []).append(copy)
    return groups


def _are_equal(copies: Sequence[Copy]) -> bool:
    """Return whether the first of the copies is their mean, as it is where all are equal."""
    mean = np.sum([copy.values() for copy in copies], axis=0) / len(copies)
    return np.allclose(copies[0].values(), mean, rtol=1e-6)


def _of_a_missing_sum(key: Key) -> str:
    if key.kind in ("gradient", "own gradient", "weight"):
        return "The all-reduce of this parameter's gradient over these ranks is missing, or it is not in its group."
    if "gradient" in key.kind:
        return "The backward pass of the collective before it (an all-reduce of the gradient) is missing."
    return "The all-reduce after the row-parallel product, or the lookup, before it is missing."


def _factor(evidence: Evidence, only_round: bool = True) -> Pattern | None:
    """Return a multiple: by default of a number of ranks."""
    ratio = ratio_of(evidence.values, evidence.expected)
    if abs(ratio - 1) < 1e-9 or not evidence.explains(ratio * evidence.expected):
        return None
    pattern, is_round = _describe_factor(evidence, ratio, "")
    is_number = evidence.expected.size < 2  # one number is a multiple of any other
    if is_number:
        is_told_apart = is_round and abs(ratio / pattern.factor - 1) < 1e-3
    else:
        is_told_apart = is_round or not only_round
    return pattern if is_told_apart else None


def _any_factor(evidence: Evidence) -> Pattern | None:
    return _factor(evidence, only_round=False)


def _almost_nothing(evidence: Evidence) -> Pattern | None:
    """Return a tensor of which nearly nothing is left."""
    norm = float(np.linalg.norm(evidence.expected))
    left = float(np.linalg.norm(evidence.values))
    if evidence.expected.size < 2 or left > _ALMOST_NOTHING * norm:
        return None
    sentence = (
        f"Only {left / norm:.1%} of it is left: the term that is nearly all of it is missing, as one that a loss of "
        "its own (of a router's balance) adds, or a branch that is detached."
    )
    return Pattern("missing term", sentence, likely_axes(evidence))


def _describe_factor(evidence: Evidence, ratio: float, where: str) -> tuple[Pattern, bool]:
    """Return the pattern of a factor, and whether it is a number of ranks, or one over it."""
    sizes = {axis: size for axis, size in evidence.sizes.items() if size > 1}
    micro_batches = _micro_batches(evidence)
    if micro_batches > 1:
        sizes[MICRO_BATCH] = micro_batches
    tolerance = max(0.02, evidence.tolerance / max(float(np.linalg.norm(evidence.expected)), 1e-300))
    ordered = _ordered_axes(evidence, sizes)
    for axes in subsets(ordered):
        if not axes:
            continue
        count = math.prod(sizes[axis] for axis in axes)
        named = " x ".join(axes)
        for value, reason in (
            (float(count), f"it is summed over {named} once too often, or a mean is taken as a sum"),
            (1 / count, f"it is averaged over {named} where it is to be summed, or averaged twice"),
        ):
            if abs(ratio / value - 1) < tolerance:
                sentence = f"It is {_spell(value)} times what is right{where}: {reason}."
                return Pattern("factor", sentence, axes, value), True
    sentence = (
        f"It is {ratio:.6g} times what is right{where}: a scale, of the loss or of a mean, is applied once too often, "
        "or not at all."
    )
    return Pattern("factor", sentence, tuple(ordered[:1]), ratio), False


def _micro_batches(evidence: Evidence) -> int:
    """Return the number of micro-batches of the recording: the calls of the module that has most of them."""
    last_call = 0
    for pieces in evidence.recording.tensors.values():
        for held in pieces:
            last_call = max(last_call, held.entry.call)
    for copy in evidence.copies:
        for held in copy.held:
            last_call = max(last_call, held.entry.call)
    return last_call + 1


def _spell(value: float) -> str:
    return f"{value:.0f}" if value >= 1 else f"1/{1 / value:.0f}"


def _ordered_axes(evidence: Evidence, sizes: dict[str, int]) -> list[str]:
    """Return the axes of several ranks, those first along which gradients of this tensor are terms."""
    known = list[str]()
    terms = _own_terms(evidence)
    if terms:
        known += terms[0].entry.piece.partial
    known += [*evidence.partial, *_batch_axes(evidence), *evidence.replicated, *evidence.shards, *sizes]
    return [axis for axis in dict.fromkeys(known) if axis in sizes]


def _batch_axes(evidence: Evidence) -> list[str]:
    """Return the axes whose ranks have other sequences."""
    axes = list[str]()
    for key, pieces in evidence.recording.tensors.items():
        if key.kind == "output":
            shards = pieces[0].entry.piece.shards
            axes += [axis for axis, dim in shards.items() if dim == 0 and axis not in axes]
    return axes


def _own_terms(evidence: Evidence) -> list[RankTensor]:
    """Return the gradients of a parameter before reduction, in the step of the wrong tensor."""
    key = evidence.key
    if key.kind not in ("gradient", "own gradient"):
        return []
    return evidence.recording.tensors.get(Key(key.step, key.name, "own gradient"), [])


def _terms(evidence: Evidence) -> Pattern | None:
    """Return a sum from which a rank's term is missing, or that has it twice; or a term in place of the sum."""
    terms = _own_terms(evidence)
    axes = tuple(terms[0].entry.piece.partial) if terms else ()
    if not axes or evidence.key.kind != "gradient":
        return None
    return _one_term(evidence, terms, axes) or _own_term(evidence, terms, axes)


def _one_term(evidence: Evidence, terms: Sequence[RankTensor], axes: Sequence[str]) -> Pattern | None:
    """Return a sum from which one term is missing, or that has it twice."""
    for axis in axes:
        by_index = _by_coordinates(terms, [axis])
        for (index,), held in by_index.items():
            own = _sum_of(held, evidence.expected.shape)
            word = ""
            if _is_total(evidence, evidence.expected - own):
                word = "is missing from the sum"
            elif _is_total(evidence, evidence.expected + own):
                word = "is in the sum twice"
            if word:
                sentence = f"The term of {axis} {index} of {len(by_index)} {word} over {axis}."
                if axis == MICRO_BATCH:
                    sentence += " Gradients were set to zero, or sent, between micro-batches."
                return Pattern("missing term", sentence, (axis,))
    return None


def _own_term(evidence: Evidence, terms: Sequence[RankTensor], axes: Sequence[str]) -> Pattern | None:
    """Return a term, or a sum over some of the axes, in place of the sum over all."""
    for summed in subsets(axes):
        rest = [axis for axis in axes if axis not in summed]
        if not rest:
            continue
        for held in _by_coordinates(terms, rest).values():
            if _is_total(evidence, _sum_of(held, evidence.expected.shape)):
                named = " and ".join(rest)
                sentence = (
                    f"It is this rank's own term: the sum over {named} is missing. {_of_a_missing_sum(evidence.key)}"
                )
                return Pattern("not summed", sentence, tuple(rest))
    return None


def _by_coordinates(terms: Sequence[RankTensor], axes: Sequence[str]) -> dict[tuple[int, ...], list[RankTensor]]:
    """Return terms by their ranks' indices along `axes`, in order."""
    groups: dict[tuple[int, ...], list[RankTensor]] = {}
    for held in terms:
        groups.setdefault(tuple(coordinate(held, axis) for axis in axes), []).append(held)
    return dict(sorted(groups.items()))


def _is_total(evidence: Evidence, total: Array) -> bool:
    """Return whether the wrong tensor, or its worst piece, is this one."""
    worst = evidence.worst
    return evidence.explains(total) or evidence.box_explains(take(total, worst.index), worst)


def _sum_of(held: Sequence[RankTensor], shape: tuple[int, ...]) -> Array:
    """Return the sum of terms, each of them once, as a whole tensor."""
    total = np.zeros(shape)
    seen = set[object]()
    for term in held:
        piece = term.entry.piece
        key = (piece.index, tuple(coordinate(term, axis) for axis in piece.partial))
        if key in seen:
            continue  # a copy
        seen.add(key)
        index = piece.indices()
        box = take(total, index) + term.values() / mean_divisor([term])
        put(total, index, box)
    return total


def _box_factor(evidence: Evidence) -> Pattern | None:
    """Return a factor of the worst piece alone, or of some slices."""
    expected = take(evidence.expected, evidence.worst.index)
    if expected.size < 2:
        return None
    ratio = ratio_of(evidence.worst.values(), expected)
    if abs(ratio - 1) < 1e-6 or not evidence.box_explains(ratio * expected, evidence.worst):
        return None
    pattern, _ = _describe_factor(evidence, ratio, f" on rank {evidence.worst.rank}")
    return pattern


def _transposed(evidence: Evidence) -> Pattern | None:
    expected = evidence.expected
    for first in range(expected.ndim - 1):
        second = first + 1
        if expected.shape[first] == expected.shape[second] > 1 and evidence.explains(expected.swapaxes(first, second)):
            sentence = (
                f"Dimensions {first} and {second} are exchanged: a matrix is used as it lies in memory, and not its "
                "transpose."
            )
            return Pattern("transposed", sentence, likely_axes(evidence))
    box = take(expected, evidence.worst.index)
    if box.ndim >= 2 and box.shape[-1] == box.shape[-2] > 1:
        other = box.swapaxes(-1, -2)
        if evidence.box_explains(other, evidence.worst):
            return Pattern("transposed", "This rank's block is transposed.", likely_axes(evidence))
    return None


def _mixed(evidence: Evidence) -> Pattern | None:
    """Return a piece that is the sum of all ranks' pieces, which are different parts of the tensor."""
    for axis in evidence.shards:
        worst = evidence.worst
        line = dict[int, Copy]()  # the pieces of the ranks along the axis
        for copy in evidence.copies:
            if copy.coordinates == worst.coordinates and _without(copy, axis) == _without(worst, axis):
                line[coordinate(copy.held[0], axis)] = copy
        boxes = [take(evidence.expected, copy.index) for copy in line.values()]
        if len(boxes) < 2 or len({box.shape for box in boxes}) > 1:
            continue
        if evidence.box_explains(np.sum(boxes, axis=0), worst):
            sentence = (
                f"Each rank along {axis} has the sum of all ranks' pieces: these are different parts of the tensor, "
                f"and were summed over {axis} as if they were terms."
            )
            return Pattern("mixed", sentence, (axis,))
    return None


def _without(copy: Copy, axis: str) -> list[tuple[str, int]]:
    """Return where a copy's rank is along the axes that divide the tensor, but for one."""
    return [(name, coordinate(copy.held[0], name)) for name in copy.held[0].entry.piece.shards if name != axis]


def _copies_differ(evidence: Evidence) -> Pattern | None:
    """Return ranks that must have the same and have not."""
    differing = list[str]()
    for axis in evidence.replicated:
        for group in _groups_along(evidence, [axis]).values():
            first = group[0].values()
            off = max(float(np.linalg.norm(copy.values() - first)) for copy in group)
            if off > 0.02 * evidence.off:
                differing.append(axis)
                break
    if not differing:
        return None
    named = " and ".join(differing)
    sentence = (
        f"The ranks along {named} have to have the same and have not: each computed with something of its own (a mask, "
        "a random number, an offset, statistics of its part), or a sum over them is incomplete."
    )
    return Pattern("copies differ", sentence, tuple(differing))


def _noise(evidence: Evidence) -> Pattern | None:
    norm = float(np.linalg.norm(evidence.expected))
    for dim, size in enumerate(evidence.expected.shape):
        if 2 * len(evidence.wrong_slices(dim)) < size:
            return None  # it is off in some places alone
    if evidence.off > _LOW_PRECISION * norm:
        return None
    sentence = (
        "The difference has no pattern and is small: rounding in a lower precision than the run's, a sum in another "
        "order of magnitude, or an approximate kernel."
    )
    return Pattern("noise", sentence, likely_axes(evidence))


def _other(evidence: Evidence) -> Pattern:
    axes = likely_axes(evidence)
    named = f" Here the ranks along {' and '.join(axes)} do that." if axes else ""
    sentence = (
        "The values are others, not scaled or moved ones: what they are computed from is right, so look at what "
        "computes them, where it depends on a rank's own part: masks, positions, random numbers, statistics, the "
        f"choice of experts.{named}"
    )
    return Pattern("other", sentence, axes)
