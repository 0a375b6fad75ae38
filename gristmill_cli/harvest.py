"""Command: gather a corpus of source code, documentation and licences from this machine, for the quick start.

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
import site
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet
import zstandard
from rich.table import Table
from tyro.conf import Positional

from gristmill.errors import UsageError, require, wrap_write_errors
from gristmill.io.files import STATE_DIR
from gristmill.storage.files import reject_remote
from gristmill.storage.local import atomic_write_bytes

MARKER = f"{STATE_DIR}/harvest"  # written first: the folder is ours, and of what size; at the end, what was gathered
MEGABYTE = 1_000_000
OUTPUT_FILE_BYTES = 8 * MEGABYTE  # text in one output file
MIN_DOCSTRING = 80  # characters; shorter docstrings are left out
MAX_OVERSIZED = 100  # a source ends after this many documents larger than its remaining budget


class Harvest(msgspec.Struct):
    """Result of a harvest: megabytes asked for; documents and bytes of text by source."""

    megabytes: float
    documents: dict[str, int] = {}
    bytes: dict[str, int] = {}

    def __rich__(self) -> Table:
        table = Table("source", box=None)
        for name in ("documents", "MB"):
            table.add_column(name, justify="right")
        for source, count in self.documents.items():
            table.add_row(source, f"{count:,}", f"{self.bytes[source] / MEGABYTE:.1f}")
        return table


def harvest_corpus(out_dir: Positional[Path], megabytes: float = 24) -> Harvest:
    """Gather documents from this machine into OUT_DIR/<source>/, as .jsonl, .jsonl.zst and .parquet.

    Args:
        out_dir: A new or empty folder; a folder that this command has filled before is left as it is.
        megabytes: Size of the text, in millions of bytes. Each source gives at most a quarter; Python code fills the
            rest.

    Raises:
        UsageError: `out_dir` has files of someone else, or of another size; `megabytes` is not above 0.
    """
    require(0 < megabytes <= 1e9, f"--megabytes: expected a number above 0, got {megabytes}; try 24")
    reject_remote(out_dir)
    marker = out_dir / MARKER
    if not marker.is_file() and (out_dir.is_file() or (out_dir.is_dir() and any(out_dir.iterdir()))):
        raise UsageError(f"{out_dir}: expected a new or an empty folder, got one with other files; try another")
    if marker.is_file() and (content := marker.read_bytes()):
        before = msgspec.json.decode(content, type=Harvest)
        same = before.megabytes == megabytes
        require(same, f"{out_dir} has {before.megabytes:g} megabytes, not {megabytes:g}; try another folder")
        if before.documents:
            return before
    harvest = Harvest(megabytes)
    left = int(megabytes * MEGABYTE)
    with wrap_write_errors(marker):
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_bytes(msgspec.json.encode(harvest))
    for source, rules in _sources().items():
        budget = int(megabytes * MEGABYTE) // 4
        if source == "github":
            budget = left
        _gather(out_dir, source, rules, budget, harvest)
        left -= harvest.bytes[source]
    atomic_write_bytes(marker, msgspec.json.encode(harvest))
    return harvest


Rule = tuple[list[Path], str, Callable[[str, str], str]]  # folders, regex of relative paths, (content, path) → text

NOT_TESTS = r"(?!(?:.*/)?(?:tests?|idle_test|data)/)"
LICENCE_NAME = r"(?i:LICEN[CS]ES?|UNLICEN[CS]E|COPYING|COPYRIGHT|NOTICE)"
LICENCE = rf"(?:.*/)?{LICENCE_NAME}(?:[._-][^/]*)?(?<!\.py)(?<!\.html)|[^/]+\.dist-info/licenses/.*"
NOT_PROSE = rf"{NOT_TESTS}(?!.*\.(?:dist|egg)-info/)(?!(?:.*/)?(?:{LICENCE_NAME}|CMakeLists|requirements)[^/]*$)"
PROSE_NAME = r"(?:.*\.(?:rst|md|txt)|(?:.*/)?(?:README|NEWS|FAQ|TODO|HACKING)[^/.]*)(?:\.Debian)?(?:\.gz)?"


def _sources() -> dict[str, list[Rule]]:
    """Search rules per source, whose folders may be missing; github is last, because it fills the remaining budget."""
    stdlib = [Path(sysconfig.get_path("stdlib"))]
    packages = sorted({Path(folder).resolve() for folder in site.getsitepackages()})
    shared = Path("/usr/share/doc")
    return {
        "docs": [
            (stdlib, NOT_TESTS + r".*\.py", docstrings),
            (packages, NOT_PROSE + PROSE_NAME, prose),
            (packages, r"[^/]+\.dist-info/METADATA", long_description),
        ],
        "licences": [
            (stdlib + packages, LICENCE, verbatim),
            ([Path("/usr/share/common-licenses")], r".*", verbatim),
            ([shared], r"[^/]+/copyright", verbatim),
        ],
        "manual": [([shared], NOT_PROSE + PROSE_NAME, prose)],
        "github": [(stdlib + packages, r".*\.py", verbatim)],
    }


def _gather(out_dir: Path, source: str, rules: list[Rule], budget: int, harvest: Harvest) -> None:
    suffix = {"docs": ".parquet", "licences": ".jsonl.zst"}.get(source, ".jsonl")
    harvest.documents[source] = harvest.bytes[source] = 0
    # groupby asks for a record's key right after the record was counted, so the bytes so far number its file.
    records = _records(rules, budget, source, harvest)
    records_of_files = groupby(records, key=lambda _: harvest.bytes[source] // OUTPUT_FILE_BYTES)
    for number, (_, of_file) in enumerate(records_of_files):
        path = out_dir / source / f"{source}_{number:02d}{suffix}"
        with wrap_write_errors(path):
            atomic_write_bytes(path, _encode(list(of_file), suffix))


def _records(rules: list[Rule], budget: int, source: str, harvest: Harvest) -> Iterator[dict[str, object]]:
    """Yield the documents that fit into `budget` bytes, and count them."""
    oversized = 0
    for file, path, origin, render in _candidates(rules):
        text = _read_text(file, path, render)
        size = len(text.encode())
        oversized += harvest.bytes[source] + size > budget
        if oversized == MAX_OVERSIZED:
            return
        if 0 < size <= budget - harvest.bytes[source]:
            harvest.documents[source] += 1
            harvest.bytes[source] += size
            yield {"text": text, "meta": {"path": path, "origin": origin}}


_GENERATED = {"__pycache__", "site-packages", "dist-packages"}  # folders of files that are not the machine's own texts


def _candidates(rules: list[Rule]) -> list[tuple[Path, str, str, Callable[[str, str], str]]]:
    """Return a source's files, ordered by the hash of their path, so that any prefix is a random sample."""
    candidates = list[tuple[Path, str, str, Callable[[str, str], str]]]()
    for roots, pattern, render in rules:
        for root in roots:
            for file in _files_below(root):
                path = f"{file}".removeprefix(f"{root}/")
                # A name that is not UTF-8 is not printable; symbolic links would repeat a file.
                if re.fullmatch(pattern, path) and path.isprintable() and not file.is_symlink():
                    candidates.append((file, path, root.name, render))
    return sorted(candidates, key=lambda item: (hashlib.sha256(item[1].encode()).digest(), item[0]))


