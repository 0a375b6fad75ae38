"""Command: browse what a run found alike and took out, on this machine, and mark what to keep or drop after all."""

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qs, urlencode, urlsplit

from rich.text import Text
from tyro.conf import Positional

from gristmill.errors import GristmillError, UsageError, require
from gristmill.io.documents import DocKey, Document
from gristmill.storage.files import is_file
from gristmill.storage.local import atomic_write_bytes
from gristmill.wording import count_of
from gristmill_cli.browse.tables import RunTables
from gristmill_cli.duplicates import GONE, label_among, mark_differences, text_among
from gristmill_cli.report.page import marked, page, said, side_by_side
from gristmill_cli.report.records import load_options
from gristmill_cli.run_config import RunConfig, read_options
from preprocessing.mixing.drops import read_keep_list

_PAGE, _LONGEST, _EXCERPT = 20, 20_000, 600  # rows of a page; characters of a text, and of one among others
_HOST = "127.0.0.1"
_NAMES = {"clusters": "clusters", "duplicates": "duplicates", "rules": "removed by rules", "spans": "in benchmarks"}
_MARKED_BY = ("clusters", "duplicates")  # tables whose keys are those of the mix


def browse(out: Positional[Path], port: int = 8765, keep_list: Path | None = None) -> Text:
    """Serve pages of a run on this machine: clusters, removed documents by rule, places in benchmarks, with texts.

    Documents are marked to be kept or dropped; the list of them is for `gristmill run --keep_list`. Nothing of the run
    is changed. Ctrl-C ends it.

    Args:
        out: The --out of a `gristmill run`; also s3://bucket/folder.
        port: Port of http://127.0.0.1; 0: any that is free.
        keep_list: A file with marks of before, into which new ones are written; by default they are in the list which
            the page gives, and lost at the end.

    Raises:
        UsageError: the folder is not of a run, or the port is taken.
    """
    require(0 <= port < 1 << 16, f"--port {port}: expected a number from 0 to 65535; try 0")
    with RunTables(out) as tables:
        pages = Pages(tables, load_options(read_options(out), out), KeepMarks(keep_list))
        try:
            server = ThreadingHTTPServer((_HOST, port), partial(_PageHandler, pages))
        except OSError as error:
            raise UsageError(f"--port {port}: expected a port that is free, got {error}; try --port 0") from error
        with server:
            print(f"http://{_HOST}:{server.server_port}/ (Ctrl-C ends it)", file=sys.stderr, flush=True)
            server.serve_forever()
    return Text()


