"""The funnel of a run, and its command: documents removed and kept by each stage, and files not read, per source."""

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text
from tyro.conf import Positional

from gristmill.counts import (
    HELD_OUT,
    INCOMING,
    NOT_READ,
    READ,
    TOTAL,
    WRITTEN,
    Counts,
    Tally,
    file_columns,
    list_faults,
)
from gristmill.errors import ConservationError, GristmillError, InputError, UsageError, require, wrap_read_errors
from gristmill.io.documents import folder_of
from gristmill.io.token_shards import Manifest, SourceRecord
from gristmill.paths import spell_urls
from gristmill.storage.files import is_file, read_file, write_file
from gristmill.wording import count_of
from preprocessing.document_pass import NOTED
from preprocessing.quality.recipe import RULES

FUNNEL_FILE = "funnel.json"
TRAIN = "train"
_OUT = re.compile(r"\bOUT(?=/| --|[:,;]|$)")
_RULES = "rules"  # column of all rules of a recipe


def at_folder(warnings: Iterable[str], out: Path) -> list[str]:
    """Return the warnings with the path of the run's folder, which they name OUT in records: it may be moved."""
    folder = shlex.quote(spell_urls(str(out)))
    return [_OUT.sub(lambda _: folder, line) for line in warnings]


class Funnel(msgspec.Struct, rename={"tallies": "went"}, omit_defaults=True):
    """`funnel.json`: documents and bytes per source and reason, and tokens per source.

    `tallies[source][reason]` (`went` in the file) counts documents, bytes and files; for each source `read + repeated`
    equals the sum of all other reasons but `not read`, which is of files. `tokens["train" | "holdout"][source]`
    counts tokens. `damaged` has the files that were left out, by name, and why. `warnings` say what looks
    wrong, and where to look.
    """

    tallies: dict[str, dict[str, Tally]]
    tokens: dict[str, dict[str, int]]
    damaged: dict[str, str] = {}
    warnings: list[str] = []

    def save(self, folder: Path) -> None:
        write_file(folder / FUNNEL_FILE, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    def __rich__(self) -> Group:
        counts = Counts(self.tallies, [])
        lost = [reason for reason in counts.reasons if reason not in (*INCOMING, TRAIN, HELD_OUT)]
        columns = [reason for reason in INCOMING if reason in counts.reasons]
        rules = list[str]()
        others = list[str]()
        for reason in lost:
            if reason in RULES:
                rules.append(reason)
            else:
                others.append(reason)
        if rules:
            columns.append(_RULES)
        columns += [*others, HELD_OUT, TRAIN]
        summed = {_RULES: rules}
        files = file_columns(counts)
        documents = _table("funnel: documents", list(map(_heading, columns)))
        sizes = _table("", ["MB in", "MB train", "tokens train", *files])
        of_train = self.tokens[TRAIN]
        for source in [*sorted(self.tallies), None]:
            name = Text(TOTAL)
            style = "bold"
            tokens = sum(of_train.values())
            if source:
                name = Text(source)
                style = ""
                tokens = of_train.get(source, 0)
            totals = list[str]()
            for column in columns:
                reasons = summed.get(column, [column])
                total = sum(counts.total(reason, source).documents for reason in reasons)
                totals.append(f"{total:,}")
            documents.add_row(name, *totals, style=style)
            megabytes_in = counts.total(READ, source).bytes / 1e6
            megabytes_out = counts.total(TRAIN, source).bytes / 1e6
            of_files = [write(source) for write in files.values()]
            sizes.add_row(name, f"{megabytes_in:,.2f}", f"{megabytes_out:,.2f}", f"{tokens:,}", *of_files, style=style)
        parts = list[RenderableType]()
        for line in self.warnings:
            parts.append(Text(f"warning: {line}", style="bold"))
        parts.append(documents)
        if rules:
            parts += [Text(), self._by_rule(counts, rules)]
        parts += [Text(), sizes]
        if self.damaged:
            parts.append(Text(f"left out: {list_faults(self.damaged)}"))
        return Group(*parts)

    def _by_rule(self, counts: Counts, rules: Sequence[str]) -> Table:
        """Return the documents that each rule of a recipe removed, per source."""
        sources = sorted(self.tallies)
        table = _table("documents removed by rules", ["all", *sources])
        table.columns[0].header = "rule"
        for rule in sorted(rules, key=lambda rule: -counts.total(rule).documents):
            removed = [f"{counts.total(rule, source).documents:,}" for source in (None, *sources)]
            table.add_row(rule, *removed)
        return table


def _table(title: str, columns: Sequence[str]) -> Table:
    source = Column("source", no_wrap=True)
    table = Table(source, title=title or None, box=None, pad_edge=False, collapse_padding=True)
    for name in columns:
        table.add_column(escape(name), justify="right")
    return table


def show_funnel(out: Positional[Path]) -> Funnel:
    """Print the funnel of a finished run: documents removed and kept by each stage, per source.

    Args:
        out: The run's --out folder.

    Raises:
        InputError: funnel.json is damaged or does not add up.
    """
    funnel = read_funnel(out)
    funnel.warnings = at_folder(funnel.warnings, out)
    return funnel


def read_funnel(out: Path) -> Funnel:
    """Return the funnel of a finished run, as funnel.json has it. Raises as show_funnel."""
    path = out / FUNNEL_FILE
    if not is_file(path):
        raise UsageError(f"there is no {path}: give the --out of a `gristmill run` that has finished")
    with wrap_read_errors(path):
        content = read_file(path)
    try:
        funnel = msgspec.json.decode(content, type=Funnel)
        Counts(funnel.tallies, []).check_conserved("the whole run")
        require(TRAIN in funnel.tokens, "it has no tokens of the train set")
    except (msgspec.DecodeError, UnicodeDecodeError, GristmillError) as error:
        fault = str(error)
        if isinstance(error, ConservationError):
            fault = "its counts do not add up"
        raise InputError(f"{path} is damaged ({fault}): run the same `gristmill run` again, which writes it") from error
    return funnel


def build_funnel(stages: Sequence[Counts], manifests: dict[str, Manifest], warnings: Sequence[str] = ()) -> Funnel:
    """Join the counts of the stages that documents flow through, in order; what the last one writes is for training.

    Raises ConservationError unless documents are conserved.
    """
    whole = Counts({}, [])
    last = len(stages) - 1
    for position, stage in enumerate(stages):
        for source, reason, tally in stage.rows():
            is_of_first_alone = reason == READ or reason.startswith(NOT_READ)
            if is_of_first_alone and position > 0:
                continue
            if reason in (WRITTEN, NOTED, HELD_OUT) and position < last:
                continue
            outcome = TRAIN if reason == WRITTEN else reason
            whole.add(source, outcome, tally.bytes, tally.documents, tally.files)
    whole.check_conserved("the whole run")
    tokens = dict[str, dict[str, int]]()
    for name, manifest in manifests.items():
        tokens[name] = {source: record.tokens for source, record in of_folders(manifest).items()}
    damaged = {name: damage.fault for name, damage in stages[0].damaged.items()}
    return Funnel(whole.tallies, tokens, damaged, list(warnings))


def load_manifests(out: Path) -> dict[str, Manifest]:
    """Return the manifests of the train set and the holdout of a run, by name."""
    return {name: Manifest.load(out / "tokens" / name) for name in (TRAIN, HELD_OUT)}


def of_folders(manifest: Manifest) -> dict[str, SourceRecord]:
    """Return the totals of each folder of the corpus: of the bands of its score, SOURCE/BAND, together."""
    totals = dict[str, SourceRecord]()
    for name, record in manifest.sources.items():
        total = totals.setdefault(folder_of(name), SourceRecord())
        total.documents += record.documents
        total.tokens += record.tokens
        total.bytes += record.bytes
    return totals


def check_counts_between(
    stage: str,
    counts: Counts,
    reasons: Sequence[str],
    next_stage: str,
    next_counts: Counts,
    sizes: bool = True,
) -> None:
    """Raise ConservationError unless `next_stage` read the documents that `stage` counted under these reasons.

    With `sizes`, also as many bytes.
    """
    for source in sorted({*counts.tallies, *next_counts.tallies}):
        out = Tally()
        for reason in reasons:
            tally = counts.total(reason, source)
            out.add(tally.documents, tally.bytes)
        read = next_counts.total(READ, source)
        if (out.documents, out.bytes * sizes) != (read.documents, read.bytes * sizes):
            raise ConservationError(
                f"between {stage} and {next_stage}, source {source!r}: {count_of(out.documents, 'document')} "
                f"({out.bytes:,} bytes) were written and {read.documents:,} ({read.bytes:,} bytes) were read. "
                "If a file between the two was edited, remove it and run again"
            )


def _heading(name: str) -> str:
    """Return a column's name with its sign, on two lines if it is long: a row of all columns fits 80 characters."""
    if len(name) < 8:
        return f"{_sign(name)}{name}"
    return f"{_sign(name)}\n{name}".strip()


def _sign(name: str) -> str:
    if name in (TRAIN, HELD_OUT):
        return "= "
    if name == READ:
        return ""
    if name in INCOMING:
        return "+ "
    return "- "
