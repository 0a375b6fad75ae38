"""Stage: run a user's function over every document of a corpus; it may drop, change and reorder documents."""

import sys
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
from tyro.conf import Positional

from gristmill.command import command
from gristmill.counts import Counts
from gristmill.engine.claims import reject_overlapping_folders, reject_unknown_files
from gristmill.engine.inputs.recorded import list_corpus
from gristmill.engine.options import RunOptions
from gristmill.engine.run import open_stage
from gristmill.engine.slices import SliceGroup, leaves_out_damaged
from gristmill.engine.task import Stage
from gristmill.errors import GristmillError, UsageError
from gristmill.io.documents import CORPUS_SUFFIXES, DocKey, Document, paths_of
from gristmill.io.readers import Slice, read_documents
from gristmill.io.writers import Rejects, open_jsonl_writer
from gristmill.process_end import Terminated
from gristmill.text import utf8_size
from preprocessing.child_processes import ChildProcesses
from preprocessing.process_settings import keep_settings
from preprocessing.rewriting import plan_targets, rewrite_corpus
from preprocessing.user_function import DocumentFunction, describe, load_function, recorded_version, version_of
from preprocessing.user_values import record_line

STAGE = Stage("apply", version=2, libraries=("zstandard", "zlib", "pyarrow"))
_FORM = "a generator, such as `def keep_english(documents): yield from (d for d in documents if is_english(d.text))`"
_GONE = -1
_END: Any = object()  # after the last document that a function yields


def apply(
    data_dir: Positional[Path],
    target_dir: Positional[Path],
    function: Positional[str],
    options: RunOptions = RunOptions(),
    *,
    text_column: str = "text",
) -> Counts:
    """Run a function of yours over every document of a corpus; it yields those to keep.

    The function is a generator: it takes an iterator over documents and yields documents, each at most once,
    changed (`document.text`, `document.fields`) or not; `document.value("field")` reads a field. It is called for each
    file, for each 64 MiB of a large one, in any order and in several processes: what it yields must depend on these
    documents alone. Processes that it starts must end before it returns, or be daemons, as those of a
    multiprocessing.Pool are.

    It runs in worker processes, with --workers 1 in one, and must not end them: the error of a worker that dies names
    the function. The working folder, the file mode mask, timers and removed modules are put back after each call;
    environment variables and random states are not. Values that it sets must be JSON's, NumPy's, or msgspec.Raw with
    one JSON value, which is checked.

    It runs again where the source of its module has changed. If what it does also depends on other modules or on
    data, give it a version, `keep_english.version = 2`, which then counts in place of the source.

    Args:
        data_dir: Folder with JSON lines (.jsonl, .ndjson, .json; also .gz, .zst, .bz2, .xz), .parquet or .arrow files,
            in any subfolders.
        target_dir: Output folder; files keep their relative paths.
        function: The function as module:function, such as my_filters:keep_english; the module is searched for on
            PYTHONPATH and in the current folder.
        options: Workers, memory, and when to stop; they change no output.
        text_column: The column or field that holds the text, which is `document.text`.

    Returns:
        Documents read, written, and dropped by the function, per source.
    """
    files = list_corpus(data_dir, text_column=text_column)
    reject_overlapping_folders(data_dir, target_dir)
    targets = plan_targets(files, target_dir)
    arguments = {"function": function, "version": recorded_version(function)}
    with open_stage(
        STAGE, target_dir, options, reads=[data_dir], listed={data_dir: paths_of(files)}, publishes=[target_dir],
        column=text_column,
    ) as run:  # fmt: skip
        reject_unknown_files(target_dir, targets.values(), CORPUS_SUFFIXES, run.ledger)
        return run.finish(rewrite_corpus(run, "apply", files, targets, apply_to_slices, arguments, function))


@leaves_out_damaged
def apply_to_slices(group: SliceGroup, outputs: tuple[Path, ...], function: str, version: str) -> Counts:
    """Task: call the function for each slice of a group, and write what it yields into its output."""
    counts, call = Counts({}, []), load_function(function)
    if version_of(function) != version:
        raise UsageError(f"{function} was changed while it was being applied: run the same command again")
    for part, output in zip(group, outputs, strict=True):
        children = ChildProcesses(function)
        given = _GivenDocuments(part, read_documents(part, counts, Rejects(output)), children)
        with open_jsonl_writer(output) as sink, keep_settings(), children:
            for document in _call(function, call, given):
                before, size, line = _encode(function, document, given)
                sink.write(line)
                counts.add_written(part.source, size, before)
        dropped, size = given.left.total()
        if dropped:
            counts.add(part.source, f"dropped by {function.partition(':')[2]}", size, dropped)
    return counts


