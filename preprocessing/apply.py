"""Stage: run a user's function over every document of a corpus; it may drop, change and reorder documents."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import msgspec
import numpy as np
from tyro.conf import Positional

from gristmill.command import command
from gristmill.counts import PARTS, Counts, Tally
from gristmill.engine.options import RunOptions
from gristmill.engine.rewriting import OutputFormat, open_rewriting, rewrite_corpus
from gristmill.engine.slices import SliceGroup, leaves_out_damaged
from gristmill.engine.task import Stage
from gristmill.errors import GristmillError, UsageError, require
from gristmill.io.documents import PART_FIELD, Document
from gristmill.io.readers import Rejects, Slice, read_documents
from gristmill.io.writers import open_jsonl_writer
from gristmill.steps import describe_error
from gristmill.storage.files import is_file
from gristmill.text import utf8_size
from preprocessing.mixing.shuffle_buckets import MANIFEST_NAME
from preprocessing.user_code import load_function, version_of

STAGE = Stage("apply", version=2, libraries=("zstandard", "zlib", "pyarrow"))
_FORM = "a generator, such as `def keep_english(documents): yield from (d for d in documents if is_english(d.text))`"
_WHOLE = 1
_PART = 2
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
) -> Counts:
    """Run your own function over every document of a corpus; it yields the documents to keep.

    The function is a generator: it takes an iterator over documents and yields documents, each at most once, changed
    (`document.text`, `document.fields`) or not; `document.value("field")` reads a field. To make several of one, it
    yields `document.part(text)` for each. It is called once for each file, or for each 64 MiB of a large file, in any
    order and in several processes, so its results must depend on these documents alone. Processes that it starts must
    end before it returns. Values that it sets must be of types of JSON or NumPy.

    It always runs in a worker process, even with --workers 1; if a worker dies, the error names the function.

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

    Returns:
        Documents read, written, and dropped by the function, per source.
    """
    is_mix = is_file(data_dir / MANIFEST_NAME)
    require(
        not is_mix,
        f"{data_dir}: expected a corpus, got the mix before its shuffle; try train or normalized, next to it",
    )
    arguments = {"function": function, "version": version_of(function)}
    with open_rewriting(STAGE, data_dir, target_dir, options, text_column, format) as (run, files, targets):
        done = rewrite_corpus(run, "apply", files, targets, apply_to_slices, arguments, function)
        return run.finish(done.counts)


@leaves_out_damaged
def apply_to_slices(group: SliceGroup, outputs: tuple[Path, ...], function: str, version: str) -> Counts:
    """Task: call the function for each slice of a group, and write what it yields into its output."""
    counts = Counts({}, [])
    loaded = load_function(function)
    if version_of(function) != version:
        raise UsageError(f"{function} was changed while it was being applied: run the same command again")
    for part, output in zip(group, outputs, strict=True):
        call = _Call(function, part, read_documents(part, counts, Rejects(output)))
        with open_jsonl_writer(output) as sink:
            for document in call.run(loaded):
                size, line = call.encode(document)
                sink.write(line)
                if document.is_further_part:
                    counts.add(part.source, PARTS, size)
                counts.add_written(part.source, size, size if document.is_further_part else document.size)
        if call.dropped.documents:
            counts.add(
                part.source, f"dropped by {function.partition(':')[2]}", call.dropped.bytes, call.dropped.documents
            )
    return counts


class GivenDocument(Document):
    """A document as a user's function is given it, with the text and its size as they were read."""

    original: str = ""
    size: int = 0
    parts: int = 0  # made of it
    number: int | None = None  # of a part
    is_further_part: bool = False  # it is yielded, and another part was before

    def part(self, text: str, **fields: Any) -> Self:
        """A part of the document, such as a chapter, as a document of its own, with the same fields and `fields`.

        Its field gristmill_part has the document's key and the part's number, from 0: book/a.jsonl@12#0.
        """
        own = {**self.fields, self.text_column: text, **fields, PART_FIELD: f"{self.key}#{self.parts}"}
        self.parts += 1
        return type(self)(text, self.key, own, self.text_column, text, self.size, number=self.parts - 1)