class KeepMarks:
    """Documents to keep or drop, by key; in a file, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self.path, self._lock, self.of = path, Lock(), dict[DocKey, str]()
        if path and is_file(path):
            for word, its in zip(("keep", "drop"), read_keep_list(path), strict=True):
                self.of |= {DocKey(file, int(row)): word for file, rows in its.items() for row in rows.tolist()}

    def set(self, key: DocKey, word: str) -> None:
        with self._lock:
            self.of.pop(key, None)
            if word in ("keep", "drop"):
                self.of[key] = word
            if self.path:
                atomic_write_bytes(self.path, self.content)

    @property
    def content(self) -> bytes:
        """The list, by key."""
        return "".join(f"{word} {key}\n" for key, word in sorted(self.of.items())).encode("utf-8", "replace")


class Pages:
    """The pages of a run, each as HTML; `query` has the parameters of its address."""

    def __init__(self, tables: RunTables, config: RunConfig, marks: KeepMarks) -> None:
        self.tables, self.config, self.marks = tables, config, marks

    def show(self, name: str, query: dict[str, str]) -> bytes | None:
        """A page; None if there is none of that name."""
        of = {"": self._front, "cluster": self._cluster, "document": self._document}
        if name in self.tables.tables:
            return self._page(_NAMES[name], self._table(name, query))
        return self._page(name or self.tables.out.name, of[name](query)) if name in of else None

    def _page(self, title: str, parts: Iterable[str]) -> bytes:
        links = [("/", "all"), *((f"/{name}", _NAMES[name]) for name in self.tables.tables)]
        count = f"{len(self.marks.of):,} marked"
        links += [("/keep_list.txt", f"{count}: the list")] if self.marks.of else []
        top = "<p>" + " · ".join(_link(path, text) for path, text in links) + f"</p><h1>{escape(title)}</h1>"
        return page(f"gristmill: {title}", [top, *parts])

    def _front(self, query: dict[str, str]) -> Iterator[str]:  # noqa: ARG002
        index = self.tables.clusters
        for name, table in self.tables.tables.items():
            size = len(index.sizes) if name == "clusters" and index else len(table)
            yield f"<h2>{_link(f'/{name}', _NAMES[name])}: {size:,}</h2>{_search(name, {})}"
        if not self.tables.tables:
            yield said("Nothing to show: the run has found no duplicates yet, and applies no rules and no benchmarks.")
        yield said(
            "Documents of clusters and duplicates can be marked; pass the list to gristmill run --keep_list.",
            "soft",
        )

    def _table(self, name: str, query: dict[str, str]) -> Iterator[str]:
        first, text = max(0, _number(query.get("first", "0"))), query.get("q", "")
        yield _search(name, query)
        if name == "clusters":
            yield from self._clusters(text, first)
            return
        table = self.tables.tables[name]
        choice = {"rules": "rule", "spans": "benchmark"}.get(name)
        if choice:
            found = table.counts(choice)
            chosen = {"": sum(found.values()), **found}
            yield "<p>" + " · ".join(
                _link(f"/{name}?{urlencode({choice: value, 'q': text})}", f"{value or 'all'} {count:,}")
                for value, count in chosen.items()
            ) + "</p>"  # fmt: skip
        equal = {choice: query[choice]} if choice and query.get(choice) else {}
        total, rows = table.find(text, equal, first, _PAGE)
        yield _paging(name, query, first, total)
        keys = [DocKey(row[f"{side}file"], row[f"{side}row"]) for row in rows for side in ("", "kept_")
                if row.get(f"{side}file")]  # fmt: skip
        documents = self.tables.documents(keys, name, self.config)
        for row in rows:
            yield from self._row(name, row, documents, self._address(name, query))

    def _row(self, name: str, row: dict[str, object], documents: dict[DocKey, Document], back: str) -> Iterator[str]:
        key = DocKey(str(row["file"]), int(str(row["row"])))
        shown = self._key(key, name, documents)
        if name == "spans":
            match = f"{row['match']} {float(str(row['share'])):.0%}"
            yield f"<h3>{shown} has {escape(str(row['item']))} of {escape(str(row['benchmark']))}, {match}</h3>"
            yield side_by_side(escape(str(row["text"])), escape(str(row["item_text"])))
        elif name == "rules":
            yield f"<h3>{shown}: {escape(str(row['rule']))} is {float(str(row['value'])):.4g}</h3>"
            yield f"<blockquote>{escape(_excerpt(text_among(key, documents)))}</blockquote>"
        else:
            kept = DocKey(str(row["kept_file"]), int(str(row["kept_row"])))
            alike = "" if row.get("similarity") is None else f", similarity {float(str(row['similarity'])):.3f}"
            yield f"<h3>{shown} went for {self._key(kept, name, documents)}{alike}</h3>"
            yield self._mark(key, back) + self._mark(kept, back)
            if key in documents and kept in documents:
                sides = mark_differences(documents[key].text, documents[kept].text)
                yield side_by_side(*map(marked, sides))
            else:
                yield said(GONE)

    def _clusters(self, text: str, first: int) -> Iterator[str]:
        index = self.tables.clusters
        assert index is not None
        places = index.find(text)
        yield _paging("clusters", {"q": text}, first, len(places))
        rows = list[str]()
        for place in places[first : first + _PAGE].tolist():
            member = index.members(place, 0, 1)[0]
            link = _link(f"/cluster?place={place}", count_of(int(index.sizes[place]), "document"))
            rows.append(f'<tr><td>{link}</td><td class="text">{escape(str(member))}</td></tr>')
        yield f"<table>{''.join(rows)}</table>"

    def _cluster(self, query: dict[str, str]) -> Iterator[str]:
        index, place, first = self.tables.clusters, _number(query.get("place", "-1")), _number(query.get("first", "0"))
        keys = index.members(place, first, _PAGE) if index and first >= 0 else []
        if index is None or not keys:
            yield said("There is no such cluster.")
            return
        yield _paging("cluster", query, first, int(index.sizes[place]))
        lead = index.members(place, 0, 1)[0]
        documents = self.tables.documents([lead, *keys], "clusters", self.config)
        gone = self.tables.tables["duplicates"].of(keys) if "duplicates" in self.tables.tables else {}
        for key in keys:
            went = f", removed for {gone[key]['kept_file']}@{gone[key]['kept_row']}" if key in gone else ", not removed"
            yield f"<h3>{self._key(key, 'clusters', documents)}{escape(went)}</h3>"
            yield self._mark(key, self._address("cluster", query))
            if key == lead or key not in documents or lead not in documents:
                yield f"<blockquote>{escape(_excerpt(text_among(key, documents)))}</blockquote>"
            else:
                sides = mark_differences(documents[key].text, documents[lead].text)
                yield side_by_side(*map(marked, sides))
        yield said("On the right of each text: the cluster's first document.", "soft")

    def _document(self, query: dict[str, str]) -> Iterator[str]:
        key = DocKey.parse(query.get("key", ""))
        documents = self.tables.documents([key], query.get("of", ""), self.config)
        found = text_among(key, documents)
        more = f"\n… {count_of(len(found) - _LONGEST, 'more character')}" if len(found) > _LONGEST else ""
        yield f"<h2>{escape(label_among(key, documents))}</h2>"
        if query.get("of") in _MARKED_BY:
            yield self._mark(key, self._address("document", query))
        yield f'<blockquote style="white-space:pre-wrap">{escape(found[:_LONGEST])}{escape(more)}</blockquote>'

    def _key(self, key: DocKey, of: str, documents: dict[DocKey, Document]) -> str:
        return _link(f"/document?{urlencode({'key': str(key), 'of': of})}", label_among(key, documents))

    def _mark(self, key: DocKey, back: str) -> str:
        now = self.marks.of.get(key, "")
        buttons = "".join(
            f'<button name="mark" value="{word}"{" disabled" * (now == word)}>{word or "no mark"}</button> '
            for word in ("keep", "drop", "")
        )
        hidden = "".join(f'<input type="hidden" name="{name}" value="{escape(value)}">'
                         for name, value in (("key", str(key)), ("back", back)))  # fmt: skip
        return f'<form method="post" action="/mark">{hidden}{escape(str(key))} {buttons}<b>{now}</b></form>'

    def _address(self, name: str, query: dict[str, str]) -> str:
        return f"/{name}?{urlencode(query)}"


def _link(path: str, text: str) -> str:
    return f'<a href="{escape(path)}">{escape(text)}</a>'


def _search(name: str, query: dict[str, str]) -> str:
    hidden = "".join(f'<input type="hidden" name="{escape(key)}" value="{escape(value)}">'
                     for key, value in query.items() if key in ("rule", "benchmark"))  # fmt: skip
    text = escape(query.get("q", ""))
    return (
        f'<form action="/{name}">{hidden}<input name="q" value="{text}" size="40" placeholder="part of a file\'s name, '
        'a key, or an id"> <button>search</button></form>'
    )


def _paging(name: str, query: dict[str, str], first: int, total: int) -> str:
    links = [_link(f"/{name}?{urlencode({**query, 'first': place})}", text)
             for place, text in ((first - _PAGE, "before"), (first + _PAGE, "next")) if 0 <= place < total]  # fmt: skip
    shown = f"{first + 1:,} to {min(first + _PAGE, total):,} of {total:,}" if first < total else f"none of {total:,}"
    return f"<p>{shown} {' · '.join(links)}</p>"


def _excerpt(text: str) -> str:
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]} …"


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 18 else -1


class _PageHandler(BaseHTTPRequestHandler):
    """Answers GET with a page, and POST /mark with a mark; only to a browser that was given this address."""

    def __init__(self, pages: Pages, *arguments: object) -> None:
        self.pages = pages
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        if not self._is_own():
            return
        address = urlsplit(self.path)
        if address.path == "/keep_list.txt":
            self._send(HTTPStatus.OK, self.pages.marks.content, "text/plain; charset=utf-8")
            return
        query = {name: values[-1] for name, values in parse_qs(address.query).items()}
        try:
            found = self.pages.show(address.path.strip("/"), query)
        except GristmillError as error:
            self._send(HTTPStatus.BAD_REQUEST, page("gristmill", [said(str(error))]))
            return
        if found is None:
            self._send(HTTPStatus.NOT_FOUND, page("gristmill", [said("There is no such page."), _link("/", "all")]))
        else:
            self._send(HTTPStatus.OK, found)

    def do_POST(self) -> None:
        if not self._is_own():
            return
        length = _number(self.headers.get("Content-Length", ""))
        if self.path != "/mark" or not 0 <= length < 1 << 16:
            self._send(HTTPStatus.NOT_FOUND, page("gristmill", [said("There is no such page.")]))
            return
        form = {
            name: values[-1] for name, values in parse_qs(self.rfile.read(length).decode("utf-8", "replace")).items()
        }
        try:
            self.pages.marks.set(DocKey.parse(form.get("key", "")), form.get("mark", ""))
        except GristmillError as error:
            self._send(HTTPStatus.BAD_REQUEST, page("gristmill", [said(str(error))]))
            return
        back = form.get("back", "/")
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", back if back.startswith("/") and not back.startswith("//") else "/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _is_own(self) -> bool:
        """Whether a request is for this server by its own name, and from its own pages: not from another site's."""
        own = {f"{name}:{self.server.server_port}" for name in (_HOST, "localhost")}  # type: ignore[attr-defined]
        origin = self.headers.get("Origin")
        if self.headers.get("Host") in own and (origin is None or origin.removeprefix("http://") in own):
            return True
        self._send(HTTPStatus.FORBIDDEN, page("gristmill", [said("Only pages of this server may ask.")]))
        return False

    def _send(self, status: HTTPStatus, content: bytes, kind: str = "text/html; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing is printed of requests."""
