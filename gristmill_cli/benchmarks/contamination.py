"""Command: which items of benchmarks are in the training text, and a model's scores with and without them."""

import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import tyro
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from gristmill.budget import usable_cores
from gristmill.engine.execution.call import Call
from gristmill.engine.execution.local import LocalExecutor
from gristmill.errors import require
from gristmill.io.documents import CorpusFile
from gristmill.storage.files import reject_remote
from gristmill.storage.local import atomic_write_bytes
from gristmill.wording import count_of
from gristmill_cli.benchmarks.texts import Part, TokenPart, parts_of
from gristmill_cli.documents.token_origins import TokenOrigins
from preprocessing.contamination.benchmarks import ALL_FIELDS, SHORTEST, Benchmarks, IndexFiles, write_index
from preprocessing.contamination.ngrams import find_words
from preprocessing.contamination.report import EXACT, NEAR
from preprocessing.decontaminate import check_limits
from training.tasks.harness import require_lm_eval
from training.tasks.item_scores import ItemScore, aggregate, read_item_scores

Kind = Literal["exact", "near", "none", "not searched"]
_KINDS: tuple[Kind, ...] = ("exact", "near", "none", "not searched")
_PLACES = 5  # of an item that are named
_ITEMS = 5  # that are printed
_SHOWN = 300  # characters of a passage


class FoundIn(msgspec.Struct):
    """A passage of a training document that has an item: exact, or a near-duplicate; the share of the item's words.

    `key` is the document's key in the corpus, where a data run knows it.
    """

    match: str
    share: float
    folder: str
    document: str
    source: str
    text: str
    number: int = -1
    key: str = ""


class ItemContamination(msgspec.Struct):
    """An item, its scores, and where it is in the training text; `documents` counts exact and near matches.

    An item of fewer than 8 words is not searched.
    """

    task: str
    item: int
    contamination: Kind
    documents: dict[str, int]
    places: list[FoundIn]
    metrics: dict[str, object]


@dataclass
class _Places:
    """Documents that have an item: their number by kind of match, and the best passages."""

    documents: dict[str, int] = field(default_factory=lambda: {EXACT: 0, NEAR: 0})
    best: list[FoundIn] = field(default_factory=list)

    def add(self, places: Sequence[FoundIn], documents: dict[str, int]) -> None:
        """Add documents, and keep the best of all passages, equally good ones in their order."""
        for kind, count in documents.items():
            self.documents[kind] += count
        both = [*self.best, *places]
        both.sort(key=lambda found_in: (found_in.match != EXACT, -found_in.share))
        self.best = both[:_PLACES]


def contamination(
    items: Positional[Path],
    trained_on: Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FOLDER …")]],
    near: float = 0.6,
    out: Path | None = None,
    tokenizer: Path | None = None,
    text_column: str = "text",
    workers: int | None = None,
) -> Group:
    """Say which items of benchmarks are in the training text, and the scores with and without them.

    An item is in a document exactly if the two share 13 consecutive words, or all words of an item of 8 to 12; it is
    near if one passage has the share --near of the item's words, in runs of 5 or more. These are the rules of
    `gristmill decontaminate`. An item's texts are those fields of its record that its question or its right answer has;
    wrong answers do not count. An item of fewer than 8 words is not searched for.

    gristmill evaluate OUT/model --tasks mill.yaml --items items.jsonl

    gristmill contamination items.jsonl OUT/tokens/train

    Args:
        items: File that gristmill evaluate --tasks … --items FILE wrote.
        trained_on: Folders of what the model was trained on: token shards, which are decoded, or a corpus.
        near: Share of an item's words that a near-duplicate has, 0.5 to 1; 0: look for exact matches only.
        out: JSON lines file: for each item its contamination, the documents that have it, and its scores.
        tokenizer: Tokenizer of the token shards, where it is not next to them.
        text_column: The column or field of a corpus that holds the text.
        workers: Worker processes; by default one per core.
    """
    require(bool(trained_on), "expected folders of what the model was trained on, such as OUT/tokens/train, got none")
    require(workers is None or workers > 0, f"--workers {workers}: expected 1 or more")
    reject_remote(*filter(None, [items, out]))
    check_limits(0, 1, 0, near)
    require_lm_eval("contamination")
    scores = read_item_scores(items)
    parts = list[Part]()
    for folder in trained_on:
        parts += parts_of(folder, tokenizer, text_column)
    searched = find_items(scores, parts, near, workers or usable_cores())
    _name_documents(searched)
    if out is not None:
        encoder = msgspec.json.Encoder()
        atomic_write_bytes(out, encoder.encode_lines(searched))
    return Group(*_report(scores, searched))


def find_items(
    scores: Sequence[ItemScore], parts: Sequence[Part], near: float, workers: int
) -> list[ItemContamination]:
    """Return for each item where it is in the texts of `parts`."""
    places_by_item = dict[int, _Places]()
    rows = list[int]()
    searchable = list[ItemScore]()
    for number, item in enumerate(scores):
        if any(map(_is_long, item.texts)):
            rows.append(number)
            searchable.append(item)
    if rows:
        with tempfile.TemporaryDirectory(prefix="gristmill-") as folder, LocalExecutor(workers) as executor:
            index = _write_index(Path(folder), searchable, near)
            calls = [Call(search_part, {"part": part, "index": index, "near": near}) for part in parts]
            results = dict(executor.run(calls))
        for _, of_part in sorted(results.items()):
            for row, places in of_part.items():
                places_by_item.setdefault(rows[row], _Places()).add(places.best, places.documents)
    searched = list[ItemContamination]()
    numbers_searched = set(rows)
    for number, item in enumerate(scores):
        places = places_by_item.get(number, _Places())
        kind: Kind = "none"
        if number not in numbers_searched:
            kind = "not searched"
        elif places.documents[EXACT]:
            kind = "exact"
        elif places.documents[NEAR]:
            kind = "near"
        searched.append(
            ItemContamination(item.task, item.item, kind, places.documents, places.best, dict(item.metrics))
        )
    return searched


