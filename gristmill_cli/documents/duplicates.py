"""Command: show what a run removed as duplicates, each text next to the one that was kept, with differences marked."""

import heapq
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import groupby, islice
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from dedup.cluster_graph import pairwise_jaccard, read_some
from dedup.minhash.matching_form import Unit
from gristmill.engine.execution.staging import local_copies
from gristmill.errors import GristmillError, UsageError, require
from gristmill.io.documents import PART_FIELD, DocKey, Document, name_in_run
from gristmill.io.parquet_files import open_parquet
from gristmill.io.readers import read_corpus
from gristmill.storage.files import is_file, is_folder, resolved
from gristmill.wording import count_of
from gristmill_cli.run_config import Dedup, recorded_options
from gristmill_cli.stages.pipeline import STAGES, corpus_folders
from gristmill_cli.used_up import is_used_up

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
        of: Only pairs with this document, given by its id, its key, such as book/a.jsonl.zst@12, or a file of yours and
            a row (book/a.jsonl@12 or /data/book/a.parquet@12). Rows count from 0.
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
    if of and not pairs and "@" in of:  # it may be a key
        key = _key_meant(out, of, text_column)
        total, pairs = _find_pairs(out / DUPLICATES, lambda row: key in _keys_of(row), show)
    if of and not pairs:
        raise UsageError(
            f"--of {of}: {DUPLICATES} has no pair with it, as an id or a key: it was not removed as a duplicate, nor "
            "kept for one, or there is no such document. For other removals, see gristmill funnel and gristmill browse"
        )
    if source and not pairs:
        raise UsageError(f"--source {source}: no document of it was removed as a duplicate, nor kept for one")
    what = "removed as duplicates"
    if of:
        what = f"with {of}"
    elif source:
        what = f"of {source}"
    title = Text(f"documents {what}: {total:,}; shown: {len(pairs):,}, the least similar first", "bold")
    return Group(title, *_compared(corpus, pairs, text_column))


def corpus_of(out: Path) -> Path | None:
    """Return the folder with the documents that a run compared; None if it was removed."""
    return _first_with_documents(out, CORPORA)


def corpus_before(out: Path, output: str) -> Path | None:
    """Return the folder that the stage read which wrote the folder `output` of a run; None if it was removed."""
    return _first_with_documents(out, CORPORA[CORPORA.index(output) + 1 :])


def _first_with_documents(out: Path, names: Sequence[str]) -> Path | None:
    """Return the first of these folders that is there; None if its documents were removed as used up."""
    for name in names:
        if is_folder(out / name):
            stage = next(stage for stage in STAGES if stage.output == name)
            if is_used_up(out, stage):
                return None
            return out / name
    return None


def some_documents(corpus: Path | None, keys: Iterable[DocKey], text_column: str) -> dict[DocKey, Document]:
    """Return some documents, by key; none where they are no longer there."""
    if corpus is None:
        return {}
    try:
        return {document.key: document for document in read_some(corpus, sorted(set(keys)), text_column)}
    except (GristmillError, OSError):
        return {}


def _key_meant(out: Path, given: str, text_column: str) -> DocKey:
    """Return the key that is meant: as given; or, of a file of the user's corpus, that of the document in its row.

    Such a file has another name than ours, or is given by its path. Its blank and malformed lines have rows, but no
    documents, so that rows after them are others here.
    """
    recorded = recorded_options(out)
    corpus = Path(recorded.get("corpus", "."))
    file, _, row = given.rpartition("@")
    path = resolved(Path(file))
    name = file
    if path.is_relative_to(corpus):
        name = path.relative_to(corpus).as_posix()
    key = DocKey.parse(f"{name}@{row}")
    of_documents = name_in_run(name)
    if of_documents == file:
        return key
    require(
        not recorded.get("apply", {}).get("function") and not recorded.get("recipe"),
        f"--of {given}: a function or a recipe removed documents, so rows no longer match those of your files; "
        f"expected a key as printed by gristmill duplicates {out}",
    )
    own = corpus / name
    before = key.row  # documents in rows before
    if is_file(own):
        formats = recorded.get("normalize", {}).get("read_also", [])
        before = 0
        row_of_document = -1
        for document in read_corpus(own, text_column, formats, on_malformed="skip"):
            row_of_document = document.key.row
            if row_of_document >= key.row:
                break
            before += 1
        require(
            row_of_document == key.row,
            f"--of {given}: {own} has no document in that row, counted from 0: it is blank, malformed or after the end",
        )
    return _after_losses(out, given, DocKey(of_documents, before))


