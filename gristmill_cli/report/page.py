"""A page of HTML by Jinja2: its parts, and numbers that say which record they are from. It has no script."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.text import Text

from gristmill.counts import Counts

_TEMPLATES = Environment(
    loader=PackageLoader("gristmill_cli", "templates"),
    autoescape=True,  # a text is HTML only if it came from a template
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_PARTS: Any = _TEMPLATES.get_template("parts.html").module
NOTHING = Markup("")

Piece = tuple[str, bool]  # of a text, and whether it is marked


def address(path: str, query: Mapping[str, object]) -> str:
    """Return the address of a page of this server, with its parameters.

    >>> address("/document", {"key": "a&b.jsonl@3"})
    '/document?key=a%26b.jsonl%403'
    """
    return f"{path}?{urlencode(query, errors='replace')}"


_TEMPLATES.globals["address"] = address


def render(template: str, **values: object) -> bytes:
    """Return a whole page: a template that extends page.html, with the values that it names."""
    content = _TEMPLATES.get_template(template).render(values)
    return content.encode("utf-8", "replace")  # a text may hold a lone surrogate


def page(title: str, parts: Iterable[Markup]) -> bytes:
    """Return a page of parts that follow one another; empty ones are left out."""
    filled = [part for part in parts if part]
    contents = [(part.heading, slug_of(part.heading)) for part in filled if isinstance(part, Section)]
    if len(contents) == 1:
        contents = []
    return render("page.html", title=title, parts=filled, contents=contents)


def pointer(record: str, *names: str | int) -> str:
    """Return where a number is recorded: a file of the run, and in it a JSON pointer (RFC 6901).

    >>> pointer("funnel.json", "went", "a/b", "read")
    'funnel.json#/went/a~1b/read'
    """
    path = ""
    for name in names:
        escaped = str(name).replace("~", "~0").replace("/", "~1")
        path += f"/{escaped}"
    return f"{record}#{path}"


class Number(float):
    """A number of a table, as it is shown, and where it is recorded; '' for one that is computed."""

    def __new__(cls, value: float, shown: str = "", record: str = "") -> "Number":
        number = super().__new__(cls, value)
        number.exact_text = repr(value)
        number.record = record
        default = "{:,}" if isinstance(value, int) else "{:,.2f}"
        number.shown = shown or default.format(value)
        return number

    exact_text: str
    shown: str
    record: str


Row = list[str | Number]  # of a table


def counted(counts: Counts, source: str, reason: str, where: str, *names: str, of: str = "documents") -> Number:
    """Return the documents, or bytes, of a source under a reason, and where they are recorded, if they are."""
    record = ""
    if reason in counts.tallies.get(source, {}):
        record = pointer(where, *names, source, reason, of)
    return Number(getattr(counts.total(reason, source), of), record=record)


def heading(title: str) -> Markup:
    """Return the title of the page."""
    return _PARTS.heading(title)


def paragraph(text: str, kind: str = "") -> Markup:
    """Return a paragraph; `kind` is soft or warn."""
    return _PARTS.paragraph(text, kind)


def warnings(lines: Iterable[tuple[str, str]]) -> Markup:
    """Return a paragraph for each warning, and a link to the section whose title is given with it; '' for none."""
    return _PARTS.warnings([(line, slug_of(title)) for line, title in lines])


def table(head: Sequence[str], rows: Iterable[Iterable[str | Number]], name: str = "") -> Markup:
    """Return a table whose first column are names; numbers have their exact values in attributes."""
    return _PARTS.table(head, rows, name)


def filled_table(head: Sequence[str], rows: Collection[Iterable[str | Number]], name: str = "") -> Markup:
    """Return a table as `table` does; nothing if there are no rows."""
    if not rows:
        return NOTHING
    return table(head, rows, name)


class Section(Markup):
    """A part of the page with a title, which is in the contents."""

    heading = ""


def slug_of(title: str) -> str:
    """Return the name that links to a section have.

    >>> slug_of("Sizes and lengths, before and after")
    'sizes-and-lengths-before-and-after'
    """
    return "-".join(re.findall("[a-z0-9]+", title.lower()))


def section(title: str, *parts: Markup) -> Markup:
    """Return a part of the page with a title; nothing if all its parts are empty."""
    filled = list(filter(None, parts))
    if not filled:
        return NOTHING
    part = Section(_PARTS.section(title, slug_of(title), filled))
    part.heading = title
    return part


def figure(title: str, picture: Markup, numbers: Markup = NOTHING, wide: bool = False) -> Markup:
    """Return a picture with its title, and its numbers to be unfolded."""
    return _PARTS.figure(title, picture, numbers, wide)


def grid(*figures: Markup) -> Markup:
    """Return figures in columns; nothing if all are empty."""
    filled = list(filter(None, figures))
    if not filled:
        return NOTHING
    return _PARTS.grid(filled)


def tiles(numbers: Mapping[str, Number]) -> Markup:
    """Return large numbers, each over its name."""
    return _PARTS.tiles(numbers)


def side_by_side(left: str, right: str) -> Markup:
    """Return two texts in two columns."""
    return _PARTS.side_by_side(left, right)


def fold(title: str, body: Markup) -> Markup:
    """Return a part that is folded until its title is clicked; nothing if it is empty."""
    if not body:
        return NOTHING
    return _PARTS.fold(title, body)


def quotation(title: str, text: str, note: str = "") -> Markup:
    """Return a text under a bold title, which a note may follow."""
    return _PARTS.quotation(title, text, note)


def comparison(title: str, left: str, right: str) -> Markup:
    """Return two texts in two columns under a bold title."""
    return _PARTS.comparison(title, left, right)


def join(parts: Iterable[Markup]) -> Markup:
    """Return parts that follow one another."""
    return NOTHING.join(parts)


def marked(text: Text) -> Markup:
    """Return a text of the terminal whose parts in another style are marked."""
    return _PARTS.marked(split_marks(text))


def split_marks(text: Text) -> list[Piece]:
    """Return a text of the terminal in pieces, each with whether it is in another style."""
    pieces = list[Piece]()
    last = 0
    for span in sorted(text.spans):
        pieces.append((text.plain[last : span.start], False))
        pieces.append((text.plain[span.start : span.end], True))
        last = span.end
    pieces.append((text.plain[last:], False))
    return pieces
