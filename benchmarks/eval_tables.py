"""Markdown tables of eval_dedup: detection, removal and planted pairs against the ground truth."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.dedup_tables import markdown
from benchmarks.exact_jaccard import Sets, jaccard_of
from dedup import Sketch, deduplicate, signatures
from dedup.clustering.lsh import band_digests
from gristmill.errors import UsageError

MAX_CANDIDATES = 20_000_000
_Z = 1.96  # 95 % of a normal distribution


@dataclass(frozen=True)
class Documents:
    """Texts of the documents in order, and their ids."""

    texts: list[str]
    ids: list[str]


@dataclass(frozen=True)
class Truth:
    """Ground truth: shingle sets, similar pairs (n × 2, the later first), and their similarity (n)."""

    sets: Sets
    pairs: NDArray[np.int64]
    similarity: NDArray[np.float64]


def digests_of(values: NDArray[np.uint32], shingles: NDArray[np.int64], rows: int, bands: int) -> NDArray[np.uint64]:
    """Band digests (bands × documents, uint64); a document without shingles gets unique digests."""
    digests = band_digests(values, rows, bands)
    (without,) = np.nonzero(shingles == 0)
    digests[:, without] = without
    return digests


def curve_table(known: Truth, seeds: Sequence[NDArray[np.uint64]], rows: int, bands: int) -> str:
    """Detection rate by similarity: measured over all seeds, and in theory."""
    expected = 1 - (1 - known.similarity**rows) ** bands
    hits = np.array([_have_common_band(digests, known.pairs) for digests in seeds]).reshape(len(seeds), -1)
    lines = []
    for low in np.arange(0, 1.01, 0.05):
        chosen = (known.similarity >= low - 1e-9) & (known.similarity < low + 0.05 - 1e-9)
        if chosen.any():
            lines.append(_curve_row(f"{low:.2f}", hits[:, chosen], float(expected[chosen].mean())))
    head = ("similarity", "pairs", "found (mean of seeds)", "rate", "theory", "95 % of the rate", "holds")
    title = f"Detection, {bands} bands of {rows} rows, {len(seeds)} seeds"
    return markdown(title, head, lines, ["theory: 1 − (1 − s^rows)^bands, the mean over the pairs of a row"])


def _curve_row(name: str, hits: NDArray[np.bool_], expected: float) -> list[str]:
    rate = float(hits.mean())
    low, high = wilson_interval(hits)
    holds = low - 1e-9 <= expected <= high + 1e-9
    return [name, f"{hits.shape[1]:,}", f"{hits.sum(axis=1).mean():,.1f}", f"{rate:.3f}", f"{expected:.3f}",
            f"{low:.3f}..{high:.3f}", "yes" if holds else "NO"]  # fmt: skip


def wilson_interval(hits: NDArray[np.bool_]) -> tuple[float, float]:
    """Wilson's 95 % wilson_interval of a rate, for hits (seeds × pairs).

    Pairs of one cluster are detected together, so the effective number of trials is smaller: it is divided
    by the variance between seeds over that of independent trials (Kish's design effect).
    """
    rate, trials = float(hits.mean()), float(hits.size)
    if len(hits) > 1 and 0 < rate < 1:
        trials /= max(1.0, float(hits.mean(axis=1).var(ddof=1)) * hits.shape[1] / (rate * (1 - rate)))
    share = _Z**2 / trials
    middle, half = rate + share / 2, _Z * math.sqrt(rate * (1 - rate) / trials + share / trials / 4)
    return (middle - half) / (1 + share), (middle + half) / (1 + share)


def _have_common_band(digests: NDArray[np.uint64], pairs: NDArray[np.int64]) -> NDArray[np.bool_]:
    found = np.zeros(len(pairs), bool)
    for band in digests:
        found |= band[pairs[:, 0]] == band[pairs[:, 1]]
    return found


def candidates(digests: NDArray[np.uint64]) -> NDArray[np.int64]:
    """All pairs (n × 2, the later first) that share a band."""
    width, found = digests.shape[1], np.empty(0, np.int64)
    for band in digests:
        order = np.argsort(band, kind="stable")
        starts = np.flatnonzero(np.diff(band[order])) + 1
        groups = [group for group in np.split(order, starts) if len(group) > 1]
        if sum(len(group) ** 2 for group in groups) > 2 * MAX_CANDIDATES:
            raise UsageError("too many candidates to list: give a larger --range, or fewer --documents")
        pairs = [group[later] * width + group[earlier] for group in groups
                 for later, earlier in [np.tril_indices(len(group), -1)]]  # fmt: skip
        found = np.unique(np.concatenate([found, *pairs]))
    return np.stack(np.divmod(found, width), axis=1)


def removal_table(
    given: Documents, known: Truth, sketch: Sketch, settings: Sequence[tuple[int, int]], threshold: float
) -> str:
    """Candidate pairs and removed documents per setting, with and without verification."""
    expected = duplicates(known, threshold, len(given.texts))
    rows = []
    for width, bands in settings:
        digests = digests_of(*signatures(given.texts, sketch), width, bands)
        pairs = candidates(digests)
        exact, all_similar = jaccard_of(known.sets, pairs), known.pairs[known.similarity >= threshold]
        found = _ratio(_have_common_band(digests, all_similar).sum(), len(all_similar))
        for verify in (None, "jaccard"):
            done = deduplicate(given.texts, sketch, width, bands, verify=verify, threshold=threshold if verify else 0.8)
            removed = done.duplicate_of != np.arange(len(given.texts))
            rows.append([f"{bands} × {width}", verify or "off", f"{len(pairs):,}",
                         _ratio(np.count_nonzero(exact >= threshold), len(pairs)), found, f"{removed.sum():,}",
                         *_removal_scores(removed, done.kept, known, expected, threshold)])  # fmt: skip
    head = ("bands × rows", "verify", "candidate pairs", "precision", "recall", "removed", "precision of removal",
            "recall of removal", "duplicates left")  # fmt: skip
    notes = [
        f"precision: share of candidate pairs at {threshold} or more; recall: candidates among all such pairs",
        "precision of removal: share of removed documents with that similarity to a kept one",
        f"recall of removal: share of the {expected.sum():,} documents with that similarity to an earlier kept one",
        "duplicates left: kept documents with that similarity to an earlier kept one",
    ]
    return markdown("Removal", head, rows, notes)


def _removal_scores(
    removed: NDArray[np.bool_], kept: NDArray[np.int64], known: Truth, expected: NDArray[np.bool_], threshold: float
) -> tuple[str, str, str]:
    is_kept = np.zeros(len(removed), bool)
    is_kept[kept] = True
    one, other = known.pairs[known.similarity >= threshold].T
    similar = np.zeros(len(removed), bool)
    similar[one[is_kept[other]]] = True
    similar[other[is_kept[one]]] = True
    left = np.zeros(len(removed), bool)
    left[one[is_kept[one] & is_kept[other]]] = True
    right = _ratio(np.count_nonzero(removed & similar), np.count_nonzero(removed))
    return right, _ratio(np.count_nonzero(removed & expected), np.count_nonzero(expected)), f"{left.sum():,}"


def duplicates(known: Truth, threshold: float, documents: int) -> NDArray[np.bool_]:
    """Duplicates (documents, bool): at or above the threshold to an earlier document that is not a duplicate itself."""
    found = np.zeros(documents, bool)
    similar = known.pairs[known.similarity >= threshold]
    for later, earlier in similar[np.lexsort((similar[:, 1], similar[:, 0]))].tolist():
        found[later] |= not found[earlier]
    return found


def planted_table(
    known: Truth, sketch: Sketch, signed: tuple[NDArray[np.uint32], NDArray[np.int64]],
    settings: Sequence[tuple[int, int]], planted: NDArray[np.int64], given: Documents,
) -> str:  # fmt: skip
    """Planted pairs detected per setting: as candidate pairs, and in one cluster."""
    exact, rows = jaccard_of(known.sets, planted), []
    for width, bands in settings:
        found = _have_common_band(digests_of(*signed, width, bands), planted)
        clusters = deduplicate(given.texts, sketch, width, bands, verify=None).duplicate_of[planted]
        together = np.count_nonzero(clusters[:, 0] == clusters[:, 1])
        theory = float(np.mean(1 - (1 - exact**width) ** bands))
        rows.append([f"{bands} × {width}", f"{len(planted):,}", f"{found.sum():,}", f"{together:,}", f"{theory:.3f}"])
    spread = f"{exact.min():.3f}, {np.median(exact):.3f}, {exact.max():.3f}" if len(exact) else "none"
    head = ("bands × rows", "planted", "candidates", "in one cluster", "theory: rate")
    return markdown("Planted pairs", head, rows, [f"their exact similarity (minimum, median, maximum): {spread}"])


def _ratio(part: int | np.integer, whole: int | np.integer) -> str:
    return f"{part / whole:.4f}" if whole else "none"