def _after_losses(out: Path, given: str, key: DocKey) -> DocKey:
    """Return the key of a document in what was compared, given that in what the first stage wrote."""
    for stage in STAGES:
        if stage.losses and is_file(out / stage.losses):
            removed = set[int]()
            for row in _rows(out / stage.losses, ("file", "row", "removed")):
                if row["removed"] and row["file"] == key.file:
                    removed.add(row["row"])
            require(key.row not in removed, f"--of {given}: {stage.name} removed it before documents were compared")
            key = DocKey(key.file, key.row - sum(row < key.row for row in removed))
    return key


def _find_pairs(table: Path, is_meant: Callable[[dict[str, Any]], bool], max_pairs: int) -> tuple[int, list[Pair]]:
    """Return how many pairs of the removal table are meant, and the least similar ones; the table is read in parts."""
    total = 0
    least_similar = list[tuple[float, int, Pair]]()  # a heap of -similarity, -number, pair
    for row in filter(is_meant, _rows(table, _COLUMNS)):
        pair = Pair(*_keys_of(row), row["similarity"])
        total += 1
        similarity = 2.0 if pair.similarity is None else pair.similarity
        _push(least_similar, (-similarity, -total, pair), max_pairs)
    return total, [pair for *_, pair in sorted(least_similar, reverse=True)]


def _push(heap: list[Any], item: Any, max_items: int) -> None:
    """Add an item to a heap that keeps the largest ones, up to `max_items`."""
    if len(heap) < max_items:
        heapq.heappush(heap, item)
    else:
        heapq.heappushpop(heap, item)


def _keys_of(row: dict[str, Any]) -> tuple[DocKey, DocKey]:
    """Return the keys of a removed document and of the one that was kept in its place."""
    return DocKey(row["file"], row["row"]), DocKey(row["kept_file"], row["kept_row"])


