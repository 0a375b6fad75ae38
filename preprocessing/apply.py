"""Stage: run a user's function over every document of a corpus; it may drop, change and reorder documents."""

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import msgspec
import numpy as np
from tyro.conf import Positional

from gristmill.command import command
from gristmill.counts import FAILED, PARTS, WORKER_DIED, Counts, Tally, check_max_failed
from gristmill.engine.execution.worker_deaths import (
    READING,
    note_no_place,
    note_place,
    rows_of_deaths,
    suspected_rows,
)
from gristmill.engine.options import RunOptions
from gristmill.engine.rewriting import OutputFormat, open_rewriting, rewrite_corpus
from gristmill.engine.slices import SliceGroup, leaves_out_damaged, note_reading
from gristmill.engine.task import Stage
from gristmill.errors import GristmillError, UsageError, require
from gristmill.io.artefacts import write_rows
from gristmill.io.documents import PART_FIELD, Document, Slice
from gristmill.io.readers import read_chosen, read_documents
from gristmill.io.writers import Rejects, open_jsonl_writer
from gristmill.steps import MANY_FAILING, describe_error
from gristmill.storage.files import is_file
from gristmill.text import utf8_size
from preprocessing.document_pass import REMOVED
from preprocessing.mixing.shuffle_buckets import MANIFEST_NAME
from preprocessing.user_code import load_function, version_of

STAGE = Stage("apply", version=2, libraries=("zstandard", "zlib", "pyarrow"))
_FORM = "a generator, such as `def keep_english(documents): yield from (d for d in documents if is_english(d.text))`"
_MAX_SEARCHED = 4096  # documents before the last one given, among which one that fails is looked for
_WHOLE = 1
_PART = 2
_FailedRow = tuple[str, int, str, float | None, str, str | None]  # as REMOVED
DocumentFunction = Callable[[Iterator[Document]], Iterable[Document]]
_NAN, _INFINITY, _MINUS_INFINITY = (msgspec.Raw(name) for name in (b"NaN", b"Infinity", b"-Infinity"))


def apply(
    data_dir: Positional[Path],
    target_dir: Positional[Path],
    function: Positional[str],
    options: RunOptions = RunOptions(),
    *,
    format: OutputFormat = "jsonl",
    text_column: str = "text",
    max_failed: float = 0.0,
) -> Counts:
    """Run your own function over every document of a corpus; it yields the documents to keep.

    The function is a generator: it takes an iterator over documents and yields documents, each at most once, changed
    (`document.text`, `document.fields`) or not; `document.value("field")` reads a field. To make several of one, it
    yields `document.part(text)` for each. It is called once for each file, or for each 64 MiB of a large file, in any
    order and in several processes, so its results must depend on these documents alone. Processes that it starts must
    end before it returns. Values that it sets must be of types of JSON or NumPy.

    A document on which it fails, alone too, is set aside: the function is called again for the others of the file, and
    the table TARGET_DIR.failed.parquet has its file, row, error and id. Is that more than `max_failed` of the
    documents, the stage ends with an error after all others, and the same command with a higher limit runs nothing
    again. With --retry_failed these files are given to the function again.

    It always runs in a worker process, even with --workers 1. If a worker dies, the error names the function and the
    document; with `max_failed` above 0 the function is called again without that document, which counts as failed.

    It runs again if the source of its module has changed. If it also depends on other modules or on data, give it a
    version, `keep_english.version = 2`, which is then compared instead of the source.

    Args:
        data_dir: Folder with JSON lines (.jsonl, .ndjson, .json; also .gz, .zst, .bz2, .xz), .parquet or .arrow files,
            in any subfolders.
        target_dir: Output folder; files keep their relative paths.
        function: The function as module:function, such as my_filters:keep_english; the module is searched for on
            PYTHONPATH and in the current folder.
        options: Workers, memory, and when to stop; they change no output.
        format: Format of the output files: jsonl, compressed like the input, or parquet, where each field has one type
            in all files of a source and nested fields are structs and lists.
        text_column: The column or field that holds the text, which is `document.text`.
        max_failed: Fraction of the documents on which the function may fail, such as 0.001.

    Returns:
        Documents read, written, dropped by the function, and failed, per source.
    """
    check_max_failed(max_failed)
    is_mix = is_file(data_dir / MANIFEST_NAME)
    require(
        not is_mix,
        f"{data_dir}: expected a corpus, got the mix before its shuffle; try train or normalized, next to it",
    )
    arguments = {"function": function, "version": version_of(function)}
    table = failed_path(target_dir)
    with open_rewriting(STAGE, data_dir, target_dir, options, text_column, format, [table]) as (run, files, targets):
        done = rewrite_corpus(
            run, "apply", files, targets, apply_to_slices, arguments, function, table, sets_aside=max_failed > 0
        )
        counts = done.counts
        counts.check_failed(STAGE.name, max_failed, table)
        return run.finish(counts)


