"""Command: show what a run removed as duplicates, each text next to the one that was kept, with differences marked."""

import heapq
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from itertools import groupby, islice, takewhile
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from dedup.cluster_graph import pairwise_jaccard, read_some
from dedup.minhash.matching_form import Unit
from gristmill.engine.executors.staging import local_copies
from gristmill.errors import GristmillError, UsageError, require
from gristmill.io.documents import PART_FIELD, DocKey, Document, normal_name, parse_name
from gristmill.io.parquet_files import open_parquet
from gristmill.io.readers import read_corpus
from gristmill.storage.files import is_file, is_folder, resolved
from gristmill.wording import count_of
from gristmill_cli.run_config import Dedup, recorded_options
from gristmill_cli.stages.pipeline import corpus_folders

DUPLICATES = Path("dup/duplicates.parquet")
CLUSTERS = Path("dup/connected_components.parquet")
CORPORA = corpus_folders()  # of a run, the first that is there
_BEFORE = 12  # words before the first difference that are shown
_SHOWN = 160  # words of each text that are shown
_COLUMNS = ("file", "row", "kept_file", "kept_row", "similarity", "id", "kept_id")
_LONGEST_WORD = 40  # characters: of a longer one, as in Chinese, each character is compared
_WORD = re.compile(r"\S+")
GONE = "the text is no longer there"


class Pair(NamedTuple):
    """A removed document, the one that was kept in its place, and their similarity; None if it was not measured."""

    removed: DocKey
    kept: DocKey
    similarity: float | None


def show_duplicates(
    out: Positional[Path],
    of: str = "",
    source: str = "",
    largest: int = 0,
    show: int = 5,
    text_column: str = "text",
) -> Group:
    """Show duplicates that a run removed, next to what it kept; the least similar pairs first.

    Args:
        out: Folder of a run, also in a bucket.
        of: Only pairs with this document, given by its id, its key, such as book/a.jsonl@12, or a file of yours and a
            row (book/a.parquet@12 or /data/book/a.jsonl@12). Rows count from 0.
        source: Only pairs with a document of this source.
        largest: Show this many of the largest clusters instead of pairs.
        show: Number of pairs, or of clusters by their first two documents, to show with their texts.
        text_column: The column or field that holds the text.

    Returns:
        The pairs or clusters, for a terminal.
    """
    require(
        (bool(of) + bool(source) + bool(largest)) < 2,
        "--of, --source and --largest choose different things: give one of them",
    )
    require(largest >= 0 and show >= 1, f"--largest {largest} --show {show}: expected positive numbers")
    if not is_file(out / DUPLICATES):
        raise UsageError(f"{out}: expected the folder of a run, with {DUPLICATES} in it; gristmill run writes one")
    corpus = corpus_of(out)
    if corpus is None:
        raise UsageError(f"{out} has no {' or '.join(CORPORA)} folder: the texts are no longer there to be shown")
    if largest:
        return _show_clusters(out, corpus, largest, show, text_column)

    def is_meant(row: dict[str, Any]) -> bool:
        if of:
            return of in (row.get("id"), row.get("kept_id"))
        return not source or source in [key.source for key in _keys_of(row)]

    total, pairs = _find_pairs(out / DUPLICATES, is_meant, show)
    if of and not pairs:  # it may be a key
        keys = _keys_meant(out, of, text_column) if "@" in of else set()
        total, pairs = _find_pairs(out / DUPLICATES, lambda row: not keys.isdisjoint(_keys_of(row)), show)
    if of and not pairs:
        raise UsageError(
            f"--of {of}: {DUPLICATES} has no pair with it, as an id or a key: it was not removed as a duplicate, nor "
            "kept for one, or there is no such document. For other removals, see gristmill funnel and gristmill browse"
        )
    if source and not pairs:
        raise UsageError(f"--source {source}: no document of it was removed as a duplicate, nor kept for one")
    what = f"with {of}" if of else f"of {source}" if source else "removed as duplicates"
    title = Text(f"documents {what}: {total:,}; shown: {len(pairs):,}, the least similar first", "bold")
    return Group(title, *_compared(corpus, pairs, text_column))


