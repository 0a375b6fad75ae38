"""The pages of the browser: what each shows of a run's tables, for the template of its name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.io.documents import DocKey, Document, name_in_run
from gristmill.wording import count_of
from gristmill_cli.browse.marks import KeepMarks
from gristmill_cli.browse.tables import ClusterIndex, RunTables
from gristmill_cli.documents.duplicates import label_among, mark_differences, text_among
from gristmill_cli.report.page import Piece, address, render, split_marks

_PAGE_ROWS = 20
_MAX_CHARACTERS = 20_000  # of a document on its own page
_EXCERPT_CHARACTERS = 600  # of a document among others
_TABLE_TITLES = {
    "clusters": "clusters",
    "duplicates": "duplicates",
    "rules": "removed by rules",
    "spans": "in benchmarks",
}
_CHOICE_COLUMNS = {"rules": "rule", "spans": "benchmark"}  # a page can be of one value of them
_MARKABLE_TABLES = ("clusters", "duplicates")  # their keys are keys in the mix

Query = Mapping[str, str]
Documents = Mapping[DocKey, Document]
Sides = tuple[list[Piece], list[Piece]]


@dataclass(frozen=True)
class ShownDocument:
    """A document of a page: its key, its label and its text, or that the text is no longer there."""

    key: DocKey
    label: str
    text: str

    @property
    def excerpt(self) -> str:
        """Return the beginning of the text."""
        if len(self.text) <= _EXCERPT_CHARACTERS:
            return self.text
        return f"{self.text[:_EXCERPT_CHARACTERS]} …"


@dataclass(frozen=True)
class Paging:
    """The rows that a page shows, and the addresses of the pages before and after it."""

    shown: str
    neighbours: list[tuple[str, str]]


@dataclass(frozen=True)
class ClusterRow:
    """A cluster in the list of all: its number in the table, its size in words, and its first document."""

    number: int
    size: str
    first_key: DocKey


@dataclass(frozen=True)
class ClusterMember:
    """A document of a cluster, what became of it, and its differences from the cluster's first one."""

    document: ShownDocument
    outcome: str
    sides: Sides | None


@dataclass(frozen=True)
class RemovedDuplicate:
    """A removed document, the one that was kept for it, and their differences if both texts are still there."""

    document: ShownDocument
    kept: ShownDocument
    similarity: float | None
    sides: Sides | None


@dataclass(frozen=True)
class RemovedByRule:
    """A document that a rule removed, with the value that the rule measured."""

    document: ShownDocument
    rule: str
    value: float


@dataclass(frozen=True)
class BenchmarkSpan:
    """A place of a document that has an item of a benchmark."""

    document: ShownDocument
    item: str
    benchmark: str
    match: str
    share: float
    text: str
    item_text: str


class Pages:
    """The pages of a run, each as HTML; `query` has the parameters of its address."""

    def __init__(self, tables: RunTables, marks: KeepMarks) -> None:
        self.tables = tables
        self.marks = marks

    def show(self, name: str, query: Query) -> bytes | None:
        """Return the page of a name; None if there is none."""
        if name == "":
            return self._front()
        if name == "cluster":
            return self._cluster(query)
        if name == "document":
            return self._document(query)
        if name not in self.tables.tables:
            return None
        if name == "clusters":
            return self._clusters(query)
        return self._rows(name, query)

    def _render(self, template: str, heading: str, **values: object) -> bytes:
        return render(
            f"browse/{template}.html",
            title=f"gristmill: {heading}",
            heading=heading,
            tables=list(self.tables.tables),
            table_titles=_TABLE_TITLES,
            marks=self.marks.words,
            **values,
        )

    def _front(self) -> bytes:
        sizes = {name: len(table) for name, table in self.tables.tables.items()}
        if self.tables.clusters:
            sizes["clusters"] = len(self.tables.clusters.sizes)
        return self._render("front", self.tables.out.name, sizes=sizes)

    def _clusters(self, query: Query) -> bytes:
        index = self.tables.clusters
        assert index is not None
        first = _first_row(query)
        text = query.get("q", "")
        numbers = index.find(text)
        clusters = list[ClusterRow]()
        for number in numbers[first : first + _PAGE_ROWS].tolist():
            first_key = index.members(number, 0, 1)[0]
            size = count_of(int(index.sizes[number]), "document")
            clusters.append(ClusterRow(number, size, first_key))
        return self._render(
            "clusters",
            _TABLE_TITLES["clusters"],
            name="clusters",
            query=query,
            links=_paging("clusters", {"q": text}, first, len(numbers)),
            clusters=clusters,
        )

    def _cluster(self, query: Query) -> bytes:
        index = self.tables.clusters
        number = _natural_number(query.get("place", ""))
        first = _natural_number(query.get("first", "0"))
        keys = list[DocKey]()
        if index and number is not None and first is not None:
            keys = index.members(number, first, _PAGE_ROWS)
        if index is None or number is None or first is None or not keys:
            return self._render("cluster", "cluster", members=[])
        return self._render(
            "cluster",
            "cluster",
            members=self._members(index, number, keys),
            links=_paging("cluster", query, first, int(index.sizes[number])),
            back=address("/cluster", query),
        )

    def _members(self, index: ClusterIndex, number: int, keys: Sequence[DocKey]) -> list[ClusterMember]:
        lead = index.members(number, 0, 1)[0]
        documents = self.tables.documents([lead, *keys], "clusters")
        removed = dict[DocKey, dict[str, Any]]()
        if "duplicates" in self.tables.tables:
            removed = self.tables.tables["duplicates"].rows_of(keys)
        members = list[ClusterMember]()
        for key in keys:
            outcome = ", not removed"
            if key in removed:
                kept = DocKey(removed[key]["kept_file"], removed[key]["kept_row"])
                outcome = f", removed for {kept}"
            sides = _differences(key, lead, documents) if key != lead else None
            members.append(ClusterMember(_shown(key, documents), outcome, sides))
        return members

    def _rows(self, name: str, query: Query) -> bytes:
        table = self.tables.tables[name]
        column = _CHOICE_COLUMNS.get(name, "")
        equal = {column: query[column]} if query.get(column) else {}
        first = _first_row(query)
        total, rows = table.find(query.get("q", ""), equal, first, _PAGE_ROWS)
        documents = self.tables.documents(_keys_of(rows), name)
        row_makers = {"duplicates": _removed_duplicate, "rules": _removed_by_rule, "spans": _benchmark_span}
        make_row = row_makers[name]
        return self._render(
            name,
            _TABLE_TITLES[name],
            name=name,
            query=query,
            choices=self._choices(name, column, query),
            links=_paging(name, query, first, total),
            rows=[make_row(row, documents) for row in rows],
            back=address(f"/{name}", query),
        )

    def _choices(self, name: str, column: str, query: Query) -> list[tuple[str, str]]:
        """Return links to the rows of each value of a column, with their numbers; none for a table without one."""
        if not column:
            return []
        text = query.get("q", "")
        counts = self.tables.tables[name].counts(column)
        links = [(address(f"/{name}", {column: "", "q": text}), f"all {sum(counts.values()):,}")]
        for value, count in counts.items():
            links.append((address(f"/{name}", {column: value, "q": text}), f"{value} {count:,}"))
        return links

    def _document(self, query: Query) -> bytes:
        key = DocKey.parse(query.get("key", ""))
        table = query.get("of", "")
        document = _shown(key, self.tables.documents([key], table))
        hidden = len(document.text) - _MAX_CHARACTERS
        more = ""
        if hidden > 0:
            more = count_of(hidden, "more character")
        return self._render(
            "document",
            "document",
            document=document,
            shown=document.text[:_MAX_CHARACTERS],
            more=more,
            can_be_marked=table in _MARKABLE_TABLES,
            back=address("/document", query),
        )


