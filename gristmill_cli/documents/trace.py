"""Command: what became of documents, and the lines that take them down; an old list of such lines is written anew."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from gristmill.console import wide_console
from gristmill.errors import InputError, UsageError, require
from gristmill.storage.files import is_file, read_file
from gristmill.wording import count_of
from gristmill_cli.documents.id_search import search_text
from gristmill_cli.documents.takedown import held_digests
from gristmill_cli.documents.tracer import Tracer
from gristmill_cli.documents.way import Fate, Way
from gristmill_cli.run_config import is_data_run, load_options, read_options
from gristmill_cli.stages.pipeline import facts_of_raw_corpus
from preprocessing.mixing.keep_list import DROP, GONE, KEEP, ListedText, parse_text_line
from preprocessing.steps.text_digest import DIGEST

_MAX_ERRORS = 3  # of documents that are not found, which are quoted


@dataclass(frozen=True)
class _Asked:
    """A line of a file of documents: the document's name, '' if none is looked for, and what a list says of it."""

    line: str
    name: str = ""
    listed: ListedText | None = None


def trace(
    out: Positional[Path],
    documents: Positional[tuple[str, ...]] = (),
    file: Path | None = None,
    json: bool = False,
    lines: bool = False,
    text: str = "",
) -> None:
    """Tell what became of documents in each stage of a run, from raw file and row to the places in the tokens.

    Changes nothing. For ids and urls the raw corpus is read, once for all; by a key only what the run noted.

    Args:
        out: The --out of a `gristmill run`; also s3://bucket/folder.
        documents: Of each document its key, FILE@ROW with rows from 0, in the raw corpus or as reports and `gristmill
            duplicates` show it; its own field `id` or `url`; or its place in the tokens, such as train@17, holdout@0 or
            tokens/train/tokens_00002@5 (documents are counted from 0).
        file: A file with a document a line, or a list of take-downs (see `lines`).
        json: Print a JSON record for each document, a line each.
        lines: Print only the lines that take the documents down, for the file that --keep_list names; a key is one of
            the raw corpus then. Of such a list as `file` the lines stay whose text documents have; a line of a text
            that has changed becomes that of the document it names, and `gone` where there is none.
        text: A piece of text: the documents of the raw corpus that have it, however it is broken into lines there.

    Raises:
        UsageError: the folder is not of a run, or there is no such document.
    """
    require(
        bool(documents or text) or file is not None,
        "expected a document, such as web/a.jsonl@3 or its id, or --file FILE, or --text 'a piece of text'",
    )
    require(not (json and lines), "--json and --lines: give one of them")
    if not is_data_run(out):
        raise UsageError(f"{out}: expected the --out of a gristmill run, got no run.json of one in it")
    try:
        config = load_options(read_options(out), out)
    except ValueError as error:
        raise InputError(
            f"{out} has options of another version ({error}): run the same `gristmill run` again"
        ) from error
    tracer = Tracer(config)
    asked = [_Asked(name, name) for name in documents]
    if file is not None:
        asked += _read_file(file, is_list=lines)
    only_raw = {one.name for one in asked if one.listed}
    if text:
        keys = search_text(config, text)
        require(bool(keys), f"{config.corpus} has no document with the text {text!r}; try a shorter piece of it")
        only_raw |= set(map(str, keys))
        asked += [_Asked(str(key), str(key)) for key in keys]
    if lines:
        _print_lines(tracer, asked)
        return
    names = [one.name for one in asked if one.name]
    ways_of = tracer.find_all(names, only_raw)
    errors = list[UsageError]()
    for ways in ways_of.values():
        if isinstance(ways, UsageError):
            errors.append(ways)
    if len(names) == 1 and errors:
        raise errors[0]
    for name, ways in ways_of.items():
        if json:
            for record in _records(name, ways):
                print(msgspec.json.encode(record).decode())
        else:
            wide_console().print(_tables(name, ways))
    _reject_unknown(errors, len(ways_of))


def _read_file(path: Path, is_list: bool) -> Iterator[_Asked]:
    """Yield the lines of a file of documents, or of a list of take-downs."""
    require(is_file(path), f"--file {path}: expected a file with a document a line, but there is none")
    for line in read_file(path).decode("utf-8", "replace").splitlines():
        stripped = line.strip()
        listed = parse_text_line(stripped)
        word, _, key = stripped.partition(" ")
        if not stripped or stripped.startswith("#"):
            yield _Asked(line)
        elif listed:
            yield _Asked(line, listed.note.strip(), listed)
        elif word in (KEEP, DROP) and "@" in key:  # a row, as `gristmill browse` writes it
            yield _Asked(line, "" if is_list else key.strip())
        else:
            yield _Asked(line, stripped)


