"""Copies of the beginning of corpus files that are in a bucket or on the Hub, from which a sample is read."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from gristmill.errors import wrap_read_errors
from gristmill.io.arrow_tables import damaged_table
from gristmill.io.corpus_names import LINE_FORMATS, parse_name
from gristmill.io.documents import CorpusFile
from gristmill.storage.objects import download
from gristmill.urls import is_remote

_TAIL_BYTES = 64 << 10  # of a .parquet, where its footer is most often
_END_BYTES = 8  # of a .parquet: the size of its footer, and PAR1


def partial_copy(file: CorpusFile, size: int, folder: Path) -> CorpusFile:
    """A file whose `path` is local: of a remote one a copy, below `folder`, of about the first `size` bytes.

    Its `size` is still that of the whole. A .parquet has whole row groups, and holes for the others. Formats that
    cannot be read in part are copied whole. Raises the errors of the store, and DamagedFile for a .parquet.
    """
    if not is_remote(file.path):
        return file
    parts = parse_name(file.name)
    folder.mkdir(parents=True, exist_ok=True)
    target = Path(tempfile.mkdtemp(dir=folder)) / file.path.name
    with wrap_read_errors(file.path):
        if size < file.size and parts and parts.format == "parquet":
            try:
                _copy_row_groups(file, size, target)
            except pa.ArrowException as error:
                raise damaged_table(file.path, "", error) from error
        elif size < file.size and parts and parts.format in LINE_FORMATS:
            download(file.path, target, 0, size)
            if not parts.compression:
                _cut_at_line(target)
        else:
            download(file.path, target)
    return replace(file, path=target)


def _cut_at_line(path: Path) -> None:
    """Cut a file after its last line that is whole."""
    end = path.read_bytes().rfind(b"\n") + 1
    with path.open("r+b") as lines:
        lines.truncate(end)


def _copy_row_groups(file: CorpusFile, size: int, target: Path) -> None:
    """Copy the footer of a .parquet, and its first row groups, of `size` bytes or a little more."""
    download(file.path, target, max(0, file.size - _TAIL_BYTES))
    with target.open("rb") as copy:
        copy.seek(-_END_BYTES, 2)
        footer = int.from_bytes(copy.read(4), "little") + _END_BYTES
    if _TAIL_BYTES < footer < file.size:
        download(file.path, target, file.size - footer)
    found, end = pa.parquet.read_metadata(target), 0
    for number in range(found.num_row_groups):
        if end >= size:
            break
        group = found.row_group(number)
        chunks = [group.column(i) for i in range(group.num_columns)]
        starts = [chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks]
        end = max(start + chunk.total_compressed_size for start, chunk in zip(starts, chunks, strict=True))
    download(file.path, target, 0, min(end, file.size))
