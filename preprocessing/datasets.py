"""Sources and their weights: the number of epochs of each source in the training mix.

A weight of 1.0 writes every document of a source once, 2.5 writes each twice and an exact random
half of them once more, 0.25 an exact random quarter. Set weights on the command line
(`--weights book=2.5,c4=1`; a name with a comma in double quotes: `"a,b"=2`), in a TOML file
(`--weights mix.toml`, lines `book = 2.5`; any name in quotes: `"a,b" = 2`), or below.
"""

import csv
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from gristmill.counts import HELD_OUT, IN_HOLDOUT, MALFORMED, READ, SKIPPED, WRITTEN, Counts, Tally
from gristmill.errors import UsageError, require
from preprocessing.mixing.drops import DROPPED
from preprocessing.mixing.epochs import MAX_WEIGHT, Amounts
from preprocessing.mixing.shuffle_buckets import MANIFEST_NAME

DEFAULT_WEIGHT = 1.0

WEIGHTS: dict[str, float] = {
    "arxiv": 1.0,
    "book": 1.0,
    "c4": 1.0,
    "common_crawl": 1.0,
    "github": 1.0,
    "stackexchange": 1.0,
    "wikipedia": 1.0,
}
"""Weights of SlimPajama's sources; any other source has DEFAULT_WEIGHT."""


def source_weights(given: Mapping[str, float] | str, sources: Iterable[str]) -> dict[str, float]:
    """Return weight of every source: from `given` (a mapping, '', 'book=2.5,c4=1' or a .toml path), else from WEIGHTS.

    Raises UsageError for a source that the corpus does not have, or of a name that none can have; for a weight that is
    not from 0 to MAX_WEIGHT, or none above 0.

    >>> source_weights("book=2.5", ["book", "blogs"])
    {'blogs': 1.0, 'book': 2.5}
    """
    given = _read(given, "weights")
    sources = sorted(sources)
    if MANIFEST_NAME in sources:
        raise UsageError(
            f"a source is named {MANIFEST_NAME}, as a file that pass1 writes next to it: rename its folder"
        )
    _reject_unknown(given, sources, "weights")
    for source, weight in given.items():
        if not 0 <= weight <= MAX_WEIGHT:  # nan neither
            raise UsageError(
                f"--weights {source}={weight}: expected a number of epochs, 0 or more and at most {MAX_WEIGHT:,}, "
                "such as 2.5"
            )
    weights = {source: float(given.get(source, WEIGHTS.get(source, DEFAULT_WEIGHT))) for source in sources}
    if weights and not any(weights.values()):
        raise UsageError("--weights leaves out every source: expected a weight above 0 for one of them")
    return weights


def source_amounts(
    by_bytes: Mapping[str, float] | str,
    by_tokens: Mapping[str, float] | str,
    tokenizer: Path | None,
    weights: Mapping[str, float] | str,
    sources: Iterable[str],
) -> Amounts:
    """Return the amounts of --bytes or of --tokens, in the forms that source_weights takes.

    There is no source if neither is given.

    Raises UsageError for both, or weights with them; for tokens without a tokenizer, or it alone; for a source that the
    corpus does not have, and an amount that is not above 0.
    """
    unit = "bytes"
    given = by_bytes
    if by_tokens:
        unit = "tokens"
        given = by_tokens
    require(not (by_bytes and by_tokens), "--bytes and --tokens are both given: expected one of them")
    require(
        not (given and weights),
        f"--{unit} and --weights are both given: expected one of them; a source without an amount is read once",
    )
    require(not by_tokens or bool(tokenizer), "--tokens needs --tokenizer, to count them by: give both")
    require(not tokenizer or bool(by_tokens), "--tokenizer has no effect without --tokens: give both")
    amounts = _read(given, unit)
    _reject_unknown(amounts, sorted(sources), unit)
    for source, amount in amounts.items():
        require(
            0 < amount < float("inf"),
            f"--{unit} {source}={amount:g}: expected a number of {unit} above 0, such as 2e9; to leave out a source, "
            "leave its folder out of the corpus",
        )
    return Amounts(amounts, tokenizer)


def _read(given: Mapping[str, float] | str, option: str) -> Mapping[str, float]:
    if not isinstance(given, str):
        return given
    if given.endswith(".toml"):
        return _from_toml(Path(given), option)
    return parse_weights(given, option)


