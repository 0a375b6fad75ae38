"""Compressed streams: memory is bounded whatever the ratio; no stream of a file is skipped without an error."""

import bz2
import gzip
import io
import lzma
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from gristmill.errors import DamagedFile, InputError
from gristmill.io.compression.streams import CorruptStream, decompress
from gristmill.io.compression.zstd_frames import CHUNK
from gristmill.io.lines import read_lines
from gristmill.io.readers import read_corpus

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}
LINES = b"".join(b"line %d\n" % i for i in range(1000))
READ_A_LINE = """
import sys
from pathlib import Path
from gristmill.io.lines import read_lines

def peak():  # in KiB; ru_maxrss would be at least the parent's
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

before = peak()
lines = list(read_lines(Path(sys.argv[1]), limit=1 << 20))
print(lines[0].size, len(lines[0]), lines[1], (peak() - before) >> 10)
"""


def chunks_of(data: bytes, compression: str) -> list[bytes]:
    return list(decompress(io.BytesIO(data), compression))


def test_a_small_file_with_an_enormous_line_takes_little_memory(tmp_path: Path) -> None:
    path, size = tmp_path / "a.jsonl.zst", 1 << 30
    compressor = zstandard.ZstdCompressor(level=3)
    with path.open("wb") as file, compressor.stream_writer(file) as sink:
        for _ in range(size >> 24):
            sink.write(b"x" * (1 << 24))
        sink.write(b"\nnext\n")
    assert path.stat().st_size < 200_000
    done = subprocess.run([sys.executable, "-c", READ_A_LINE, path], capture_output=True, text=True, check=True)
    *found, mebibytes = done.stdout.split()
    assert found == [str(size), "1024", "b'next'"]
    assert int(mebibytes) < 64


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_file_without_a_stream_is_truncated(compression: str) -> None:
    for nothing in (b"", bytes(1000)):
        with pytest.raises(CorruptStream):
            chunks_of(nothing, compression)
    assert b"".join(chunks_of(COMPRESS[compression](b""), compression)) == b""


@pytest.mark.parametrize("compression", COMPRESS)
def test_chunks_are_small(compression: str) -> None:
    data = COMPRESS[compression](bytes(5 * CHUNK) + LINES)
    chunks = chunks_of(data, compression)
    assert b"".join(chunks) == bytes(5 * CHUNK) + LINES
    assert max(map(len, chunks)) <= CHUNK


@pytest.mark.parametrize("compression", COMPRESS)
def test_all_streams_of_a_file_are_read_over_padding(compression: str) -> None:
    streams = [COMPRESS[compression](part) for part in (LINES[:7], b"", LINES[7:])]
    padding = b"" if compression == "zst" else bytes(CHUNK + 3)
    assert b"".join(chunks_of(padding.join(streams) + padding, compression)) == LINES


@pytest.mark.parametrize("second", [b"BZh9 is not one", b"no stream at all", b"\x28", bytes(4) + b"(no stream)"])
@pytest.mark.parametrize("compression", COMPRESS)
def test_a_second_stream_that_is_corrupt_is_an_error(compression: str, second: bytes) -> None:
    with pytest.raises(CorruptStream):
        chunks_of(COMPRESS[compression](LINES) + second, compression)


@pytest.mark.parametrize("cut", [1, 3, 5, 12, -1, -4, -9])
@pytest.mark.parametrize("compression", COMPRESS)
def test_a_truncated_stream_names_the_last_good_line(tmp_path: Path, compression: str, cut: int) -> None:
    path = tmp_path / f"a.jsonl.{compression}"
    path.write_bytes(COMPRESS[compression](LINES)[:cut])
    with pytest.raises(InputError, match="truncated or corrupt after line"):
        list(read_lines(path))


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_changed_byte_is_an_error(compression: str) -> None:
    data = COMPRESS[compression](LINES)
    for place in (len(data) // 2, len(data) - 5):
        with pytest.raises(CorruptStream):
            chunks_of(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :], compression)


def test_a_zstd_file_of_many_small_blocks_and_no_checksum_is_read() -> None:
    out = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(out, closefd=False) as sink:
        for line in LINES.splitlines(keepends=True):
            sink.write(line)
            sink.flush(zstandard.FLUSH_BLOCK)
    assert b"".join(chunks_of(out.getvalue(), "zst")) == LINES


def test_a_window_over_two_gibibytes_is_an_error() -> None:
    header = bytes.fromhex("28b52ffd") + bytes([0, (32 - 10) << 3])
    with pytest.raises(CorruptStream, match="too much memory"):
        chunks_of(header + LINES, "zst")


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.warc.zst"])
def test_a_zstd_file_of_skippable_frames_alone_is_not_empty_but_damaged(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(bytes.fromhex("502a4d18") + (4).to_bytes(4, "little") + b"note")
    with pytest.raises(DamagedFile, match=r"\(the file has only skippable frames, and no data\)"):
        list(read_corpus(tmp_path))