class _Left:
    """Documents that were given and not yielded yet, by row: the size and the hash of the text as it was read.

    A document takes 16 bytes of memory: a compressed file, which is one slice, may have millions that are dropped.
    """

    def __init__(self, first_row: int) -> None:
        self.first_row = first_row
        self.sizes, self.digests = array("q"), array("q")  # of each row from the first; a size of _GONE: none is left

    def add(self, row: int, size: int, digest: int) -> None:
        """Add a document; rows ascend, and malformed records are left out."""
        for _ in range(self.first_row + len(self.sizes), row):
            self.sizes.append(_GONE)
            self.digests.append(0)
        self.sizes.append(size)
        self.digests.append(digest)

    def pop(self, row: int) -> tuple[int, int] | None:
        """Size and hash of a document, which is left no longer; None if it is not there."""
        rows = range(self.first_row, self.first_row + len(self.sizes))
        place = rows.index(row) if row in rows else None  # a function may have set any value for a row
        if place is None or self.sizes[place] == _GONE:
            return None
        size, self.sizes[place] = self.sizes[place], _GONE
        return size, self.digests[place]

    def total(self) -> tuple[int, int]:
        """How many documents are left, and the sum of their sizes."""
        sizes = np.frombuffer(self.sizes, np.int64)
        return int(np.count_nonzero(sizes != _GONE)), int(sizes.sum(where=sizes != _GONE))


class _GivenDocuments:
    """An iterator over the documents of a slice that keeps account of those given and not yielded yet."""

    def __init__(self, part: Slice, documents: Iterator[Document], children: ChildProcesses) -> None:
        self.part, self.documents, self.children = part, documents, children
        self.left = _Left(part.first_row)
        self.last, self.line = "no document", ""  # the key and the line of the last one given
        self.error: GristmillError | None = None

    def __iter__(self) -> Iterator[Document]:
        return self

    def __next__(self) -> Document:
        self.children.end_copy()
        try:
            document = next(self.documents)
        except GristmillError as error:  # kept, as the function may catch it
            self.error = error
            raise
        self.left.add(document.key.row, utf8_size(document.text), hash(document.text))
        self.last, self.line = str(document.key), f" ({self.part.path} line {document.key.row + 1})"
        return document


def _call(name: str, function: DocumentFunction, given: _GivenDocuments) -> Iterator[Document]:
    """Yield what the function yields. UsageError, with the place, if it fails; the reader's errors pass through."""
    documents: Iterator[Any] | None = None
    while True:
        try:
            documents = documents or _iterate(name, function(given))
            document = next(documents, _END)
        except (GristmillError, KeyboardInterrupt, Terminated):
            given.children.end_copy()
            raise
        except BaseException as error:  # also of sys.exit(), which would end the stage as if it were done
            given.children.end_copy()
            raise given.error or _failure(name, given, error) from error
        given.children.end_copy()
        if document is _END:
            break
        yield document
    if given.error:
        raise given.error
    for _ in given:  # the function may end early
        pass


def _iterate(name: str, found: object) -> Iterator[Any]:
    if not isinstance(found, Iterable):
        raise UsageError(f"{name} returned a {type(found).__name__}: wanted {_FORM}")
    return iter(found)


def _failure(name: str, given: _GivenDocuments, error: BaseException) -> UsageError:
    """What to raise in place of an error of the function."""
    return UsageError(f"{name} failed after it was given {given.last}{given.line}: {describe(error)}")


def _encode(name: str, document: Document, given: _GivenDocuments) -> tuple[int, int, bytes]:
    """Sizes of a yielded document's text, as it was read and now, and its record as a line. UsageError if none."""
    if not isinstance(document, Document):
        raise UsageError(f"{name} yielded a {type(document).__name__} after {given.last}: wanted {_FORM}")
    key, fields = getattr(document, "key", None), getattr(document, "fields", None)
    if not isinstance(key, DocKey) or not isinstance(fields, dict) or not hasattr(document, "text"):
        raise UsageError(
            f"{name} yielded a document after {given.last} whose key or fields it replaced, or of which it deleted a "
            f"part: wanted {_FORM}"
        )
    found = given.left.pop(key.row) if key.file == given.part.name else None
    if found is None:
        raise UsageError(
            f"{name} yielded {document.key}, which is no document that it was given, or was yielded before: wanted "
            "each document at most once. (Copies are made by weights, when the corpus is mixed.)"
        )
    before, digest = found
    _set_text(name, document, digest)
    try:
        return before, utf8_size(document.text), record_line(document.fields)
    except (UnicodeEncodeError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{name} yielded {document.key}, which cannot be written as JSON: {error}") from error


def _set_text(name: str, document: Document, digest: int) -> None:
    """Make `document.text` and the field with the text one, whichever of them the function set.

    `digest` is the hash of the text as it was read. UsageError if it set both, to different texts, or one to no text.
    """
    column, text = document.text_column, document.text
    stored = document.value(column) if column in document.fields else text
    for found in (text, stored):
        if not isinstance(found, str):
            raise UsageError(f"{name} yielded {document.key} with a text of type {type(found).__name__}: wanted str")
    if stored != text and digest not in (hash(text), hash(stored)):
        raise UsageError(f"{name} yielded {document.key} with one text in `text` and another in fields[{column!r}]")
    document.text = stored if hash(text) == digest else text
    if stored != document.text or column not in document.fields:
        document.fields[column] = document.text


if __name__ == "__main__":
    command(apply)