def _reject_unknown(given: Iterable[str], sources: Sequence[str], option: str) -> None:
    unknown = sorted(set(given) - set(sources))
    if unknown:
        raise UsageError(
            f"--{option} names {', '.join(map(repr, unknown))}: the corpus has the sources "
            f"{', '.join(map(repr, sources))}; give {option} of these only"
        )


def shares_table(weights: Mapping[str, float], counts: Counts, amounts: Amounts = Amounts()) -> Table:
    """Return a table of each source's share of the mix, requested and realised, by documents and by bytes of text.

    Requested is computed from the weights and the documents that were not dropped; realised is what was written.
    Where amounts were asked for, they are there, too, and the bytes that were written.
    """
    table = Table("source", "weight", title="shares of the mix (requested → realised)", box=None, pad_edge=False)
    columns = ["documents", "by documents", "by bytes"]
    if amounts.of:
        columns.append(amounts.unit)
    for name in columns:
        table.add_column(name, justify="right")
    requested = dict[str, tuple[float, float]]()  # documents and bytes
    for source, weight in weights.items():
        kept_documents, kept_bytes = kept_by_mix(counts, source)
        requested[source] = (weight * kept_documents, weight * kept_bytes)
    documents_requested = sum(documents for documents, _ in requested.values())
    bytes_requested = sum(size for _, size in requested.values())
    total = mixed_tally(counts)
    for source, weight in weights.items():
        written = mixed_tally(counts, source)
        documents, size = requested[source]
        cells = [
            f"{_share(documents, documents_requested)} → {_share(written.documents, total.documents)}",
            f"{_share(size, bytes_requested)} → {_share(written.bytes, total.bytes)}",
        ]
        if source in amounts.of:
            amount = f"{amounts.of[source]:,.0f}"
            if not amounts.tokenizer:
                amount += f" → {written.bytes:,}"
            cells.append(amount)
        table.add_row(Text(source), f"{weight:g}", f"{written.documents:,}", *cells)
    return table


def _share(amount: float, total: float) -> str:
    return f"{amount / (total or 1):.2%}"


def mixed_tally(counts: Counts, source: str | None = None) -> Tally:
    """Return the documents in the mix of a source, or of all, copies included: in the train set or held out."""
    mixed = Tally()
    for reason in (WRITTEN, HELD_OUT, IN_HOLDOUT):
        tally = counts.total(reason, source)
        mixed.add(tally.documents, tally.bytes)
    return mixed


def kept_by_mix(counts: Counts, source: str) -> tuple[int, int]:
    """Return the documents and bytes of a source that weights apply to: not short, duplicate, malformed or skipped."""
    read = counts.total(READ, source)
    documents = read.documents
    size = read.bytes
    for reason, tally in counts.tallies.get(source, {}).items():
        if reason in DROPPED or reason.startswith((MALFORMED, SKIPPED)):
            documents = documents - tally.documents
            size = size - tally.bytes
    return documents, size


def parse_weights(text: str, option: str = "weights") -> dict[str, float]:
    """Parse the text form of weights, or amounts: name=number, separated by commas. UsageError for any other form.

    The last `=` of a part ends the name. A name with a comma is in double quotes, and a double quote in
    it is doubled.

    >>> parse_weights('book=2.5,"stories, old"=1,lang=de=3')
    {'book': 2.5, 'stories, old': 1.0, 'lang=de': 3.0}
    """
    try:
        names = list[str]()
        weights = dict[str, float]()
        for part in next(csv.reader([text], skipinitialspace=True), []):
            if part.strip():
                name, _, weight = part.rpartition("=")
                names.append(name.strip())
                weights[name.strip()] = float(weight)
    except (ValueError, csv.Error):
        names = []
        weights = {}
    if not all(names) or len(weights) < len(names) or bool(text.strip()) > bool(names):
        raise UsageError(
            f"--{option} {text}: expected source=number,… with each source once, such as book=2.5,c4=1 (a name with "
            'a comma in double quotes: "a,b"=2), or a .toml file'
        )
    return weights


def _from_toml(path: Path, option: str) -> dict[str, float]:
    try:
        weights = tomllib.loads(path.read_text(encoding="utf-8"))
        return {name: _number(weight) for name, weight in weights.items()}
    except (OSError, tomllib.TOMLDecodeError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f'--{option} {path}: expected a TOML file of lines such as `book = 2.5` or `"my books" = 2` ({error})'
        ) from error


def _number(weight: object) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ValueError(f"{weight!r} is not a number")
    return float(weight)
