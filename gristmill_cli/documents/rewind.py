"""Command: the documents that a step of a training run read, in order, and where they came from."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from gristmill.errors import UsageError, require
from gristmill.paths import spell_urls
from gristmill.wording import count_of
from gristmill_cli.documents.token_origins import Origin, TokenOrigins

if TYPE_CHECKING:  # torch takes a second to import
    from training.rewind import DocumentPart, ReadSequence, Rewind, StepSummary

_SHOWN = 100  # characters of a text
_AROUND = 20  # steps before and after that a step is compared with


def rewind(
    run: Positional[Path],
    step: int = 0,
    rank: int | None = None,
    sequence: int | None = None,
    token: int | None = None,
    around: int = 0,
    tokens: tuple[Path, ...] = (),
) -> Group:
    """Show the documents that a training step read, in the order in which they were read, or compare a step.

    The order of the data is a function of the seed and the step, so nothing is recorded while a run trains, and any
    step can be shown, also of a run that is training now. Changes nothing.

    Which documents were in a step: --step 1200. Only what one rank read, the third sequence of it, or the document at
    one token: --step 1200 --rank 3 --sequence 2 --token 511. Is a spike of the loss due to the data: --around 1200.

    Args:
        run: The --out_dir of a training run.
        step: Step whose documents are shown, as the log counts: from 1.
        rank: Only sequences that this data-parallel rank read, from 0. With tensor, pipeline or context parallelism
            several processes are one such rank.
        sequence: Only this sequence of the step, from 0; with --rank, of those of the rank.
        token: Only the documents with this token of their sequence, from 0; the last one, seq_len, is only a target.
        around: Step to compare with the 20 steps before and after it: tokens by source, lengths of documents, and
            scores, where the data run noted some.
        tokens: Folders of the run's token shards, where they are not where the run read them.

    Raises:
        UsageError: the folder is of no training run, its tokens are not there, or there is no such step.
    """
    require((step == 0) != (around == 0), "expected --step N or --around N, one of them; steps count from 1")
    from training.rewind import Rewind  # here, as it imports torch

    reader = Rewind(run, tokens)
    if around:
        require(rank is sequence is token is None, "--rank, --sequence and --token are for --step, not for --around")
        return Group(*_compare(reader, around))
    read = list(choose_sequences(reader, step, rank, sequence))
    if token is not None:
        length = reader.owner(step).data.seq_len
        require(0 <= token <= length, f"--token {token}: expected 0 to {length:,}, a token of a sequence")
        read = [_only_with(read_sequence, token) for read_sequence in read]
    return Group(*_show(reader, step, read, token))


def choose_sequences(reader: "Rewind", step: int, rank: int | None, sequence: int | None) -> Iterator["ReadSequence"]:
    """Yield the sequences of a step, of one rank, or one of them. Raises UsageError where there is no such one."""
    read = list(reader.sequences(step))
    what = f"step {step:,}"
    if rank is not None:
        ranks = reader.ranks(step)
        if ranks is None:
            raise UsageError(f"--rank {rank}: {reader.run} does not say how many ranks read step {step:,}")
        require(
            0 <= rank < ranks, f"--rank {rank}: expected 0 to {ranks - 1}, the data-parallel ranks of step {step:,}"
        )
        read = [read_sequence for read_sequence in read if read_sequence.rank == rank]
        what = f"rank {rank} in step {step:,}"
    if sequence is not None:
        last = len(read) - 1
        require(0 <= sequence <= last, f"--sequence {sequence}: expected 0 to {last:,}, the sequences of {what}")
        read = read[sequence : sequence + 1]
    yield from read


def _only_with(read: "ReadSequence", token: int) -> "ReadSequence":
    """Return a sequence with the document alone that has a token; none if it is padding."""
    parts = [part for part in read.parts if part.first <= token < part.first + part.tokens]
    return read._replace(parts=parts)


def _show(reader: "Rewind", step: int, read: "list[ReadSequence]", token: int | None) -> Iterator[RenderableType]:
    """Yield a line on the step, and of each sequence a line and a table of its documents; their texts from a token."""
    ranks = reader.ranks(step)
    size = reader.owner(step).batches.schedule.size(step - 1)
    length = reader.owner(step).data.seq_len
    heading = f"step {step:,}: {count_of(size, 'sequence')} of {count_of(length, 'token')}"
    if ranks is not None:
        heading += f", read by {count_of(ranks, 'data-parallel rank')}"
    yield Text(heading, "bold")
    if step > reader.steps_done:
        yield Text(
            f"not recorded as taken yet (the last is {reader.steps_done:,}): this is what it reads if the run goes on "
            "with the options of its last start"
        )
    numbers_in = dict[Path, set[int]]()  # of the documents, by folder
    for sequence in read:
        for part in sequence.parts:
            numbers_in.setdefault(part.folder, set()).add(part.in_folder)
    origins = dict[Path, TokenOrigins]()
    known = dict[tuple[Path, int], Origin]()
    for folder in sorted(numbers_in):
        of_folder = TokenOrigins(folder)
        origins[folder] = of_folder
        for number, origin in of_folder.find(numbers_in[folder]).items():
            known[folder, number] = origin
        if of_folder.fault:
            yield Text(f"without keys of the corpus: {of_folder.fault}")
    for sequence in read:
        name = f"sequence {sequence.number:,}"
        if sequence.rank is not None:
            name += f", rank {sequence.rank}"
        yield Text(spell_urls(f"\n{name}: number {sequence.in_set:,} of {sequence.folder}"), "bold")
        table = Table(
            "tokens", "count", "document", "its tokens", "source", "origin and text", box=None, pad_edge=False
        )
        for part in sequence.parts:
            origin = known.get((part.folder, part.in_folder), Origin())
            first = part.before
            if token is not None:
                first += token - part.first
            table.add_row(*_cells(part), _describe(part, origin, origins[part.folder], first))
        filled = sum(part.tokens for part in sequence.parts)
        if token is None and filled <= length:
            table.add_row(f"{filled}–{length}", f"{length + 1 - filled:,}", "padding")
        if table.row_count:
            yield table
        else:
            yield Text("padding")


def _cells(part: "DocumentPart") -> list[Text]:
    return [
        Text(f"{part.first}–{part.first + part.tokens - 1}"),
        Text(f"{part.tokens:,}"),
        Text(f"{part.shard}@{part.in_shard}"),
        Text(f"{part.before:,}–{part.before + part.tokens - 1:,} of {part.length:,}"),
        Text(part.source or "unknown"),
    ]


def _describe(part: "DocumentPart", origin: Origin, origins: TokenOrigins, first: int) -> Text:
    """Return key, id and url of a document, how it begins, and how it continues from its token `first`."""
    names = list[str]()
    if origin.key:
        names.append(str(origin.key))
    if origin.id is not None:
        names.append(f"id {origin.id}")
    if origin.url:
        names.append(origin.url)
    lines = list[str]()
    if names:
        lines.append(", ".join(names))
    text = origin.text
    if text is None:
        text = origins.decode(part.shard, part.in_shard)
    if text is None:
        lines.append(f"no text: the tokenizer is not in {part.folder}")
        return Text("\n".join(lines))
    lines.append(_shorten(text))
    if first:
        rest = origins.decode(part.shard, part.in_shard, first)
        if rest:
            lines.append(f"from its token {first:,}: {_shorten(rest)}")
    return Text("\n".join(lines))


def _shorten(text: str) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(text[: 2 * _SHOWN].split())
    if len(line) <= _SHOWN and len(text) <= 2 * _SHOWN:
        return line
    return f"{line[:_SHOWN]}…"


def _compare(reader: "Rewind", step: int) -> Iterator[RenderableType]:
    """Yield the tokens of a step by source, and its documents' lengths, next to the means of the steps around it."""
    own = reader.summarize(step)
    last = min(reader.last_step, max(reader.steps_done, step), step + _AROUND)
    others = [*range(max(1, step - _AROUND), step), *range(step + 1, last + 1)]
    require(bool(others), f"--around {step}: {reader.run} has no other step to compare it with")
    yield Text(f"step {step:,} beside the mean of {count_of(len(others), 'step')} around it", "bold")
    table = Table("", f"step {step:,}", "mean around it", box=None, pad_edge=False)
    summaries: list[StepSummary] = []
    losses = list[float]()
    sums = Counter[str]()  # of tokens
    lengths_of_steps = list[NDArray[np.int64]]()
    for number in others:
        summary = reader.summarize(number)
        summaries.append(summary)
        sums.update(summary.tokens)
        lengths_of_steps.append(summary.lengths)
        loss = reader.losses.get(number)
        if loss is not None:
            losses.append(loss)
    if losses or step in reader.losses:
        loss = reader.losses.get(step)
        own_loss = "not recorded" if loss is None else f"{loss:.4f}"
        table.add_row("loss", own_loss, _mean_of(losses, "not recorded"))
    total = max(1, sum(own.tokens.values()))
    total_around = max(1, sums.total())
    for name in sorted(sums.keys() | own.tokens.keys()):
        count = own.tokens.get(name, 0)
        mean = sums[name] / len(others)
        table.add_row(
            Text(f"tokens of {name}"),
            f"{count:,} ({count / total:.1%})",
            f"{mean:,.1f} ({sums[name] / total_around:.1%})",
        )
    mean_documents = np.mean(list(map(len, lengths_of_steps)))
    table.add_row("documents", f"{len(own.lengths):,}", f"{mean_documents:,.1f}")
    for name, measure in (("median", np.median), ("longest", np.max)):
        mean_length = np.mean(list(map(measure, lengths_of_steps)))
        table.add_row(f"{name} length of a document, in tokens", f"{measure(own.lengths):,.0f}", f"{mean_length:,.1f}")
    for name, of_step, of_others in _mean_scores(own, summaries):
        table.add_row(Text(f"mean score {name} of a document"), of_step, of_others)
    yield table


def _mean_scores(own: "StepSummary", others: "list[StepSummary]") -> Iterator[tuple[str, str, str]]:
    """Yield each score of the data runs that wrote the tokens, and its means in a step and in others."""
    others_in = dict[Path, list[int]]()  # documents of the other steps, by folder
    for folder in own.documents:
        others_in[folder] = []
    for summary in others:
        for folder, numbers in summary.documents.items():
            others_in.setdefault(folder, []).extend(numbers)
    in_step: dict[str, list[float]] = {}
    around: dict[str, list[float]] = {}
    for folder, of_others in sorted(others_in.items()):
        of_step = own.documents.get(folder, [])
        for name, scores in TokenOrigins(folder).scores({*of_step, *of_others}).items():
            in_step.setdefault(name, [])
            in_step[name] += [scores[number] for number in of_step if number in scores]
            around.setdefault(name, [])
            around[name] += [scores[number] for number in of_others if number in scores]
    for name in in_step:
        yield name, _mean_of(in_step[name]), _mean_of(around[name])


def _mean_of(numbers: list[float], if_none: str = "none") -> str:
    if not numbers:
        return if_none
    return f"{np.mean(numbers):.4f}"
