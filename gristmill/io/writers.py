"""Writers: documents out, as .jsonl, .jsonl.gz or .jsonl.zst, whole or not at all; and rejects."""

import base64
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zstandard

from gristmill.errors import writing
from gristmill.io.files import atomic_write, rejects_path

ZSTD_LEVEL = 3


class Sink(Protocol):
    """What takes bytes."""

    def write(self, data: bytes, /) -> Any: ...


@contextmanager
def open_jsonl_writer(path: Path) -> Iterator[Sink]:
    """Yield a sink for the lines of a file, compressed as its name says; it appears when the block ends well.

    The same lines give the same bytes: no time stamp, one thread, a fixed level.
    """
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        if path.name.endswith(".zst"):
            with zstd_compressor().stream_writer(file, closefd=False) as sink:
                yield sink
        elif path.name.endswith(".gz"):
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6) as sink:
                yield sink
        else:
            yield file


def zstd_compressor() -> zstandard.ZstdCompressor:
    """Ours everywhere: frames carry a checksum, so that damage is seen when they are read."""
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True)


class Rejects:
    """Malformed records met while writing `output`, kept as JSON lines in `output`.malformed.

    Each says the file, the line (from 1), the reason, and the record as it stood: `raw`, or
    `raw_base64` where it is not UTF-8.
    """

    def __init__(self, output: Path) -> None:
        self.path = rejects_path(output)
        with writing(self.path):
            self.path.unlink(missing_ok=True)

    def add(self, file: str, row: int, reason: str, record: bytes | dict[str, Any]) -> None:
        raw = record if isinstance(record, bytes) else msgspec.json.encode(record, enc_hook=str)
        entry = {"file": file, "line": row + 1, "reason": reason, **_printable(raw)}
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as stored:
                stored.write(msgspec.json.encode(entry) + b"\n")


def _printable(raw: bytes) -> dict[str, str]:
    try:
        return {"raw": raw.decode()}
    except UnicodeDecodeError:
        return {"raw_base64": base64.b64encode(raw).decode()}
