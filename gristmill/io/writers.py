"""Writers: .jsonl, .jsonl.gz and .jsonl.zst files, written atomically, and files of malformed records."""

import base64
import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zstandard

from gristmill.errors import wrap_write_errors
from gristmill.io.corpus_names import LINE_FORMATS, compression_of, parse_name
from gristmill.io.files import rejects_path
from gristmill.storage.local import atomic_write

ZSTD_LEVEL = 3


class Sink(Protocol):
    """Anything that bytes can be written to."""

    def write(self, data: bytes | memoryview, /) -> Any:
        """Append `data`."""


@contextmanager
def open_jsonl_writer(path: Path) -> Iterator[Sink]:
    """Yield a sink for the lines of a file; publish the file when the block ends without an error.

    The suffix .gz or .zst selects the compression. The same lines give the same bytes: no time stamp,
    one thread, a fixed level. No other compression or format is written: see corpus_names.normal_name.
    """
    compression, parts = compression_of(path.name), parse_name(path.name)
    assert compression in ("", "gz", "zst") and (parts is None or parts.format in LINE_FORMATS), path
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        if compression == "zst":
            with zstd_compressor().stream_writer(file, closefd=False) as sink:
                yield sink
        elif compression == "gz":
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6) as sink:
                yield sink
        else:
            yield file


def zstd_compressor() -> zstandard.ZstdCompressor:
    """Compressor for all .zst output; its frames have a checksum, so that readers detect damage."""
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True)


class Rejects:
    """Writer of the malformed records found while writing `output`, as JSON lines in `output`.malformed.

    Each line has the file, the line number (from 1), the reason, and the record itself as `raw`, or
    as `raw_base64` if it is not UTF-8. The constructor removes the file of an earlier run; the first call of
    `add` creates a new one.
    """

    def __init__(self, output: Path) -> None:
        self.path = rejects_path(output)
        if os.path.lexists(self.path):  # most often not, and unlink takes a lock that other processes wait for
            with wrap_write_errors(self.path):
                self.path.unlink(missing_ok=True)

    def add(self, file: str, line: int, reason: str, record: bytes | dict[str, Any]) -> None:
        """Append a malformed record: its file, its line_of that file, the reason, and its bytes or fields."""
        raw = record if isinstance(record, bytes) else msgspec.json.encode(record, enc_hook=str)
        entry = {"file": file, "line": line, "reason": reason, **_raw_field(raw)}
        with wrap_write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as stored:
                stored.write(msgspec.json.Encoder().encode_lines((entry,)))


def _raw_field(raw: bytes) -> dict[str, str]:
    try:
        return {"raw": raw.decode()}
    except UnicodeDecodeError:
        return {"raw_base64": base64.b64encode(raw).decode()}
