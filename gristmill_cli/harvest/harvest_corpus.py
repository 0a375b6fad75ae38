"""Command: gather a corpus of source code, documentation, licences and manual pages from this machine.

Near-duplicates, such as licences and vendored copies, are kept for the pipeline to find. The output is
deterministic: the same machine gives the same bytes.
"""

import ast
import email.parser
import gzip
import hashlib
import io
import os
import re
import shutil
import site
import subprocess
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
import zstandard
from rich.table import Column, Table

from gristmill.arguments import Positional
from gristmill.batches import batched
from gristmill.errors import UsageError
from gristmill.storage.files import exists, is_file, reject_remote
from gristmill_cli.harvest.harvested_files import MARKER, HarvestedFiles

MEGABYTE = 1_000_000
OUTPUT_FILE_BYTES = 8 * MEGABYTE  # text in one output file
MIN_DOCSTRING = 80  # characters; shorter docstrings are left out
MAX_OVERSIZED = 100  # a source ends after this many documents larger than its remaining budget
BATCH_FILES = 50  # files read at a time; their manual pages share one groff process

GROFF = ["groff", "-mandoc", "-Tutf8", "-Kutf8", "-t", "-rLL=80n", "-rcR=1", "-P-cbou"]  # plain text: no bold, no pages
TROFF_PREAMBLE = ".na\n.nh\n.de ad\n..\n.de hy\n..\n"  # ragged right, no hyphenation
PAGE_SEPARATOR = "GRISTMILL-PAGE-END"  # title of an empty page inserted after each page, to split the output of groff
END_OF_PAGE = f"..\n.TH {PAGE_SEPARATOR} 0\n"  # the dots close a macro definition that the page left open


@dataclass
class SourceCounts:
    """Counts of one source: candidate files, documents written, and the bytes of their text in UTF-8."""

    files: int = 0
    documents: int = 0
    bytes: int = 0


class Harvest(dict[str, SourceCounts]):
    """Counts per source, printed as a table."""

    def __rich__(self) -> Table:
        table = Table("source", *(Column(name, justify="right") for name in ("files found", "documents", "MB")))
        for source, counts in self.items():
            table.add_row(source, f"{counts.files:,}", f"{counts.documents:,}", f"{counts.bytes / MEGABYTE:.1f}")
        return table


def harvest_corpus(out_dir: Positional[Path], megabytes: float = 24) -> Harvest:
    """Gather documents of this machine into OUT_DIR/<source>/, as .jsonl, .jsonl.zst and .parquet.

    Args:
        out_dir: A new or empty folder, or one written by this command, whose own files it replaces.
        megabytes: Size of the text, in millions of bytes: at most a quarter per source; Python code fills the rest.

    Raises:
        UsageError: `out_dir` was not written by this command or a file to replace was not; `megabytes` is not above 0.
    """
    if not 0 < megabytes <= 1e9:
        raise UsageError(f"--megabytes {megabytes}: give a number above 0, such as 24")
    reject_remote(out_dir)
    ours = not exists(out_dir) or is_file(out_dir / MARKER)
    if not ours and (out_dir.is_file() or any(out_dir.iterdir())):
        raise UsageError(f"{out_dir} is a file, or already holds other files: give a new or an empty folder")
    own = HarvestedFiles(out_dir)
    if shutil.which("groff") is None:
        print("note: groff is not installed: the corpus will have no manual pages", file=sys.stderr)
    left = int(megabytes * MEGABYTE)
    harvest = Harvest()
    for source, rules in _sources().items():
        budget = left if source == "github" else int(megabytes * MEGABYTE) // 4
        harvest[source] = _harvest_source(own, source, rules, budget)
        left -= harvest[source].bytes
    return harvest


class SearchRule(NamedTuple):
    """Files of a source: folders to search, a regex for relative paths, and a function (contents, path) → text."""

    roots: list[Path]
    pattern: str
    render: Callable[[str, str], str]


class Candidate(NamedTuple):
    """A file that matches a rule: its relative path, and the name of the folder that was searched (`origin`)."""

    file: Path
    path: str
    origin: str
    rule: SearchRule