class _Call:
    """One call of a user's function: what it was given, and what of that it has not yielded."""

    def __init__(self, name: str, part: Slice, documents: Iterator[Document]) -> None:
        self.name = name
        self.part = part
        self.given = self._give(documents)
        self.last = "no document"  # the key and the line of the last one given
        self.dropped = Tally()
        self.yielded = bytearray()  # of each row, _WHOLE or _PART if that was; not in the document: it may be a copy
        self.parts: set[tuple[int, int]] = set()  # row and number of those that were yielded
        self.error: GristmillError | None = None  # of the reader; kept, as the function may catch it

    def _give(self, documents: Iterator[Document]) -> Iterator[GivenDocument]:
        try:
            for document in documents:
                text = document.text
                key = document.key
                size = utf8_size(document.text)
                self.dropped.add(1, size)
                self.last = f"{key} ({self.part.path} line {key.row + 1})"
                given = [GivenDocument(text, key, document.fields, document.text_column, text, size)]
                del document, text
                yield given.pop()  # a large one is the function's alone, and gone before the next is read
        except GristmillError as error:
            self.error = error
            raise

    def run(self, function: DocumentFunction) -> Iterator[GivenDocument]:
        """Yield what the function yields. UsageError, with the place, if it fails; the reader's errors pass through."""
        try:
            documents: object = function(self.given)
            if not isinstance(documents, Iterable):
                raise UsageError(f"{self.name} returned a {type(documents).__name__}: expected {_FORM}")
            for document in documents:
                self._check(document)
                yield document
        except GristmillError:
            raise
        except (Exception, SystemExit) as error:
            message = f"{self.name} failed after it was given {self.last}: {describe_error(error)}"
            raise self.error or UsageError(message) from error
        if self.error:
            raise self.error
        for _ in self.given:  # the function may end early
            pass

    def _check(self, document: object) -> None:
        """Raise UsageError for what is not a document that was given, or was yielded before."""
        if not isinstance(document, GivenDocument):
            raise UsageError(f"{self.name} yielded a {type(document).__name__} after {self.last}: expected {_FORM}")
        place = document.key.row - self.part.first_row
        self.yielded.extend(bytes(max(0, place + 1 - len(self.yielded))))
        before = self.yielded[place]
        is_part = document.number is not None
        if before == _WHOLE or (before and not is_part) or (place, document.number) in self.parts:
            what = f"part {document.number} of {document.key}" if is_part else str(document.key)
            raise UsageError(
                f"{self.name} yielded {what} twice: expected each document at most once, or each of its parts "
                "(document.part). (Copies are made by weights, when the corpus is mixed.)"
            )
        if document.number is not None:
            self.parts.add((place, document.number))
        document.is_further_part = bool(before)
        self.yielded[place] = _PART if is_part else _WHOLE
        if not before:
            self.dropped.add(-1, -document.size)

    def encode(self, document: GivenDocument) -> tuple[int, bytes]:
        """The size of a document's text, and its record as a line of JSON. UsageError if it has none."""
        try:
            self._join_texts(document)
            return utf8_size(document.text), _ENCODER.encode_lines(
                ({k: _plain(v) for k, v in document.fields.items()},)
            )
        except (UnicodeEncodeError, AttributeError, TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"{self.name} yielded {document.key}, which cannot be written as JSON: {error}") from error

    def _join_texts(self, document: GivenDocument) -> None:
        """Make `document.text` and the field with the text one, whichever of them the function set."""
        column = document.text_column
        text = document.text
        stored = document.value(column) if column in document.fields else text
        for found in (text, stored):
            if not isinstance(found, str):
                raise UsageError(f"{self.name} yielded {document.key} with a text of type {type(found).__name__}")
        if stored != text and document.original not in (text, stored):
            raise UsageError(
                f"{self.name} yielded {document.key} with one text in `text` and another in fields[{column!r}]: set one"
            )
        document.text = stored if text == document.original else text
        if stored != document.text or column not in document.fields:
            document.fields[column] = document.text


def _plain(value: Any) -> Any:
    """NumPy's numbers and arrays as Python's, infinite numbers and NaN as Python's own writer of JSON spells them."""
    if isinstance(value, (str, msgspec.Raw)):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return _NAN if math.isnan(value) else _INFINITY if value > 0 else _MINUS_INFINITY
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
