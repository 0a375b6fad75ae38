"""Readers: the documents of a corpus or of a slice of a file; malformed records are counted and written to a file."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa

from gristmill.budget import MemoryReservation
from gristmill.counts import MALFORMED, READ, SKIPPED, Counts, Damage
from gristmill.errors import (
    DamagedFile,
    GristmillError,
    InputError,
    UsageError,
    require,
    wrap_read_errors,
)
from gristmill.io.arrow_tables import damaged_table, ipc_batches, parquet_batches, records, row_group_cuts
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import (
    AS_UTF8,
    FILE_FORMATS,
    LINE_FORMATS,
    ONE_SLICE,
    READABLE,
    TABLE_FORMATS,
    WEB_FORMATS,
    CorpusFile,
    DocKey,
    Document,
    Reading,
    Slice,
    SliceStart,
    compression_of,
    parse_name,
    slices_at,
)
from gristmill.io.lines import (
    MAX_LINE_BYTES,
    CutLine,
    compression_in_file,
    frame_starts,
    line_starts,
    read_chunks,
    read_lines,
    read_whole,
    without_mark,
)
from gristmill.io.text_records import (
    BadRecord,
    CsvError,
    Malformed,
    decode_bytes,
    decode_string,
    decode_text,
    fields_named,
    join_messages,
    line_of,
    parse_fields,
    read_csv,
    reject_one_value,
    take_text,
)
from gristmill.io.web.encodings import NoText, decode_page
from gristmill.io.web.extraction import page_memory, text_of_page
from gristmill.io.web.gzip_members import gzip_members
from gristmill.io.web.records import MAX_PAGE_BYTES, REPLACED, Skipped, read_archive
from gristmill.io.writers import Rejects
from gristmill.storage.files import is_file
from gristmill.text import utf8_size, working_memory

SLICE_BYTES = 64 << 20  # larger .jsonl and .parquet files are cut into slices of about this size, one task each
_LONG_TEXT = 1 << 20  # characters


def plan_slices(file: CorpusFile) -> list[Slice]:
    """Cut a file into slices: .jsonl at lines, .parquet at row groups; other formats are one slice.

    Reads a large file. Raises InputError if a file that must be cut is unreadable.
    """
    if not is_cut(file):
        return slices_at(file, ONE_SLICE)
    return slices_at(file, find_cuts(file, SLICE_BYTES))


def is_cut(file: CorpusFile, has_frames: bool = False) -> bool:
    """Return whether a file is so large that it is cut into several slices, in a format that can be.

    One of .zst can, if it may have several frames: else it would be read for nothing.
    """
    if file.size <= SLICE_BYTES:
        return False
    parts = parse_name(file.name)
    if parts is None:
        return False
    if parts.format in LINE_FORMATS:
        return not parts.compression or (has_frames and parts.compression == "zst")
    return parts.format == "parquet"


def find_cuts(file: CorpusFile, slice_bytes: int) -> list[SliceStart]:
    """Return where the slices of a file start that is_cut, about `slice_bytes` apart."""
    if _format(file.name) == "parquet":
        return row_group_cuts(file.path, file.size, slice_bytes)
    compression = compression_in_file(file.path)
    if compression != compression_of(file.name):
        return ONE_SLICE
    starts = frame_starts(file.path, slice_bytes) if compression else line_starts(file.path, slice_bytes)
    ends = [start for start, _ in starts[1:]] + [None]
    return [SliceStart(start, row, ((start, end),)) for (start, row), end in zip(starts, ends, strict=True)]


def _format(name: str) -> str:
    parts = parse_name(name)
    if parts is None:
        return ""
    return parts.format


def read_corpus(
    path: Path,
    text_column: str = "text",
    read_also: Collection[str] = (),
    on_malformed: Literal["raise", "skip"] = "raise",
    reading: Reading = AS_UTF8,
) -> Iterator[Document]:
    """Yield every document of a corpus folder, file by file in the order of their names, or of one corpus file.

        for document in read_corpus(Path("corpus"), text_column="body"):
            print(document.key, document.source, document.text, document.value("url"))

    `text_column` is the column or field that holds the text, one in another (meta.text), or a template of several
    ({title} {body}), which is then a field of the document with this name; `read_also` names formats that are read
    only if asked for: txt, md, html, csv and tsv; `reading` is for another encoding, and for chats. Raises InputError
    if a file is truncated, corrupt or unreadable, or has no column `text_column`, and for a malformed record unless
    `on_malformed` is skip; UsageError for a path that is no corpus.
    """
    require(on_malformed in ("raise", "skip"), f"on_malformed {on_malformed!r}: expected 'raise' or 'skip'")
    for file in _files_of(Path(path), text_column, read_also):
        (part,) = slices_at(replace(file, reading=reading), ONE_SLICE)
        for row, record in _records(part):
            if isinstance(record, Skipped):
                continue
            try:
                yield _to_document(record, DocKey(part.name, row), part)
            except Malformed as error:
                if on_malformed == "raise":
                    raise InputError(f"{part.path} line {line_of(record, row)} is malformed: {error}") from error


def _files_of(path: Path, text_column: str, read_also: Collection[str]) -> list[CorpusFile]:
    if not is_file(path):
        return list_corpus(path, text_column=text_column, read_also=read_also)
    if not _format(path.name):
        raise UsageError(
            f"{path}: expected a folder, or a file of a known format: {READABLE}; *.txt, *.md, *.html, *.csv or *.tsv"
        )
    return [CorpusFile(path, path.name, path.stat().st_size, text_column)]


def read_documents(
    part: Slice, counts: Counts, rejects: Rejects, by_original_source: bool = False
) -> Iterator[Document]:
    """Yield the documents of a slice, each counted as READ under its source.

    A record that is not a document is counted as malformed, with the reason, and added to `rejects`. The file is
    counted as read with its first slice. With `by_original_source`, documents are counted under the source of
    Document.original_key, not the slice's, and files, which may hold several sources, are not counted.
    A slice marked as damaged has no documents, and is counted as not read. Raises DamagedFile if the file is truncated
    or corrupt, or a CSV file's quotes do not match, InputError if it is unreadable or has no column `part.text_column`.
    """
    if part.damage:
        counts.add_damaged_file(part.source, part.name, Damage(str(part.path), *part.damage), part.size, not part.start)
        return
    counts.stored += part.size
    if part.start == 0 and not by_original_source:
        counts.add_read_file(part.source)
    hold = MemoryReservation()
    for row, record in _records(part):
        if isinstance(record, Skipped):
            counts.add(part.source, READ, 0)
            counts.add(part.source, f"{SKIPPED}: {record.reason}", 0)
            rejects.note(row, f"{SKIPPED}: {record.reason}", 0, record.url)
            continue
        try:
            document = _to_document(record, DocKey(part.name, row), part)
        except Malformed as error:
            raw, size = _what_is_left(record)
            line = line_of(record, row)
            counts.add(part.source, READ, size)
            counts.add(part.source, f"{MALFORMED}: {error.reason}", size)
            counts.add_example(f"{part.path} line {line}: {error}")
            rejects.note(row, f"{MALFORMED}: {error.reason}", size)
            rejects.add(part.name, line, error.reason, raw)
        else:
            source = document.original_key.source if by_original_source else part.source
            document.read_bytes = utf8_size(document.text)
            counts.add_read(source, document.read_bytes)
            if len(document.text) > _LONG_TEXT:
                hold.require(working_memory(document.text, record), f"{part.path} line {row + 1}")
            only = [document]
            del document
            record = b""
            yield only.pop()  # a large document is the caller's alone, and gone before the next is read
            hold.release()


def read_chosen(part: Slice, rows: Sequence[int], only_text: bool = False) -> Iterator[Document]:
    """Yield the documents of a slice in the given rows, which ascend; other records are not decoded, nor counted.

    With `only_text` other fields of a line of JSON are not decoded: `fields` has the text alone.
    Raises InputError if one of the rows is no document, DamagedFile and InputError as read_documents.
    """
    hold = MemoryReservation()
    rows_left = iter(rows)
    expected = next(rows_left, None)
    if expected is None:
        return
    for row, record in _records(part):
        if row != expected or isinstance(record, Skipped):
            continue
        key = DocKey(part.name, row)
        text = None
        if only_text and isinstance(record, bytes) and not part.reading.message:
            text = decode_text(record, part.text_column)
        try:
            if text is None:
                document = _to_document(record, key, part)
            else:
                document = Document(text, key, {part.text_column: text}, part.text_column)
        except Malformed as error:
            raise InputError(
                f"{part.path} line {line_of(record, row)} is malformed ({error}), but was a document before: run the "
                "stages that read it again"
            ) from error
        if len(document.text) > _LONG_TEXT:
            hold.require(working_memory(document.text, record), f"{part.path} line {row + 1}")
        only = [document]
        del document, text
        record = b""
        yield only.pop()  # a large document is the caller's alone, and gone before the next is read
        hold.release()
        expected = next(rows_left, None)
        if expected is None:
            return
    if expected is not None:
        raise InputError(f"{part.path} has no row {expected}, and had it before: run the stages that read it again")


Record = bytes | dict[str, Any] | BadRecord  # a line of JSON, the fields of a record, or neither


def _records(part: Slice) -> Iterator[tuple[int, Record | Skipped]]:
    """Yield the records of a slice. Raises DamagedFile for any error of a library, too, as for damage it knows."""
    try:
        yield from _records_of(part)
    except (GristmillError, MemoryError, OSError):
        raise
    except Exception as error:
        raise DamagedFile(
            part.path,
            f"{type(error).__name__} of its reader",
            f"its reader failed with {type(error).__name__}: {error}. Fix it, or remove it to continue without it.",
        ) from error


def _records_of(part: Slice) -> Iterator[tuple[int, Record | Skipped]]:
    kind = _format(part.name)
    if kind in TABLE_FORMATS:
        return _read_table(part)
    if kind == "csv":
        return _read_csv(part, ",")
    if kind == "tsv":
        return _read_csv(part, "\t")
    if kind in WEB_FORMATS:
        chunks = read_chunks(part.path, gzip_members)
        return read_archive(part.path, chunks, part.text_column, part.reading.extract)
    if kind in FILE_FORMATS:
        return _read_text(part, kind)
    return _read_lines(part)


def _to_document(record: Record, key: DocKey, part: Slice) -> Document:
    column = part.text_column
    encoding = part.reading.encoding
    message = part.reading.message
    if isinstance(record, BadRecord):
        raise Malformed(record.reason)
    fields = parse_fields(record) if isinstance(record, bytes) else record
    if message:
        fields[message] = join_messages(fields, column, message)
        return Document(fields[message], key, fields, message)
    text = fields.get(column)
    if isinstance(text, msgspec.Raw):
        text = decode_string(text, column)
    elif not isinstance(text, str):  # in other fields, bytes of a table, or none
        fields[column] = text = take_text(fields, column, encoding)
    return Document(text, key, fields, column)


def _what_is_left(record: Record) -> tuple[bytes | dict[str, Any], int]:
    """Return the stored form of a malformed record, and its size in bytes; 0 for the fields of a table's row."""
    if isinstance(record, BadRecord):
        return record.raw, record.size
    return record, len(record) if isinstance(record, bytes) else 0