NOT_TESTS = r"(?!(?:.*/)?(?:tests?|idle_test|data)/)"
LICENCE_NAME = r"(?i:LICEN[CS]ES?|UNLICEN[CS]E|COPYING|COPYRIGHT|NOTICE)"
LICENCE = rf"(?:.*/)?{LICENCE_NAME}(?:[._-][^/]*)?(?<!\.py)(?<!\.html)|[^/]+\.dist-info/licenses/.*"
NOT_PROSE = rf"{NOT_TESTS}(?!.*\.(?:dist|egg)-info/)(?!(?:.*/)?(?:{LICENCE_NAME}|CMakeLists|requirements)[^/]*$)"
PROSE_NAME = r"(?:.*\.(?:rst|md|txt)|(?:.*/)?(?:README|NEWS|FAQ|TODO|HACKING)[^/.]*)(?:\.Debian)?(?:\.gz)?"


def _sources() -> dict[str, list[SearchRule]]:
    """Search rules per source, whose folders may be missing; github is last, because it fills the remaining budget."""
    stdlib = [Path(sysconfig.get_path("stdlib"))]
    packages = sorted({Path(folder).resolve() for folder in site.getsitepackages()})
    prefixes = ("/usr", sys.base_prefix, sys.prefix) if shutil.which("groff") else ()
    manuals = sorted({Path(prefix, "share/man").resolve() for prefix in prefixes})
    return {
        "docs": [
            SearchRule(stdlib, NOT_TESTS + r".*\.py", docstrings),
            SearchRule(packages, NOT_PROSE + PROSE_NAME, prose),
            SearchRule(packages, r"[^/]+\.dist-info/METADATA", long_description),
        ],
        "licences": [
            SearchRule(stdlib + packages, LICENCE, verbatim),
            SearchRule([Path("/usr/share/common-licenses")], r".*", verbatim),
            SearchRule([Path("/usr/share/doc")], r"[^/]+/copyright", verbatim),
        ],
        "manual": [
            SearchRule(manuals, r"man\w+/[^/]+\.\d\w*(?:\.gz)?", troff_source),
            SearchRule([Path("/usr/share/doc")], NOT_PROSE + PROSE_NAME, prose),
        ],
        "github": [SearchRule(stdlib + packages, r".*\.py", verbatim)],
    }


def _find_candidates(rules: list[SearchRule]) -> list[Candidate]:
    """List a source's files, ordered by the hash of their path, so that any prefix is a random sample."""
    found = (each for rule in rules for root in rule.roots for each in _matching_files(root, rule))
    return sorted(found, key=lambda each: (hashlib.sha256(each.path.encode()).digest(), each.file))


def _matching_files(root: Path, rule: SearchRule) -> Iterator[Candidate]:
    """Yield the matching files below a root, except symbolic links, which would repeat a file."""
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - {
            "__pycache__",
            "site-packages",
            "dist-packages",
        }  # the last two have their own rules
        for name in names:
            file, path = f"{folder}/{name}", f"{folder}/{name}".removeprefix(f"{root}/")
            # A name that is not UTF-8 is not printable, and JSON cannot hold it.
            if re.fullmatch(rule.pattern, path) and path.isprintable() and not Path(file).is_symlink():
                yield Candidate(Path(file), path, root.name, rule)


def _read_text(found: Candidate) -> str:
    """A file's text; empty if the file is unreadable, too large or not text."""
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
    return found.rule.render(text, found.path).encode("utf-8", "ignore").decode("utf-8")


def verbatim(text: str, _path: str) -> str:
    """The file's text, unchanged."""
    return text


def prose(text: str, _path: str) -> str:
    """The file's text, unchanged; empty if most of it is not letters, as in a table of numbers."""
    return text if 2 * sum(map(str.isalpha, text)) > len(text) else ""


def long_description(text: str, _path: str) -> str:
    """A package's description: the body of its METADATA file."""
    return str(email.parser.HeaderParser().parsestr(text).get_payload())