def _is_long(text: str) -> bool:
    return len(find_words(text)) >= SHORTEST


def _write_index(folder: Path, items: Sequence[ItemScore], near: float) -> IndexFiles:
    """Write the index of the texts of items, a record for each."""
    path = folder / "items.jsonl"
    records = list[dict[str, str]]()
    for item in items:
        records.append({f"text{number}": text for number, text in enumerate(item.texts)})
    path.write_bytes(msgspec.json.Encoder().encode_lines(records))
    index = IndexFiles.in_folder(folder)
    write_index([CorpusFile(path, path.name, path.stat().st_size, ALL_FIELDS)], index, near > 0)
    return index


def search_part(part: Part, index: IndexFiles, near: float) -> dict[int, _Places]:
    """Return the places of items, by the rows of their records, in the documents of a part; a worker calls it."""
    benchmarks = Benchmarks(index, near)
    folder = str(part.folder) if isinstance(part, TokenPart) else ""
    places_by_item = dict[int, _Places]()
    for document in part.read():
        of_document = dict[int, FoundIn]()
        for match in benchmarks.find(find_words(document.text)):
            name_of_item = benchmarks.items.column("item")[match.item].as_py()
            row = int(name_of_item.rpartition("@")[2])
            text = document.text[match.start : min(match.end, match.start + _SHOWN)]
            kind = NEAR if match.near else EXACT
            share = round(match.share, 3)
            found_in = FoundIn(kind, share, folder, document.name, document.source, text, document.number)
            before = of_document.get(row)
            if before is None or (found_in.match == EXACT, found_in.share) > (before.match == EXACT, before.share):
                of_document[row] = found_in
        for row, found_in in of_document.items():
            places_by_item.setdefault(row, _Places()).add([found_in], {found_in.match: 1})
    return places_by_item


def _name_documents(searched: Sequence[ItemContamination]) -> None:
    """Fill in the keys in the corpus of documents of tokens, where a data run knows them."""
    of_folders = dict[str, list[FoundIn]]()
    for item in searched:
        for found_in in item.places:
            if found_in.number >= 0:
                of_folders.setdefault(found_in.folder, []).append(found_in)
    for folder, named in of_folders.items():
        origins = TokenOrigins(Path(folder)).find({found_in.number for found_in in named})
        for found_in in named:
            origin = origins.get(found_in.number)
            if origin and origin.key:
                found_in.key = str(origin.key)


@dataclass
class _TaskScores:
    """The scores of a task's items: of all, of those without contamination, and of the others; items of each kind."""

    scores: list[ItemScore] = field(default_factory=list)
    clean: list[ItemScore] = field(default_factory=list)
    contaminated: list[ItemScore] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)


def _by_task(scores: Sequence[ItemScore], searched: Sequence[ItemContamination]) -> dict[str, _TaskScores]:
    """Return the scores of each task, in the order of the items."""
    tasks = dict[str, _TaskScores]()
    for score, item in zip(scores, searched, strict=True):
        of_task = tasks.setdefault(score.task, _TaskScores())
        of_task.scores.append(score)
        of_task.kinds[item.contamination] += 1
        if _is_contaminated(item):
            of_task.contaminated.append(score)
        else:
            of_task.clean.append(score)
    return tasks


def _report(scores: Sequence[ItemScore], searched: Sequence[ItemContamination]) -> Iterable[RenderableType]:
    """Yield a table of the tasks, and a line for some of the items that were found."""
    table = Table("task", "items", *_KINDS, "metric", "all", "without", "contaminated", box=None, pad_edge=False)
    for task, of_task in _by_task(scores, searched).items():
        counts = [f"{of_task.kinds[kind]:,}" for kind in _KINDS]
        cells = [task, f"{of_task.kinds.total():,}", *counts]
        whole = aggregate(of_task.scores)
        without = aggregate(of_task.clean)
        alone = aggregate(of_task.contaminated)
        for metric, value in whole.items():
            values = [f"{value:.4f}"]
            for scores_of_part in (without, alone):
                values.append(f"{scores_of_part[metric]:.4f}" if metric in scores_of_part else "–")
            table.add_row(*map(Text, [*cells, metric, *values]))
            cells = [""] * len(cells)
        if not whole:
            table.add_row(*map(Text, cells))
    yield table
    contaminated = [item for item in searched if _is_contaminated(item)]
    for item in contaminated[:_ITEMS]:
        yield Text(_describe(item))
    if len(contaminated) > _ITEMS:
        yield Text(f"and {count_of(len(contaminated) - _ITEMS, 'other item')}; --out FILE has all")


def _is_contaminated(item: ItemContamination) -> bool:
    return item.contamination in (EXACT, NEAR)


def _describe(item: ItemContamination) -> str:
    """Return where an item is: in how many documents, and the best passage."""
    best = item.places[0]
    name = best.key
    if not name:
        name = "/".join(filter(None, [best.folder, best.document]))
        if best.source:
            name += f" ({best.source})"
    documents = count_of(sum(item.documents.values()), "document")
    passage = " ".join(best.text[:100].split())
    return f"{item.task} {item.item}: {item.contamination}, in {documents}, such as {name}: {passage}"