def _read_lines(part: Slice) -> Iterator[tuple[int, bytes | BadRecord]]:
    """Return the (row, line) of every line that is not blank; no line is kept, as a long one is the caller's alone."""
    encoding = part.reading.encoding
    is_checked = part.start > 0 or _format(part.name) != "json"
    rows = count(part.first_row)

    def to_record(line: bytes) -> tuple[int, bytes | BadRecord] | None:
        nonlocal is_checked
        row = next(rows)
        if row == 0:
            line = without_mark(line)
        if not line or line.isspace():
            return None
        if encoding != "utf-8" and not isinstance(line, CutLine):
            try:
                line = decode_bytes(line, encoding).encode()
            except Malformed as error:
                return row, BadRecord(error.reason, line, len(line))
        if not is_checked:
            reject_one_value(part.path, line.strip())
            is_checked = True
        if isinstance(line, CutLine):
            return row, _cut_to_bad(line, "line", MAX_LINE_BYTES)
        return row, line

    return filter(None, map(to_record, read_lines(part.path, part.start, part.end, MAX_LINE_BYTES)))


def _cut_to_bad(content: CutLine, what: str, limit: int) -> BadRecord:
    return BadRecord(f"{what} over {limit:,} bytes", content, content.size)


def _read_text(part: Slice, kind: str) -> Iterator[tuple[int, dict[str, Any] | BadRecord]]:
    """Yield (0, record) of a text file or HTML page, which is one document."""
    hold = MemoryReservation()
    is_page = kind == "html"
    limit = MAX_PAGE_BYTES if is_page else MAX_LINE_BYTES
    try:
        content = read_whole(part.path, hold, limit)
        if isinstance(content, CutLine):
            yield 0, _cut_to_bad(content, "page" if is_page else "file", limit)
            return
        if is_page:
            hold.require(page_memory(content), str(part.path))
        replaced = 0
        try:
            if is_page and part.reading.encoding == AS_UTF8.encoding:  # a page says itself what it is in
                text, replaced = decode_page(content, None, is_html=True)
            else:
                text = decode_bytes(without_mark(content), part.reading.encoding)
        except (Malformed, NoText) as error:
            reason = error.reason if isinstance(error, Malformed) else str(error)
            yield 0, BadRecord(reason, content, len(content))
            return
        if is_page:
            try:
                text = text_of_page(text, part.reading.extract)
            except (GristmillError, MemoryError):
                raise
            except Exception as error:  # of a library
                yield 0, BadRecord(f"page that fails with {type(error).__name__}", content, len(content))
                return
        fields: dict[str, Any] = {part.text_column: text}
        if replaced:
            fields[REPLACED] = replaced
        yield 0, fields
    finally:
        hold.release()


