"""Gather a real corpus from what every machine with Python has: source code, documentation, licences, manuals.

Near-duplicates (licences, vendored copies) stay in: the pipeline is to find them. One machine gives the same bytes.
"""

import ast
import email.parser
import gzip
import hashlib
import io
import os
import re
import site
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow.parquet
import tyro
import zstandard
from rich.table import Column, Table

from gristmill.command import run_with_exit_code
from gristmill.errors import UsageError
from gristmill.io.files import atomic_write_bytes

MEGABYTE = 1_000_000
FILE_BYTES = 8 * MEGABYTE
LONG_DOCSTRING = 80  # characters; shorter ones say little without their code
MISFITS = 100  # documents too large for what is left of a share, after which the share counts as used up
MARKER = ".harvest"  # says that a folder was written by us, so that the same command may run again


@dataclass
class SourceCounts:
    """What became of one source: files found, documents written, and the bytes of their text in UTF-8."""

    found: int = 0
    documents: int = 0
    bytes: int = 0


def harvest_corpus(out_dir: tyro.conf.Positional[Path], megabytes: float = 24) -> dict[str, SourceCounts]:
    """Gather real documents of this machine into OUT_DIR/<source>/, as .jsonl, .jsonl.zst and .parquet.

    Args:
        out_dir: A new or empty folder, or one that this command wrote before.
        megabytes: Text to gather, in millions of bytes: at most a quarter a source; Python code fills the rest.
    """
    if not 0 < megabytes <= 1e9:
        raise UsageError(f"--megabytes {megabytes}: give a number above 0, such as 24")
    ours = not out_dir.exists() or (out_dir / MARKER).exists()
    if not ours and (out_dir.is_file() or any(out_dir.iterdir())):
        raise UsageError(f"{out_dir} is a file, or already holds other files: give a new or an empty folder")
    atomic_write_bytes(out_dir / MARKER, b"gristmill_cli/harvest_corpus.py wrote this corpus and may write it again.\n")
    left = int(megabytes * MEGABYTE)
    harvest: dict[str, SourceCounts] = {}
    for source, places in _sources().items():
        share = left if source == "github" else int(megabytes * MEGABYTE) // 4
        harvest[source] = _harvest_source(out_dir, source, places, share)
        left -= harvest[source].bytes
    return harvest


class Place(NamedTuple):
    """Folders to search, the paths wanted below them, and what makes a text of a file's contents and its path."""

    roots: list[Path]
    pattern: str
    render: Callable[[str, str], str]


class Found(NamedTuple):
    """A file that may become a document; its origin is the name of the folder that was searched."""

    file: Path
    path: str
    origin: str
    place: Place


NOT_TESTS = r"(?!(?:.*/)?(?:tests?|idle_test|data)/)"
LICENCE_NAME = r"(?i:LICEN[CS]ES?|UNLICEN[CS]E|COPYING|COPYRIGHT|NOTICE)"
LICENCE = rf"(?:.*/)?{LICENCE_NAME}(?:[._-][^/]*)?(?<!\.py)(?<!\.html)|[^/]+\.dist-info/licenses/.*"
NOT_PROSE = rf"{NOT_TESTS}(?!.*\.(?:dist|egg)-info/)(?!(?:.*/)?(?:{LICENCE_NAME}|CMakeLists|requirements)[^/]*$)"
PROSE_NAME = r"(?:.*\.(?:rst|md|txt)|(?:.*/)?(?:README|NEWS|FAQ|TODO|HACKING)[^/.]*)(?:\.Debian)?(?:\.gz)?"


def _sources() -> dict[str, list[Place]]:
    """Every source with its places, which need not exist; github is last, because it takes what the others leave."""
    stdlib = [Path(sysconfig.get_path("stdlib"))]
    packages = sorted({Path(folder).resolve() for folder in site.getsitepackages()})
    manuals = sorted({Path(prefix, "share/man").resolve() for prefix in ("/usr", sys.base_prefix, sys.prefix)})
    return {
        "docs": [
            Place(stdlib, NOT_TESTS + r".*\.py", docstrings),
            Place(packages, NOT_PROSE + PROSE_NAME, prose),
            Place(packages, r"[^/]+\.dist-info/METADATA", long_description),
        ],
        "licences": [
            Place(stdlib + packages, LICENCE, verbatim),
            Place([Path("/usr/share/common-licenses")], r".*", verbatim),
            Place([Path("/usr/share/doc")], r"[^/]+/copyright", verbatim),
        ],
        "manual": [
            Place(manuals, r"man\w+/[^/]+\.\d\w*(?:\.gz)?", manual_page),
            Place([Path("/usr/share/doc")], NOT_PROSE + PROSE_NAME, prose),
        ],
        "github": [Place(stdlib + packages, r".*\.py", verbatim)],
    }