def _files_below(root: Path) -> Iterator[Path]:
    """Yield the files below a folder, except files that Python caches or installs."""
    for folder, _, names in os.walk(root):
        if _GENERATED.isdisjoint(Path(folder).relative_to(root).parts):
            for name in names:
                yield Path(folder, name)


def _read_text(file: Path, path: str, render: Callable[[str, str], str]) -> str:
    """Return a file's text; empty if the file is unreadable, too large or not text."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as content:
            data = content.read(MEGABYTE + 1)
        text = data.decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        return ""
    # Python strings can hold lone surrogates ("\ud800" in a docstring), which UTF-8 and JSON cannot.
    if len(data) > MEGABYTE or "\0" in text:
        return ""
    return render(text, path).encode("utf-8", "ignore").decode("utf-8")


def verbatim(text: str, _path: str) -> str:
    """Return the file's text, unchanged."""
    return text


def prose(text: str, _path: str) -> str:
    """Return the file's text, unchanged; empty if most of it is not letters, as in a table of numbers."""
    letters = sum(map(str.isalpha, text))
    if 2 * letters <= len(text):
        return ""
    return text


def long_description(text: str, _path: str) -> str:
    """Return a package's description: the body of its METADATA file."""
    return str(email.parser.HeaderParser().parsestr(text).get_payload())


def docstrings(text: str, path: str) -> str:
    """Return a module's docstrings of at least MIN_DOCSTRING characters, each under its qualified name."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    parts = list[str]()
    for name, docstring in _docstrings_of(tree, module):
        if len(docstring) >= MIN_DOCSTRING:
            parts.append(f"{name}\n\n{docstring}")
    return "\n\n\n".join(parts)


def _docstrings_of(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield name, ast.get_docstring(node) or ""
        for child in node.body:
            yield from _docstrings_of(child, f"{name}.{getattr(child, 'name', '')}")


def _encode(records: list[dict[str, object]], suffix: str) -> bytes:
    if suffix == ".parquet":
        file = io.BytesIO()
        pa.parquet.write_table(pa.Table.from_pylist(records), file)
        return file.getvalue()
    lines = msgspec.json.Encoder().encode_lines(records)
    if suffix == ".jsonl.zst":
        return zstandard.compress(lines)
    return lines