def _tables(name: str, ways: list[Way] | UsageError) -> Group:
    if isinstance(ways, UsageError):
        return Group(Text(f"{name}: {ways}"))
    shown = list[Table | Text]()
    for way in ways:
        shown.append(_table(way.title, way.fates))
        lines = list[str]()
        for fate in way.fates:
            lines += fate.lines
        if lines and len(ways) > 1:  # lines of all would take down documents that were not meant
            lines = [f"{name} is the key of {len(ways)} documents: for the line, trace {way.title} with --lines true"]
        shown += map(Text, lines)  # not in a table, which breaks long lines
    return Group(*shown)


def _table(title: str, fates: list[Fate]) -> Table:
    table = Table("stage", "what became of it", title=Text(title), box=None, pad_edge=False, title_justify="left")
    for fate in fates:
        table.add_row(fate.stage, Text(fate.outcome))
    return table


def _records(name: str, ways: list[Way] | UsageError) -> Iterator[dict[str, object]]:
    if isinstance(ways, UsageError):
        yield {"document": name, "error": str(ways)}
        return
    for way in ways:
        stages = [{"stage": fate.stage, "outcome": fate.outcome} for fate in way.fates]
        yield {"document": name, "key": way.title, "stages": stages, "take_down": way.take_down}


def _print_lines(tracer: Tracer, asked: Sequence[_Asked]) -> None:
    """Print the lines of a list that take documents down; lines of a given list that still hold, as they are."""
    stale = _stale_lines(tracer, asked)
    names = list[str]()
    for one in asked:
        is_kept_line = one.listed and one not in stale
        if one.name and not is_kept_line:
            names.append(one.name)
    ways_of = tracer.find_all(names, names)
    errors = list[UsageError]()
    printed = set[bytes]()
    renewed = 0
    gone = 0
    for one in asked:
        ways = ways_of.get(one.name)
        new = list[str]()
        if isinstance(ways, list):
            for way in ways:
                new += way.take_down
        if one in stale:
            is_present = any(line.startswith(DROP) for line in new)
            renewed += is_present
            gone += not is_present
            if not is_present:  # a text that a rule removes now may come back in this form or in the other
                new.insert(0, one.line.strip().replace(DROP, GONE, 1))
        elif one.listed or not one.name:
            new = [one.line]
        elif isinstance(ways, UsageError):
            errors.append(ways)
        elif not new:
            errors.append(UsageError(f"{one.name} is not among the documents that the run has: {_last_of(ways)}"))
        for line in new:
            text = parse_text_line(line)
            if text is None or text.digest not in printed:  # one kept in place of another may be asked for, too
                print(line)
            if text:
                printed.add(text.digest)
    if stale:
        print(
            f"{count_of(renewed, 'line')} renewed, {count_of(gone, 'line')} now `{GONE}`, as the run has no such "
            "document. A line that names a row, FILE@ROW, is renewed for the document that is there in the corpus "
            "now: check it if the file has changed",
            file=sys.stderr,
        )
    _reject_unknown(errors, len(names))


def _stale_lines(tracer: Tracer, asked: Sequence[_Asked]) -> list[_Asked]:
    """Return the lines of a given list whose texts no document of the run has, unless they may be gone."""
    digests = set[bytes]()
    for one in asked:
        if one.listed:
            digests.add(one.listed.digest)
    held = set[bytes]()
    if digests:
        folders = dict.fromkeys([tracer.out / "facts", facts_of_raw_corpus(tracer.config)])
        held.update(held_digests(folders, np.array(sorted(digests), DIGEST)).tolist())
    stale = list[_Asked]()
    for one in asked:
        if one.listed and not one.listed.may_be_gone and _bare(one.listed) not in held:
            stale.append(one)
    return stale


def _bare(listed: ListedText) -> bytes:
    """Return the digest of a line as NumPy returns it."""
    return listed.digest.rstrip(b"\0")


def _last_of(ways: list[Way] | UsageError | None) -> str:
    if isinstance(ways, list) and ways and ways[-1].fates:
        return ways[-1].fates[-1].outcome
    return ""


def _reject_unknown(errors: Sequence[UsageError], asked: int) -> None:
    """Raise UsageError if documents were not found, after the others."""
    if errors:
        named = "; ".join(str(error) for error in errors[:_MAX_ERRORS])
        raise UsageError(f"{len(errors):,} of {count_of(asked, 'document')} not found: {named}")
