"""A page of HTML: its style, its parts, and numbers that say which record they are from. It has no script."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from rich.text import Text

from gristmill.counts import Counts

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1c2024;--soft:#7a828c;--line:#dfe3e8;--panel:#f6f7f9;--warn:#fff1d6;
--edge:#d98e04;--mark:#ffe08a;--c0:#2f6fb5;--c1:#d9822b;--c2:#3a9a6b;--c3:#b5487a;--c4:#7a62c9;--c5:#8a7a2c;--c6:#3a9fb0;
--c7:#8f5a3c}
@media (prefers-color-scheme:dark){:root{--paper:#15181c;--ink:#e6e8eb;--soft:#98a1ab;--line:#343a41;--panel:#1d2126;
--warn:#3a2d10;--edge:#e0a030;--mark:#7a5c00;--c0:#6aa5e8;--c1:#f0a35a;--c2:#62c794;--c3:#e58ab2;--c4:#a995f0;--c5:#c9b95c;
--c6:#6ccbdb;--c7:#c99472}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:76rem;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:1.5rem;margin:.3rem 0;overflow-wrap:anywhere}h2{font-size:1.15rem;margin:2rem 0 .5rem;
border-top:1px solid var(--line);padding-top:.8rem}h3{font-size:1rem;margin:0 0 .3rem}
p{margin:.3rem 0 .6rem;max-width:60rem}small,.soft{color:var(--soft)}
.warn{background:var(--warn);border-left:4px solid var(--edge);padding:.5rem .8rem;margin:.4rem 0;
overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.6rem;margin:.8rem 0}
.tile{background:var(--panel);border-radius:6px;padding:.5rem .8rem}.tile b{display:block;font-size:1.3rem}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,29rem),1fr));gap:1.2rem}
figure{margin:0;min-width:0;break-inside:avoid}figure svg{display:block;width:100%;height:auto;max-width:36rem}
figure.wide svg{max-width:46rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}
th,td{padding:.15rem .6rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:0}td.text{text-align:left;white-space:normal;
overflow-wrap:break-word;min-width:7rem}
details{margin:.4rem 0}summary{cursor:pointer;color:var(--soft)}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr));gap:.8rem;margin:.3rem 0 1.2rem}
.text{overflow-wrap:anywhere}.pair div,blockquote{background:var(--panel);border-radius:6px;padding:.5rem .8rem;
margin:0;overflow-wrap:anywhere;font-size:.87rem}blockquote{margin:.2rem 0 .8rem}
mark{background:var(--mark);color:inherit;border-radius:2px}
@media print{body{max-width:none;font-size:11px}
details{display:block}.pair,.tile,.warn{break-inside:avoid}h2{break-after:avoid}}
"""


def page(title: str, parts: Iterable[str]) -> bytes:
    """The whole document. Its policy forbids scripts and any load, whatever its texts hold."""
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
    )
    body = "\n".join(part for part in parts if part)
    return f"{head}{body}\n</body></html>\n".encode("utf-8", "replace")  # a lone surrogate of a text


def pointer(record: str, *names: str | int) -> str:
    """Where a number is recorded: a file of the run, and in it a JSON pointer (RFC 6901).

    >>> pointer("funnel.json", "went", "a/b", "read")
    'funnel.json#/went/a~1b/read'
    """
    return f"{record}#" + "".join(f"/{str(name).replace('~', '~0').replace('/', '~1')}" for name in names)


class Number(float):
    """A number of a table, as it is shown, and where it is recorded; '' for one that is computed."""

    def __new__(cls, value: float, shown: str = "", record: str = "") -> "Number":
        found = super().__new__(cls, value)
        found.exact, found.record = value, record
        found.shown = shown or (f"{value:,}" if isinstance(value, int) else f"{value:,.2f}")
        return found

    exact: float
    shown: str
    record: str

    @property
    def attributes(self) -> str:
        return f'data-value="{self.exact!r}"' + (f' data-record="{escape(self.record)}"' if self.record else "")


def counted(counts: Counts, source: str, reason: str, where: str, *names: str, of: str = "documents") -> Number:
    """Documents, or bytes, of a source under a reason, and where they are recorded, if they are."""
    record = pointer(where, *names, source, reason, of) if reason in counts.tallies.get(source, {}) else ""
    return Number(getattr(counts.total(reason, source), of), record=record)


def table(head: Sequence[str], rows: Iterable[Iterable[str | Number]], name: str = "") -> str:
    """A table whose first column are names; numbers have their exact values in attributes."""
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    for row in rows:
        lines.append("".join(_cell(cell) for cell in row))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table{name and f" id={chr(34)}{name}{chr(34)}"}>{body}</table></div>'


def _cell(cell: str | Number) -> str:
    if isinstance(cell, Number):
        return f"<td {cell.attributes}>{escape(cell.shown)}</td>"
    return f'<td class="text">{escape(cell)}</td>'


def section(title: str, *parts: str) -> str:
    """A part of the page; '' if there is nothing in it."""
    body = "\n".join(part for part in parts if part)
    return f"<section><h2>{escape(title)}</h2>\n{body}\n</section>" if body else ""


def figure(title: str, picture: str, numbers: str = "", wide: bool = False) -> str:
    """A picture with its title, and its numbers to be unfolded."""
    folded = fold("numbers", numbers) if numbers else ""
    return f"<figure{' class=wide' * wide}><h3>{escape(title)}</h3>{picture}{folded}</figure>"


def grid(*figures: str) -> str:
    found = [figure for figure in figures if figure]
    return f'<div class="grid">{"".join(found)}</div>' if found else ""


def said(text: str, kind: str = "") -> str:
    """A paragraph."""
    return f"<p{kind and f' class={kind}'}>{escape(text)}</p>"


def tiles(numbers: Mapping[str, Number]) -> str:
    """Large numbers, each over its name."""
    each = "".join(
        f'<div class="tile"><b {number.attributes}>{escape(number.shown)}</b>{escape(name)}</div>'
        for name, number in numbers.items()
    )
    return f'<div class="tiles">{each}</div>'


def side_by_side(left: str, right: str) -> str:
    """Two texts, as HTML."""
    return f'<div class="pair"><div>{left}</div><div>{right}</div></div>'


def fold(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def marked(text: Text) -> str:
    """A text of the terminal whose parts in another style are marked."""
    parts, last = list[str](), 0
    for span in sorted(text.spans):
        parts += [escape(text.plain[last : span.start]), f"<mark>{escape(text.plain[span.start : span.end])}</mark>"]
        last = span.end
    return "".join([*parts, escape(text.plain[last:])])