def _search(places: list[Place]) -> list[Found]:
    """Every file of a source in the order of its path's hash, so that any beginning of the list is a broad sample."""
    found = (each for place in places for root in place.roots for each in _walk(root, place))
    return sorted(found, key=lambda each: (hashlib.sha256(each.path.encode()).digest(), each.file))


def _walk(root: Path, place: Place) -> Iterator[Found]:
    """Matching files below a root. A link is the same file again rather than a copy of it, so it is left out."""
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - {"__pycache__", "site-packages", "dist-packages"}  # the last two: other places
        for name in names:
            file, path = f"{folder}/{name}", f"{folder}/{name}".removeprefix(f"{root}/")
            # A name that is not UTF-8 cannot be written down in JSON, and is not printable either.
            if re.fullmatch(place.pattern, path) and path.isprintable() and not Path(file).is_symlink():
                yield Found(Path(file), path, root.name, place)


def _read(found: Found) -> str:
    """A file's document, or nothing when it is unreadable, too large or not text."""
    opener = gzip.open if found.file.suffix == ".gz" else open
    try:
        with opener(found.file, "rb") as file:
            contents = file.read(MEGABYTE + 1)
        text = contents.decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        return ""
    if len(contents) > MEGABYTE or "\0" in text:
        return ""
    # Python strings can hold lone surrogates ("\ud800" in a docstring), which UTF-8 and JSON cannot.
    return found.place.render(text, found.path).encode("utf-8", "ignore").decode("utf-8")


def verbatim(text: str, _path: str) -> str:
    """The file as it is."""
    return text


def prose(text: str, _path: str) -> str:
    """The file as it is, unless it is a table of numbers under a document's name."""
    return text if 2 * sum(map(str.isalpha, text)) > len(text) else ""


def long_description(text: str, _path: str) -> str:
    """What a package says of itself: the body of its METADATA."""
    return str(email.parser.HeaderParser().parsestr(text).get_payload())