def failed_path(target_dir: Path) -> Path:
    """Return the table of the documents on which the function failed, next to its output."""
    return target_dir.with_name(f"{target_dir.name}.failed.parquet")


@leaves_out_damaged
def apply_to_slices(group: SliceGroup, outputs: tuple[Path, ...], function: str, version: str, rows: Path) -> Counts:
    """Task: call the function for each slice of a group, and write what it yields into its output.

    Writes a table of the documents on which it fails.
    """
    counts = Counts({}, [])
    loaded = load_function(function)
    if version_of(function) != version:
        raise UsageError(f"{function} was changed while it was being applied: run the same command again")
    failed = list[_FailedRow]()
    for part, output in zip(group, outputs, strict=True):
        if not part.damage:
            note_reading(part)
        errors = {row: f"{WORKER_DIED}: {how}" for row, how in rows_of_deaths(part.label).items()}
        _try_alone(loaded, function, part, errors)
        while True:
            attempt = Counts({}, [])
            call = _Call(function, part, read_documents(part, attempt, Rejects(output)), attempt, errors)
            try:
                call.write(loaded, output)
                note_no_place()
                break
            except _Failed as error:
                errors |= _find_failing(loaded, call, error)
        counts.merge(attempt)
        failed += call.failed
    write_rows(rows, REMOVED, failed)
    return counts


def _try_alone(loaded: "DocumentFunction", name: str, part: Slice, errors: Mapping[int, str]) -> None:
    """Call the function for single documents near which workers died before: one dies on the document to blame.

    First that is the last one given, then all before it, as the function may read ahead. What comes of them is dropped.
    """
    for row, times in suspected_rows(part.label).items():
        if row in errors or row == READING:
            continue
        first = row
        if times > 1:
            first = max(part.first_row, row - _MAX_SEARCHED)
        for document in read_documents(part, Counts({}, []), Rejects(None)):
            at = document.key.row
            if at > row:
                break
            if at < first or at in errors:
                continue
            alone = _Call(name, part, iter([document]), Counts({}, []), {}, is_alone=True)
            with suppress(GristmillError, _Failed):  # it fails among the others, too
                deque(alone.run(loaded), maxlen=0)


def _find_failing(loaded: "DocumentFunction", call: "_Call", error: "_Failed") -> dict[int, str]:
    """Return the rows and errors of documents on which the function fails alone: the last one given, or all before it.

    Raises the error as a UsageError if it fails on none alone, and where it fails on most documents.
    """
    rows = call.rows
    if len(call.errors) >= MANY_FAILING and len(call.errors) > len(rows) // 2:
        raise UsageError(str(error)) from error
    for chosen in (rows[-1:], rows[-_MAX_SEARCHED:-1]):
        reasons = dict[int, str]()
        for document in read_chosen(call.part, chosen):
            alone = _Call(call.name, call.part, iter([document]), Counts({}, []), {})
            try:
                for _ in alone.run(loaded):
                    pass
            except _Failed as own:
                reasons[document.key.row] = own.detail
        if reasons:
            return reasons
    raise UsageError(str(error)) from error