def _shown(key: DocKey, documents: Documents) -> ShownDocument:
    return ShownDocument(key, label_among(key, documents), text_among(key, documents))


def _differences(key: DocKey, other: DocKey, documents: Documents) -> Sides | None:
    """Return the texts of two documents with their differences marked; None if one is no longer there."""
    if key not in documents or other not in documents:
        return None
    left, right = mark_differences(documents[key].text, documents[other].text)
    return split_marks(left), split_marks(right)


def _keys_of(rows: Sequence[Mapping[str, Any]]) -> list[DocKey]:
    """Return the keys of the documents that rows are about, and of the documents kept for them."""
    keys = list[DocKey]()
    for row in rows:
        keys.append(DocKey(row["file"], row["row"]))
        if row.get("kept_file"):
            keys.append(DocKey(row["kept_file"], row["kept_row"]))
    return keys


def _removed_duplicate(row: Mapping[str, Any], documents: Documents) -> RemovedDuplicate:
    key = DocKey(row["file"], row["row"])
    kept = DocKey(row["kept_file"], row["kept_row"])
    sides = _differences(key, kept, documents)
    return RemovedDuplicate(_shown(key, documents), _shown(kept, documents), row.get("similarity"), sides)


def _removed_by_rule(row: Mapping[str, Any], documents: Documents) -> RemovedByRule:
    document = _shown(DocKey(row["file"], row["row"]), documents)
    return RemovedByRule(document, row["rule"], row["value"])


def _benchmark_span(row: Mapping[str, Any], documents: Documents) -> BenchmarkSpan:
    return BenchmarkSpan(
        _shown(DocKey(row["file"], row["row"]), documents),
        row["item"],
        row["benchmark"],
        row["match"],
        row["share"],
        row["text"],
        row["item_text"],
    )


def _paging(name: str, query: Query, first: int, total: int) -> Paging:
    last = min(first + _PAGE_ROWS, total)
    shown = f"{first + 1:,} to {last:,} of {total:,}"
    if first >= total:
        shown = f"none of {total:,}{_other_name(name, query.get('q', ''))}"
    neighbours = list[tuple[str, str]]()
    for start, text in ((first - _PAGE_ROWS, "before"), (first + _PAGE_ROWS, "next")):
        if 0 <= start < total:
            path = address(f"/{name}", {**query, "first": str(start)})
            neighbours.append((path, text))
    return Paging(shown, neighbours)


def _other_name(name: str, text: str) -> str:
    """Return how to find a document by a key of the user's own file, which a table has not; '' for other texts."""
    file = text.rpartition("@")[0]
    of_documents = name_in_run(file)
    if of_documents == file or name == "rules":  # rules may have removed records of the user's own files
        return ""
    return f": search {of_documents}@ROW, with the row that gristmill trace OUT {text} shows"


def _first_row(query: Query) -> int:
    return _natural_number(query.get("first", "0")) or 0


def _natural_number(text: str) -> int | None:
    """Return the number that a text of an address is; None if it is none, or too large for a row."""
    if text.isascii() and text.isdecimal() and len(text) < 18:
        return int(text)
    return None
