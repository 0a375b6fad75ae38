"""Epochs of sources and of the bands of a score in them, from facts: how often the mix has each document."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.table import Table
from rich.text import Text

from gristmill.counts import Counts
from gristmill.engine.run import StageRun
from gristmill.engine.task import Result, Task
from preprocessing.mixing.drops import load_drops
from preprocessing.mixing.epochs import Amounts, MeasuredSources
from preprocessing.mixing.facts import GroupFacts, is_kept
from preprocessing.mixing.mix_manifest import BandShare
from preprocessing.mixing.sampling import SourceEpochs, random_numbers, select_kth, write_numbers
from preprocessing.scoring.score_choice import ScoreBands

BandEpochs = tuple[SourceEpochs, ...]  # of a source: for each band, or one without bands


@dataclass(frozen=True)
class ChosenEpochs:
    """The weights and the epochs of all sources, and what bands have of each."""

    weights: dict[str, float]
    epochs: dict[str, BandEpochs]
    bands: list[BandShare] = field(default_factory=list)


def choose_epochs(
    run: StageRun,
    weights: Mapping[str, float],
    amounts: Amounts,
    groups: Sequence[GroupFacts],
    seed: int,
    fan_in: int,
    bands: ScoreBands | None = None,
) -> ChosenEpochs:
    """Return the weights and the epochs of all sources, as find_epochs does, from facts.

    Only a source with an amount, or a fractional weight, is measured; with bands each is. A band's epochs are its
    weight times the source's, and exact, too; the weight of a source is then that of all its documents together.
    """
    if bands:
        return _choose_band_epochs(run, weights, amounts, groups, seed, fan_in, bands)
    sources = MeasuredSources(weights, amounts)
    measured = [group for group in groups if group.source in sources]
    tasks = []
    for group in measured:
        output = run.work / "sampling" / f"{group.label}.zst"
        arguments = {"group": group, "seed": seed, "by_tokens": bool(amounts.tokenizer), "output": output}
        tasks.append(Task(group.label, write_epoch_numbers, arguments, (output,)))
    values = run.step("sampling", tasks).values(tuple[int, int])
    for group, task, (documents, amount) in zip(measured, tasks, values, strict=True):
        sources.add(group.source, task.outputs[0], documents, amount)
    joined, of_sources = sources.choose_epochs(run, fan_in)
    return ChosenEpochs(joined, {source: (epochs,) for source, epochs in of_sources.items()})


def _choose_band_epochs(
    run: StageRun,
    weights: Mapping[str, float],
    amounts: Amounts,
    groups: Sequence[GroupFacts],
    seed: int,
    fan_in: int,
    bands: ScoreBands,
) -> ChosenEpochs:
    """Return the weights and the epochs of all sources, each of which has bands."""
    labels_of = dict[str, list[str]]()  # of each band, by source
    numbers = dict[str, list[Path]]()
    for source in weights:
        labels_of[source] = [f"{source}/{band}" for band in range(len(bands.names))]
        for label in labels_of[source]:
            numbers[label] = []
    documents = dict.fromkeys(numbers, 0)
    amount_kept = dict.fromkeys(numbers, 0)
    tasks = []
    for group in groups:
        outputs = list[Path]()
        for label, name in zip(labels_of[group.source], bands.names, strict=True):
            output = run.work / "sampling" / name / f"{group.label}.zst"
            outputs.append(output)
            numbers[label].append(output)
        arguments = {"group": group, "seed": seed, "by_tokens": bool(amounts.tokenizer), "outputs": outputs}
        tasks.append(Task(group.label, write_band_numbers, arguments, tuple(outputs)))
    measured = run.step("sampling", tasks).values(list[tuple[int, int]])
    for group, of_bands in zip(groups, measured, strict=True):
        for label, (number, amount) in zip(labels_of[group.source], of_bands, strict=True):
            documents[label] += number
            amount_kept[label] += amount
    band_weights = dict[str, float]()
    joined = dict[str, float]()
    for source, weight in weights.items():
        if source in amounts.of:
            weighed = list[float]()
            for label, weight_of_band in zip(labels_of[source], bands.weights, strict=True):
                weighed.append(weight_of_band * amount_kept[label])
            weight = amounts.weight(source, round(sum(weighed)))
        kept = 0
        mixed = list[float]()
        for label, weight_of_band in zip(labels_of[source], bands.weights, strict=True):
            band_weights[label] = weight * weight_of_band
            kept += documents[label]
            mixed.append(documents[label] * band_weights[label])
        joined[source] = weight
        if kept:
            joined[source] = sum(mixed) / kept
    ranks = dict[str, int]()
    for label, total in documents.items():
        ranks[label] = round(band_weights[label] % 1 * total)
    limits = select_kth(run, "epochs", numbers, ranks, fan_in)
    epochs = dict[str, BandEpochs]()
    shares = list[BandShare]()
    for source in weights:
        epochs_of_bands = list[SourceEpochs]()
        for label in labels_of[source]:
            epochs_of_bands.append(SourceEpochs(int(band_weights[label]), limits.get(label)))
        epochs[source] = tuple(epochs_of_bands)
        for label, name in reversed(list(zip(labels_of[source], bands.names, strict=True))):
            shares.append(BandShare(source, name, band_weights[label], documents[label]))
    return ChosenEpochs(joined, epochs, shares)


def write_epoch_numbers(group: GroupFacts, seed: int, by_tokens: bool, output: Path) -> Result:
    """Task: write a random number for each document that is not dropped, to sample by.

    The value is how many they are, and how many bytes of text they have, or tokens.
    """
    drops = load_drops(group.drops, group.names)
    chunks = [np.empty(0, np.uint64)]
    amount = 0
    for facts in group.load():
        kept = is_kept(facts, drops[facts.name].reasons(facts.rows))
        chunks.append(random_numbers(seed, "weight", facts.name, facts.rows)[kept])
        sizes = facts.tokens if by_tokens else facts.sizes
        amount += int(sizes[kept].sum())
    write_numbers(output, np.concatenate(chunks))
    return Result(Counts({}, []), (sum(map(len, chunks)), amount))


def write_band_numbers(group: GroupFacts, seed: int, by_tokens: bool, outputs: list[Path]) -> Result:
    """Task: write what write_epoch_numbers writes, of each band to its output. The value is that of each band."""
    drops = load_drops(group.drops, group.names)
    chunks = [[np.empty(0, np.uint64)] for _ in outputs]
    amounts = [0] * len(outputs)
    for facts in group.load():
        kept = is_kept(facts, drops[facts.name].reasons(facts.rows))
        numbers = random_numbers(seed, "weight", facts.name, facts.rows)
        sizes = facts.tokens if by_tokens else facts.sizes
        for band in range(len(outputs)):
            chosen = kept & (facts.bands == band)
            chunks[band].append(numbers[chosen])
            amounts[band] += int(sizes[chosen].sum())
    measured = list[tuple[int, int]]()
    for output, of_band, amount in zip(outputs, chunks, amounts, strict=True):
        write_numbers(output, np.concatenate(of_band))
        measured.append((sum(map(len, of_band)), amount))
    return Result(Counts({}, []), measured)


def bands_table(bands: Sequence[BandShare]) -> Table:
    """Return how many documents each band has in each source, and how many of the mix it makes."""
    table = Table("source", "band", title="bands of the score", box=None, pad_edge=False)
    for name in ("documents", "weight", "in the mix"):
        table.add_column(name, justify="right")
    for share in bands:
        numbers = [f"{share.documents:,}", f"{share.weight:g}", f"{share.mixed:,}"]
        table.add_row(Text(share.source), Text(share.band), *numbers)
    return table