def _read_csv(part: Slice, delimiter: str) -> Iterator[tuple[int, dict[str, Any] | BadRecord]]:
    """Yield (row, record) of a .csv or .tsv file, rows counted without the header."""
    number = 0
    try:
        columns, records = read_csv(_whole_lines(part.path), delimiter, part.reading.encoding)
        if columns:
            _require_column(columns, part)
        for number, record in enumerate(records, 1):
            yield number - 1, record
    except CsvError as error:
        kind = _format(part.name)
        raise DamagedFile(
            part.path, f"unreadable {kind}",
            f"not readable as .{kind} after record {number:,} ({error}): expected UTF-8, lines that end in \\n or "
            "\\r\\n, and quotes doubled within quoted values. Fix it, or remove it to continue without it.",
        ) from error  # fmt: skip


def _whole_lines(path: Path) -> Iterator[bytes]:
    for line in read_lines(path, limit=MAX_LINE_BYTES):
        if isinstance(line, CutLine):
            raise CsvError(f"a line over {MAX_LINE_BYTES:,} bytes")
        yield line


def _read_table(part: Slice) -> Iterator[tuple[int, dict[str, Any] | BadRecord]]:
    row = part.first_row
    try:
        with wrap_read_errors(part.path):
            if _format(part.name) == "parquet":
                batches = parquet_batches(part.path, part.start, part.end)
            else:
                batches = ipc_batches(part.path)
            _require_column(next(batches).names, part)
            for batch in batches:
                for record in records(batch, part.text_column):
                    yield row, record
                    row += 1
    except GristmillError:  # which may be a ValueError
        raise
    except (pa.ArrowException, OSError, ValueError) as error:  # OSError: a damaged page; the last: a name that is not
        # UTF-8, or that two fields of a struct have
        raise damaged_table(part.path, f" after row {row:,}", error) from error


def _require_column(columns: list[str], part: Slice) -> None:
    twice = [name for name, number in Counter(columns).items() if number > 1]
    if twice:
        raise InputError(f"{part.path} has several columns {twice[0]!r}: rename all but one, or all but the text's")
    if part.text_column in columns:
        return
    for name in fields_named(part.text_column):
        if name in columns or name.partition(".")[0] in columns:
            continue
        raise UsageError(
            f"{part.path} has no column {name!r}, only {', '.join(columns)}: "
            "give the name of the column that holds the text (--text_column)"
        )