def _rows(path: Path, columns: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, of the `columns` that it has."""
    with local_copies([path]) as (copy,), open_parquet(copy) as file:
        present = [name for name in columns if name in file.schema_arrow.names]
        for batch in file.iter_batches(columns=present):
            yield from batch.to_pylist()


def _show_clusters(out: Path, corpus: Path, max_clusters: int, show: int, text_column: str) -> Group:
    """Show the largest clusters: sizes, first members, and the first two of some of them side by side."""
    largest = list[tuple[int, int, list[DocKey]]]()  # a heap of size, -number, the first members
    rows = _rows(out / CLUSTERS, ["cluster", "file", "row"])
    for number, (_, members) in enumerate(groupby(rows, key=lambda row: row["cluster"])):
        size = 0
        first = list[DocKey]()
        for row in members:
            size += 1
            if len(first) < 4:
                first.append(DocKey(row["file"], row["row"]))
        _push(largest, (size, -number, first), max_clusters)
    if not largest:
        return Group(Text("no clusters: no two documents are similar enough"))
    table = Table("documents", "the first of them", box=None, pad_edge=False)
    pairs = list[Pair]()
    for size, _, first in sorted(largest, reverse=True):
        named = ", ".join(map(str, first))
        if size > len(first):
            named += f" and {size - len(first):,} more"
        table.add_row(f"{size:,}", Text(named))
        if len(pairs) < show:
            pairs.append(Pair(first[1], first[0], None))
    title = Text(f"the {count_of(len(largest), 'largest cluster')}", "bold")
    return Group(title, table, *_compared(corpus, pairs, text_column))


def _compared(corpus: Path, pairs: list[Pair], text_column: str) -> Iterator[Text | Table]:
    """Yield for each pair a line of what it is, and the texts from shortly before their first difference on.

    A similarity that the run did not measure is computed here, of the run's shingles.
    """
    keys = set[DocKey]()
    for pair in pairs:
        keys.update((pair.removed, pair.kept))
    documents = {document.key: document for document in read_some(corpus, sorted(keys), text_column)}
    for pair in pairs:
        removed_label = label_of(documents[pair.removed])
        kept_label = label_of(documents[pair.kept])
        removed = documents[pair.removed].text
        kept = documents[pair.kept].text
        similarity = pair.similarity
        if similarity is None:
            similarity = float(pairwise_jaccard([removed, kept], *_shingles_of(corpus.parent))[0, 1])
        alike = f"similarity {similarity:.2f}"
        if isnan(similarity):
            alike = "shorter than a shingle"
        yield Text(f"\n{removed_label} next to {kept_label}, {alike}", "bold")
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
    """Return the key of a document, with its own `id`, and of which document a function made it as a part."""
    known = list[str]()
    for name, value in (("id", document.own_id), ("part", document.value(PART_FIELD))):
        if value is not None:
            known.append(f"{name} {value}")
    if not known:
        return str(document.key)
    return f"{document.key} ({', '.join(known)})"


def label_among(key: DocKey, documents: Mapping[DocKey, Document]) -> str:
    """Return the label of a document, or where its text is no longer there its key."""
    if key not in documents:
        return str(key)
    return label_of(documents[key])


def text_among(key: DocKey, documents: Mapping[DocKey, Document]) -> str:
    """Return the text of a document, or that it is no longer there."""
    if key not in documents:
        return GONE
    return documents[key].text


def _shingles_of(out: Path) -> tuple[int, Unit]:
    recorded = recorded_options(out).get("dedup", {})
    return recorded.get("width", Dedup.width), recorded.get("unit", Dedup.unit)


def mark_differences(one: str, other: str) -> tuple[Text, Text]:
    """Return both texts from shortly before their first difference on; words that the other has not are marked.

    >>> [str(text) for text in mark_differences("the old mill grinds", "the new mill grinds")]
    ['the [old] mill grinds', 'the [new] mill grinds']
    """
    start = max(0, _count_equal_words(one, other) - _BEFORE)
    left = _Excerpt(one, start)
    right = _Excerpt(other, start)
    matcher = SequenceMatcher(None, left.words, right.words, autojunk=False)
    for kind, left_first, left_last, right_first, right_last in matcher.get_opcodes():
        left.append(left_first, left_last, is_marked=kind != "equal")
        right.append(right_first, right_last, is_marked=kind != "equal")
    return left.text(), right.text()


def _count_equal_words(one: str, other: str) -> int:
    """Return how many words two texts have in common at their beginnings."""
    count = 0
    for word, other_word in zip(_words(one), _words(other), strict=False):
        if word != other_word:
            break
        count += 1
    return count


class _Excerpt:
    """Some words of a text from word `start` on, appended run by run, some of them marked."""

    def __init__(self, text: str, start: int) -> None:
        words = list(islice(_words(text), start, start + _SHOWN + 1))
        self.words = words[:_SHOWN]
        self._is_cut = len(words) > _SHOWN
        self._text = Text("… " if start else "")

    def append(self, first: int, last: int, is_marked: bool) -> None:
        """Append the words first ≤ number < last."""
        run = "".join(self.words[first:last])
        if not is_marked or not run:
            self._text.append(run)
            return
        self._text.append(f"[{run.rstrip()}]", "bold reverse")
        if run.endswith(" "):
            self._text.append(" ")

    def text(self) -> Text:
        """Return the text, with an ellipsis where it was cut."""
        self._text.rstrip()
        if self._is_cut:
            self._text.append(" …")
        return self._text


def _words(text: str) -> Iterator[str]:
    """Yield the words, each with a space; the characters of one that is too long to be a word.

    >>> list(_words("a mill")), "".join(_words("水" * 41)) == "水" * 41 + " "
    (['a ', 'mill '], True)
    """
    for match in _WORD.finditer(text):
        word = match[0]
        if len(word) <= _LONGEST_WORD:
            yield f"{word} "
        else:
            yield from word
            yield " "