def corpus_of(out: Path) -> Path | None:
    """The folder with the documents that a run compared; None if it was removed."""
    return next((out / name for name in CORPORA if is_folder(out / name)), None)


def some_documents(corpus: Path | None, keys: Iterable[DocKey], text_column: str) -> dict[DocKey, Document]:
    """Some documents, by key; none where they are no longer there."""
    if corpus is None:
        return {}
    try:
        return {document.key: document for document in read_some(corpus, sorted(set(keys)), text_column)}
    except (GristmillError, OSError):
        return {}


def _keys_meant(out: Path, given: str, text_column: str) -> set[DocKey]:
    """The keys that may be meant: as given; or, of a file of the user's corpus, that of the document in its row.

    Such a file has another format than ours, or is given by its path. Its blank and malformed lines have rows, but no
    documents, so that rows after them are others here.
    """
    recorded = recorded_options(out)
    corpus, (file, _, row) = Path(recorded.get("corpus", ".")), given.rpartition("@")
    path = resolved(Path(file))
    name = path.relative_to(corpus).as_posix() if path.is_relative_to(corpus) else file
    key = DocKey.parse(f"{name}@{row}")
    names = {normal_name(name), normal_name(name, zst=True)} if parse_name(name) else {name}
    if name in names and name == file:
        return {key}
    require(
        not recorded.get("apply", {}).get("function") and not recorded.get("recipe"),
        f"--of {given}: a function or a recipe removed documents, so rows no longer match those of your files; "
        f"expected a key as printed by gristmill duplicates {out}",
    )
    if is_file(own := corpus / name):
        formats = recorded.get("normalize", {}).get("read_also", [])
        rows = (document.key.row for document in read_corpus(own, text_column, formats, on_malformed="skip"))
        before = 0
        found = -1
        for found in rows:
            if found >= key.row:
                break
            before += 1
        require(
            found == key.row,
            f"--of {given}: {own} has no document in that row, counted from 0: it is blank, malformed or after the end",
        )
        key = DocKey(name, before)
    return {DocKey(found, key.row) for found in names}


def _find_pairs(table: Path, is_meant: Callable[[dict[str, Any]], bool], most: int) -> tuple[int, list[Pair]]:
    """(number of all, the least similar) pairs of the rows of the removal table that are meant; it is read in parts."""
    total = 0
    found = list[tuple[float, int, Pair]]()
    for row in filter(is_meant, _rows(table, _COLUMNS)):
        pair = Pair(*_keys_of(row), row["similarity"])
        total += 1
        place = -(2.0 if pair.similarity is None else pair.similarity), -total, pair
        (heapq.heappush if len(found) < most else heapq.heappushpop)(found, place)
    return total, [pair for *_, pair in sorted(found, reverse=True)]


def _keys_of(row: dict[str, Any]) -> tuple[DocKey, DocKey]:
    """The keys of a removed document and of the one that was kept in its place."""
    return DocKey(row["file"], row["row"]), DocKey(row["kept_file"], row["kept_row"])


def _rows(path: Path, columns: Collection[str]) -> Iterator[dict[str, Any]]:
    """The rows of a table, of the `columns` that it has."""
    with local_copies([path]) as (copy,), open_parquet(copy) as file:
        for batch in file.iter_batches(columns=[name for name in columns if name in file.schema_arrow.names]):
            yield from batch.to_pylist()


def _show_clusters(out: Path, corpus: Path, most: int, show: int, text_column: str) -> Group:
    """The largest clusters: sizes, first members, and the first two of some of them side by side."""
    found = list[tuple[int, int, list[DocKey]]]()  # size, -number, the first members
    rows = _rows(out / CLUSTERS, ["cluster", "file", "row"])
    for number, (_, members) in enumerate(groupby(rows, key=lambda row: row["cluster"])):
        size = 0
        first = list[DocKey]()
        for row in members:
            size += 1
            if len(first) < 4:
                first.append(DocKey(row["file"], row["row"]))
        (heapq.heappush if len(found) < most else heapq.heappushpop)(found, (size, -number, first))
    clusters = [(size, members) for size, _, members in sorted(found, reverse=True)]
    if not clusters:
        return Group(Text("no clusters: no two documents are similar enough"))
    table = Table("documents", "the first of them", box=None, pad_edge=False)
    for size, first in clusters:
        more = f" and {size - len(first):,} more" if size > len(first) else ""
        table.add_row(f"{size:,}", Text(", ".join(map(str, first)) + more))
    pairs = [Pair(first[1], first[0], None) for _, first in clusters[:show]]
    return Group(
        Text(f"the {count_of(len(clusters), 'largest cluster')}", "bold"), table, *_compared(corpus, pairs, text_column)
    )