def docstrings(text: str, path: str) -> str:
    """A module's docstrings of at least MIN_DOCSTRING characters, each under its qualified name."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return "\n\n\n".join(f"{name}\n\n{doc}" for name, doc in _docstrings_of(tree, module) if len(doc) >= MIN_DOCSTRING)


def _docstrings_of(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield name, ast.get_docstring(node) or ""
        for child in node.body:
            yield from _docstrings_of(child, f"{name}.{getattr(child, 'name', '')}")


def troff_source(text: str, _path: str) -> str:
    """A manual page in the macros `man` or `mdoc`, not yet rendered; empty for a page that only includes another."""
    return text if re.search(r"^[.'][ \t]*(?:TH|Dd)\s", text, re.MULTILINE) and not text.startswith(".so ") else ""


def render_manual(sources: list[str]) -> list[str]:
    """Plain text of manual pages, rendered by one groff process: 80 columns, ragged right, no hyphenation.

    A page that breaks its neighbours, such as one with an unclosed macro definition, is found by halving the list.
    """
    if not sources:
        return []
    pages = "".join(f"{TROFF_PREAMBLE}{source}\n{END_OF_PAGE}" for source in sources)
    done = subprocess.run(GROFF, input=pages.encode(), capture_output=True, check=False)
    # A header shows a page's title on the left and on the right; a footer, on the right only.
    texts = re.split(rf"(?m)^{PAGE_SEPARATOR}\(0\).*$", done.stdout.decode("utf-8", "ignore"))[:-1]
    texts = [re.sub(rf"(?m)^ .*{PAGE_SEPARATOR}\(0\)$|.\x08", "", text) for text in texts]  # x08: overstruck
    if len(texts) == len(sources):
        return [re.sub(r"\n{3,}", "\n\n", text).strip() for text in texts]
    half = len(sources) // 2
    return render_manual(sources[:half]) + render_manual(sources[half:]) if half else [""]


def _harvest_source(own: HarvestedFiles, source: str, rules: list[SearchRule], budget: int) -> SourceCounts:
    """Write one source's files, except unchanged ones, and remove those left by an earlier, larger run."""
    found = _find_candidates(rules)
    counts = SourceCounts(len(found))
    suffix = {"docs": ".parquet", "licences": ".jsonl.zst"}.get(source, ".jsonl")
    stale = set((own.folder / source).glob(f"{source}_[0-9][0-9]*{suffix}"))
    # groupby asks for a record's key right after the record was counted, so the bytes so far number its file.
    files = groupby(_records(found, budget, counts), key=lambda _: counts.bytes // OUTPUT_FILE_BYTES)
    for number, (_, records) in enumerate(files):
        path = own.folder / source / f"{source}_{number:02d}{suffix}"
        own.replace(path, _encode(list(records), suffix))
        stale.discard(path)
    for path in stale:
        own.replace(path, None)
    return counts


def _records(found: Iterable[Candidate], budget: int, counts: SourceCounts) -> Iterator[dict[str, object]]:
    """Yield the documents that fit into `budget` bytes, and add them to `counts`."""
    oversized = 0
    for each, text in _read_texts(found):
        size = len(text.encode())
        oversized += counts.bytes + size > budget
        if oversized == MAX_OVERSIZED:
            return
        if 0 < size <= budget - counts.bytes:
            counts.documents += 1
            counts.bytes += size
            yield {"text": text, "meta": {"path": each.path, "origin": each.origin}}


def _read_texts(found: Iterable[Candidate]) -> Iterator[tuple[Candidate, str]]:
    """Yield each file with its text, in batches, because starting groff takes longer than rendering a page."""
    for batch in batched(found, BATCH_FILES):
        texts = [_read_text(each) for each in batch]
        pages = [i for i, each in enumerate(batch) if each.rule.render is troff_source and texts[i]]
        for i, text in zip(pages, render_manual([texts[i] for i in pages]), strict=True):
            texts[i] = text
        yield from zip(batch, texts, strict=True)


def _encode(records: list[dict[str, object]], suffix: str) -> bytes:
    if suffix == ".parquet":
        file = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
        return file.getvalue()
    lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    return zstandard.compress(lines) if suffix == ".jsonl.zst" else lines