class GivenDocument(Document):
    """A document as a user's function is given it, with the text as it was read."""

    original: str = ""
    parts: int = 0  # made of it
    number: int | None = None  # of a part
    is_further_part: bool = False  # it is yielded, and another part was before

    def part(self, text: str, **fields: Any) -> Self:
        """A part of the document, such as a chapter, as a document of its own, with the same fields and `fields`.

        Its field gristmill_part has the document's key and the part's number, from 0: book/a.jsonl@12#0.
        """
        own = {**self.fields, self.text_column: text, **fields, PART_FIELD: f"{self.key}#{self.parts}"}
        self.parts += 1
        return type(self)(text, self.key, own, self.text_column, self.read_bytes, text, number=self.parts - 1)


class _Failed(Exception):
    """The user's function raised an error; `detail` says which one."""

    def __init__(self, message: str, detail: str) -> None:
        super().__init__(message)
        self.detail = detail


class _Call:
    """One call of a user's function: what it was given, and what of that it has not yielded.

    Documents in the rows of `errors`, on which it fails, are not given, but counted and listed in `failed`.
    """

    def __init__(
        self, name: str, part: Slice, documents: Iterator[Document], counts: Counts, errors: Mapping[int, str],
        is_alone: bool = False,
    ) -> None:  # fmt: skip
        self.name = name
        self.is_alone = is_alone
        self.part = part
        self.counts = counts
        self.errors = errors
        self.failed: list[_FailedRow] = []
        self.rows: list[int] = []  # of the documents that were given
        self.given = self._give(documents)
        self.last = "no document"  # the key and the line of the last one given
        self.dropped = Tally()
        self.yielded = bytearray()  # of each row, _WHOLE or _PART if that was; not in the document: it may be a copy
        self.parts: set[tuple[int, int]] = set()  # row and number of each that was yielded
        self.error: GristmillError | None = None  # of the reader; kept, as the function may catch it

    def _give(self, documents: Iterator[Document]) -> Iterator[GivenDocument]:
        try:
            for document in documents:
                text = document.text
                key = document.key
                size = document.read_bytes
                where = f"{key} ({self.part.path} line {key.row + 1})"
                if key.row in self.errors:
                    self._set_aside(document, size, where)
                    continue
                note_place(self.part.label, key.row, self.is_alone)
                self.rows.append(key.row)
                self.dropped.add(1, size)
                self.last = where
                given = [GivenDocument(text, key, document.fields, document.text_column, size, text)]
                del document, text
                yield given.pop()  # a large one is the function's alone, and gone before the next is read
        except GristmillError as error:
            self.error = error
            raise

    def _set_aside(self, document: Document, size: int, where: str) -> None:
        """Count and list a document on which the function fails."""
        rule = f"{FAILED}: {self.short_name}"
        detail = self.errors[document.key.row]
        self.counts.add(self.part.source, rule, size)
        self.counts.add_failure(f"{self.name} failed on {where}: {detail}")
        self.failed.append((*document.key, rule, None, detail, document.own_id))

    @property
    def short_name(self) -> str:
        """Return the function's name without its module."""
        return self.name.partition(":")[2]

    def write(self, function: DocumentFunction, output: Path) -> None:
        """Write what the function yields, and count it and what it drops. Raises _Failed if it fails."""
        with open_jsonl_writer(output) as sink:
            for document in self.run(function):
                size, line = self.encode(document)
                sink.write(line)
                before = document.read_bytes
                if document.is_further_part:
                    self.counts.add(self.part.source, PARTS, size)
                    before = size
                self.counts.add_written(self.part.source, size, before)
        if self.dropped.documents:
            reason = f"dropped by {self.short_name}"
            self.counts.add(self.part.source, reason, self.dropped.bytes, self.dropped.documents)

    def run(self, function: DocumentFunction) -> Iterator[GivenDocument]:
        """Yield what the function yields. Raises _Failed, with the place, if it fails; errors of the reader pass."""
        try:
            documents: object = function(self.given)
            if not isinstance(documents, Iterable):
                got = f"returned a {type(documents).__name__}"
                if documents is None:
                    got = "yields nothing: it returned None"
                raise UsageError(f"{self.name} {got}; expected {_FORM}")
            for document in documents:
                self._check(document)
                yield document
        except GristmillError:
            raise
        except (Exception, SystemExit) as error:
            detail = describe_error(error)
            message = f"{self.name} failed after it was given {self.last}: {detail}"
            raise self.error or _Failed(message, detail) from error
        if self.error:
            raise self.error
        for _ in self.given:  # the function may end early
            pass

    def _check(self, document: object) -> None:
        """Raise UsageError for what is not a document that was given, or was yielded before."""
        if not isinstance(document, GivenDocument):
            raise UsageError(f"{self.name} yielded a {type(document).__name__} after {self.last}: expected {_FORM}")
        offset = document.key.row - self.part.first_row
        self.yielded.extend(bytes(max(0, offset + 1 - len(self.yielded))))
        before = self.yielded[offset]
        is_part = document.number is not None
        if before == _WHOLE or (before and not is_part) or (offset, document.number) in self.parts:
            what = str(document.key)
            if is_part:
                what = f"part {document.number} of {what}"
            raise UsageError(
                f"{self.name} yielded {what} twice: expected each document at most once, or each of its parts "
                "(document.part). (Copies are made by weights, when the corpus is mixed.)"
            )
        if document.number is not None:
            self.parts.add((offset, document.number))
        document.is_further_part = bool(before)
        self.yielded[offset] = _PART if is_part else _WHOLE
        if not before:
            self.dropped.add(-1, -document.read_bytes)

    def encode(self, document: GivenDocument) -> tuple[int, bytes]:
        """Return the size of a document's text, and its record as a line of JSON. UsageError if it has none."""
        try:
            self._join_texts(document)
            size = utf8_size(document.text)
            record = {name: _plain(value) for name, value in document.fields.items()}
            return size, _ENCODER.encode_lines((record,))
        except (UnicodeEncodeError, AttributeError, TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"{self.name} yielded {document.key}, which cannot be written as JSON: {error}") from error

    def _join_texts(self, document: GivenDocument) -> None:
        """Make `document.text` and the field with the text one, whichever of them the function set."""
        column = document.text_column
        text = document.text
        stored = text
        if column in document.fields:
            stored = document.value(column)
        for given in (text, stored):
            if not isinstance(given, str):
                raise UsageError(f"{self.name} yielded {document.key} with a text of type {type(given).__name__}")
        if stored != text and document.original not in (text, stored):
            raise UsageError(
                f"{self.name} yielded {document.key} with one text in `text` and another in fields[{column!r}]: set one"
            )
        if text == document.original:
            document.text = stored
        if stored != document.text or column not in document.fields:
            document.fields[column] = document.text


def _plain(value: Any) -> Any:
    """Return NumPy's numbers and arrays as Python's, NaN and infinity as Python's own writer of JSON spells them."""
    if isinstance(value, (str, msgspec.Raw)):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return _NAN
        if value > 0:
            return _INFINITY
        return _MINUS_INFINITY
    if isinstance(value, (np.generic, np.ndarray)):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [*map(_plain, value)]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (set, frozenset)):
        raise TypeError("a set has no fixed order; give a sorted list")
    return value


def _as_text(value: Any) -> str:
    """Write as text what tables have and JSON has not; an object's address is no value."""
    text = str(value)
    if f"{id(value):x}" in text:
        raise TypeError(
            f"a {type(value).__name__} cannot be written as JSON; give text, numbers, lists or dictionaries"
        )
    return text


_ENCODER = msgspec.json.Encoder(enc_hook=_as_text)


if __name__ == "__main__":
    command(apply)