def _compared(corpus: Path, pairs: list[Pair], text_column: str) -> Iterator[Text | Table]:
    """Each pair: a line of what it is, and the texts from shortly before their first difference on.

    A similarity that the run did not measure is computed here, of the run's shingles.
    """
    keys = sorted({key for pair in pairs for key in (pair.removed, pair.kept)})
    documents = {document.key: document for document in read_some(corpus, keys, text_column)}
    for pair in pairs:
        names = [label_of(documents[key]) for key in (pair.removed, pair.kept)]
        removed, kept = (documents[key].text for key in (pair.removed, pair.kept))
        found = pair.similarity
        if found is None:
            found = float(pairwise_jaccard([removed, kept], *_shingles_of(corpus.parent))[0, 1])
        said = "shorter than a shingle" if isnan(found) else f"similarity {found:.2f}"
        yield Text(f"\n{names[0]} next to {names[1]}, {said}", "bold")
        if removed == kept:
            yield Text("the texts are equal")
            continue
        table = Table(
            f"{pair.removed}, {count_of(len(removed), 'character')}",
            f"{pair.kept}, {count_of(len(kept), 'character')}",
            expand=True,
        )
        table.add_row(*mark_differences(removed, kept))
        yield table


def label_of(document: Document) -> str:
    """The key of a document, with its own `id`, and of which document a function made it as a part."""
    found = {"id": document.own_id, "part": document.value(PART_FIELD)}
    own = [f"{name} {value}" for name, value in found.items() if value is not None]
    return f"{document.key} ({', '.join(own)})" if own else str(document.key)


def label_among(key: DocKey, documents: Mapping[DocKey, Document]) -> str:
    """The label of a document, or where its text is no longer there its key."""
    return label_of(documents[key]) if key in documents else str(key)


def text_among(key: DocKey, documents: Mapping[DocKey, Document]) -> str:
    """The text of a document, or that it is no longer there."""
    return documents[key].text if key in documents else GONE


def _shingles_of(out: Path) -> tuple[int, Unit]:
    recorded = recorded_options(out).get("dedup", {})
    return recorded.get("width", Dedup.width), recorded.get("unit", Dedup.unit)


def mark_differences(one: str, other: str) -> tuple[Text, Text]:
    """Both texts by words, from shortly before their first difference on; words that the other has not are marked.

    >>> [str(text) for text in mark_differences("the old mill grinds", "the new mill grinds")]
    ['the [old] mill grinds', 'the [new] mill grinds']
    """
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(_words(one), _words(other), strict=False)))
    start = max(0, same - _BEFORE)
    words = [list(islice(_words(text), start, start + _SHOWN + 1)) for text in (one, other)]
    shown = [some[:_SHOWN] for some in words]
    sides = Text("… " if start else ""), Text("… " if start else "")
    for kind, *bounds in SequenceMatcher(None, shown[0], shown[1], autojunk=False).get_opcodes():
        for side, some, (first, last) in zip(sides, shown, (bounds[:2], bounds[2:]), strict=True):
            part = "".join(some[first:last])
            if kind == "equal" or not part:
                side.append(part)
            else:
                side.append(f"[{part.rstrip()}]", "bold reverse")
                side.append(" " * part.endswith(" "))
    for side, some in zip(sides, words, strict=True):
        side.rstrip()
        side.append(" …" * (len(some) > _SHOWN))
    return sides


def _words(text: str) -> Iterator[str]:
    """The words, each with a space; the characters of one that is too long to be a word.

    >>> list(_words("a mill")), "".join(_words("水" * 41)) == "水" * 41 + " "
    (['a ', 'mill '], True)
    """
    for found in _WORD.finditer(text):
        word = found[0]
        yield from (f"{word} ",) if len(word) <= _LONGEST_WORD else (*word, " ")