def docstrings(text: str, path: str) -> str:
    """A module's long docstrings under their names."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return "\n\n\n".join(f"{name}\n\n{doc}" for name, doc in _documented(tree, module) if len(doc) >= LONG_DOCSTRING)


def _documented(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield name, ast.get_docstring(node) or ""
        for child in node.body:
            yield from _documented(child, f"{name}.{getattr(child, 'name', '')}")


# What a terminal would not show: macro definitions, branches for typesetters, table formats, equations, comments.
NOT_SHOWN = re.compile(r"""(?msx) ^[.'][ \t]*(?:de1?|am1?|ig)\b.*?^\.\.$\n? | ^\.EQ.*?^\.EN | ^\.PS.*?^\.PE
    | (?<=^\.T[S&]).*?\.$ | \bT\{$ | ^T\} | ^[.'][ \t]*(?:el|i[fe][ ]+(?!n\b)\S+)[ \t]*(?:\\\{.*?\\\}|[^\n]*)\n?
    | ^[.'][ \t]*i[fe][ ]+n\b[ \t]* | \\[{}] | (?<!\\)\\["\#][^\n]*""")
ARGUMENT = re.compile(r'"((?:\\\*\(..|""|[^"])*)"?|((?:\\.|[^ \t])+)')
ESCAPE = re.compile(r"""(?x) \\(?: \*?\((..) | \*?\[([^]]*)\] | \*. | [fFmMgnkVY](?:\(..|\[[^]]*\]|[+-]?.)
    | s(?:\([+-]?..|\[[^]]*\]|[+-]?\d) | [hvwlLobBDxXZSHNR](['"]).*?\3 | (.|$) )""")
GLYPHS = """em— en– hy- bu• lq“ rq” oq‘ cq’ dq" aq' Aq' ga` ha^ ti~ rs\\ co© rg® tm™ Tm™ mu× de° sc§ +-± <=≤ >=≥ !=≠ ->→
    <-← la⟨ ra⟩ lB[ rB] Do$ sl/ ba| ul_ at@ sh# Fo« Fc» 12½ pl+ mi− ssß C`" C'" L"" R"" ----"""
NAMED = {glyph[:2]: glyph[2:] for glyph in GLYPHS.split()}
SINGLE = {"e": "\\", "~": " ", "0": " ", "t": "\t", "c": "\a"} | {sign: sign for sign in "-\\ '`._"}
ACCENTS = {":": "\u0308", "'": "\u0301", "`": "\u0300", "^": "\u0302", "~": "\u0303", ",": "\u0327", "v": "\u030c"}
VERBATIM, FILLED = ("nf", "EX", "Vb", "CS", "TS"), ("fi", "EE", "Ve", "CE", "TE")
GAP = dict.fromkeys(("SH", "SS", "PP", "LP", "P", "sp", "HP", "IP", "TP", "TQ", "Sp"), "\n\n")
GAP |= dict.fromkeys(("br", "RS", "RE", "ti", "in", "YS", *VERBATIM, *FILLED), "\n")
SPACE = dict.fromkeys(("SH", "SS", "IP", "B", "I", "SM", "SB", "UR", "MT", "URL", "MTO", "OP", "SY", "QW"), " ")
SPACE |= dict.fromkeys(("BR", "RB", "BI", "IB", "IR", "RI"), "")


def manual_page(source: str, _path: str) -> str:
    """A manual page as plain text, one line a paragraph; BSD's own macros (mdoc) are not known and give nothing."""
    source = source.replace("\\\n", "")
    title = re.search(r"^[.'][ \t]*TH\s", source, re.MULTILINE)  # before it stand definitions for printers
    text, filled, tag = "", True, False  # tag: the next words are a line of their own
    for line in NOT_SHOWN.sub("", source[title.start() :]).splitlines() if title else ():
        request = re.fullmatch(r"[.'][ \t]*(\w*)(.*)", line)
        name = request[1] if request else "" if line else "sp"
        words = _words(name, request[2]) if request else ESCAPE.sub(_unescaped, line)
        filled = (filled or name in FILLED) and name not in VERBATIM
        alone = tag or not filled or name in {"TH", "SH", "SS"} or (name == "IP" and len(words) > 2)
        text += GAP.get(name, "\n" * (filled and line.startswith(" "))) + words + ("\n" if alone else " ") * bool(words)
        tag = name in {"TP", "TQ"} or (tag and not words)
    text = re.sub("\a\\s?", "", text)  # \c: the next line goes on without a space
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip()


def _words(name: str, rest: str) -> str:
    """The words that a request shows, if it shows any."""
    words = [ESCAPE.sub(_unescaped, quoted.replace('""', '"') or bare) for quoted, bare in ARGUMENT.findall(rest)]
    if name == "TH":
        return "{}({})".format(*words[:2]) if len(words) > 1 else ""
    return SPACE[name].join(words[:1] if name == "IP" else words) if name in SPACE else ""


def _unescaped(escape: re.Match[str]) -> str:
    if escape[4]:
        return SINGLE.get(escape[4], "")
    name = escape[1] or escape[2] or ""
    if len(name) == 2 and name[0] in ACCENTS and name[1].isalpha():
        return name[1] + ACCENTS[name[0]]  # two characters: composing them is left to the pipeline
    return chr(int(name[1:], 16)) if re.fullmatch("u[0-9A-F]{4,5}", name) else NAMED.get(name, "")


def _harvest_source(out_dir: Path, source: str, places: list[Place], share: int) -> SourceCounts:
    """Write one source's files, leaving those as they are that would not change, and remove those of a larger run."""
    found = _search(places)
    counts = SourceCounts(len(found))
    ending = {"docs": ".parquet", "licences": ".jsonl.zst"}.get(source, ".jsonl")
    stale = set((out_dir / source).glob(f"{source}_[0-9][0-9]*{ending}"))
    # The bytes counted so far say which file a record belongs to.
    batches = groupby(_records(found, share, counts), key=lambda _: counts.bytes // FILE_BYTES)
    for number, (_, batch) in enumerate(batches):
        path = out_dir / source / f"{source}_{number:02d}{ending}"
        data = _encode(list(batch), ending)
        if path not in stale or path.read_bytes() != data:
            atomic_write_bytes(path, data)
        stale.discard(path)
    for path in stale:
        path.unlink()
    return counts


def _records(found: Iterable[Found], share: int, counts: SourceCounts) -> Iterator[dict[str, object]]:
    """The documents that fit into a share of the budget, counted as they pass."""
    misfits = 0
    for each in found:
        text = _read(each)
        size = len(text.encode())
        misfits += counts.bytes + size > share
        if misfits == MISFITS:
            return
        if 0 < size <= share - counts.bytes:
            counts.documents += 1
            counts.bytes += size
            yield {"text": text, "meta": {"path": each.path, "origin": each.origin}}


def _encode(records: list[dict[str, object]], ending: str) -> bytes:
    if ending == ".parquet":
        file = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
        return file.getvalue()
    lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    return zstandard.compress(lines) if ending == ".jsonl.zst" else lines


def _table(harvest: dict[str, SourceCounts]) -> Table:
    table = Table("source", *(Column(name, justify="right") for name in ("files found", "documents", "MB")))
    for source, counts in harvest.items():
        table.add_row(source, f"{counts.found:,}", f"{counts.documents:,}", f"{counts.bytes / MEGABYTE:.1f}")
    return table


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: _table(tyro.cli(harvest_corpus))))
