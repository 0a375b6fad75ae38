"""Lines: the same for any chunks and slices; truncated and corrupt streams are errors."""

import io
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gristmill.budget import Budget, memory_budget
from gristmill.errors import InputError, UsageError
from gristmill.io.lines import frame_starts, line_starts, read_lines, split_lines

CHUNKS = st.lists(st.binary(max_size=20).map(lambda b: bytes(b"\na"[x % 2] for x in b)))


@given(CHUNKS)
def test_chunks_do_not_matter(chunks: list[bytes]) -> None:
    whole = b"".join(chunks)
    wanted = whole.split(b"\n")
    assert list(split_lines(chunks)) == (wanted if wanted[-1] else wanted[:-1])


@given(CHUNKS, st.integers(1, 30))
def test_slices_begin_at_lines_and_know_their_row(tmp_path_factory: pytest.TempPathFactory, chunks, step) -> None:
    data = b"".join(chunks)
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(data)
    begins = [0, *(i + 1 for i, byte in enumerate(data) if byte == 10 and i + 1 < len(data))]
    wanted = {0}
    for target in range(step, len(data), step):
        wanted.update([start for start in begins if start >= target][:1])
    starts = line_starts(path, step)
    assert starts == [(start, data.count(b"\n", 0, start)) for start in sorted(wanted)]
    ends = [start for start, _ in starts[1:]] + [None]
    pieces = [list(read_lines(path, start, end)) for (start, _), end in zip(starts, ends, strict=True)]
    assert [line for piece in pieces for line in piece] == list(read_lines(path))


@given(CHUNKS, st.integers(1, 30))
def test_slices_of_zst_begin_at_frames_with_a_line(tmp_path_factory: pytest.TempPathFactory, chunks, step) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.jsonl.zst"
    frames = [zstandard.compress(chunk) for chunk in [*chunks, b""]]
    path.write_bytes(b"".join(frames))
    offsets = np.cumsum([0, *map(len, frames)])
    starts = frame_starts(path, step)
    assert starts[0] == (0, 0)
    for start, row in starts[1:]:
        before = b"".join(chunks[: int(np.searchsorted(offsets, start))])
        assert start in offsets
        assert row == before.count(b"\n")
        assert not before or before.endswith(b"\n")
    if step == 1 and all(chunk.endswith(b"\n") for chunk in chunks):
        assert len(starts) == max(1, len(chunks))
    ends = [start for start, _ in starts[1:]] + [None]
    pieces = [list(read_lines(path, start, end)) for (start, _), end in zip(starts, ends, strict=True)]
    assert [line for piece in pieces for line in piece] == list(read_lines(path))


def test_a_line_that_begins_at_the_edge_of_a_chunk_begins_a_slice(tmp_path: Path) -> None:
    path, chunk = tmp_path / "a.jsonl", 1 << 24
    path.write_bytes(b"x" * (chunk - 1) + b"\n" + b"y" * 9 + b"\nz\n")
    assert line_starts(path, chunk) == [(0, 0), (chunk, 1)]


def test_a_line_of_many_chunks_is_copied_once_and_not_once_a_chunk() -> None:
    size, number = 1024, 1000
    allocated = []

    def chunks() -> Iterator[bytes]:
        for _ in range(number):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            yield b"x" * size
            allocated.append(tracemalloc.get_traced_memory()[1] - before)  # the chunk, and copies made of it

    tracemalloc.start()
    try:
        (line,) = split_lines(chunks())
    finally:
        tracemalloc.stop()
    assert len(line) == size * number
    assert sum(allocated) < 4 * size * number


@given(CHUNKS, st.integers(0, 12))
def test_a_line_over_the_limit_is_cut_and_the_others_are_whole(chunks: list[bytes], limit: int) -> None:
    found = [(bytes(line), getattr(line, "size", None)) for line in split_lines(chunks, limit)]
    wanted = list(split_lines(chunks))
    assert found == [(line, len(line) if len(line) > limit else None) for line in wanted]


def test_a_truncated_second_frame_is_an_error(tmp_path: Path) -> None:
    frame = zstandard.compress(b"a\nb\n")
    (tmp_path / "a.zst").write_bytes(frame + frame[:-2])
    lines = read_lines(tmp_path / "a.zst")
    assert [next(lines), next(lines)] == [b"a", b"b"]
    with pytest.raises(InputError, match="truncated or corrupt after line"):
        list(lines)


def test_a_long_window_is_read(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=28)
    out = io.BytesIO()
    with zstandard.ZstdCompressor(compression_params=parameters).stream_writer(out, closefd=False) as sink:
        sink.write(b"a\nb")  # a frame of unknown size, with the window that zstd --long=28 writes
    (tmp_path / "a.zst").write_bytes(out.getvalue())
    assert list(read_lines(tmp_path / "a.zst")) == [b"a", b"b"]


def test_a_long_window_is_reserved_and_refused_by_name_where_it_does_not_fit(tmp_path: Path) -> None:
    """A few kilobytes of zstd may refer back over gigabytes, all of which are in memory."""
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=27)
    with zstandard.open(tmp_path / "a.zst", "wb", zstandard.ZstdCompressor(compression_params=parameters)) as sink:
        for _ in range(40):
            sink.write(b"abc def " * 131_000 + b"\n")
    assert (tmp_path / "a.zst").stat().st_size < 100_000
    with memory_budget(Budget.of(64 << 20, 1)):
        assert len(list(read_lines(tmp_path / "a.zst"))) == 40
    refused = pytest.raises(UsageError, match=r"a\.zst, which refers back over 134,217,728 bytes, .* about 128 MiB")
    with memory_budget(Budget.of(32 << 20, 1)), refused:
        list(read_lines(tmp_path / "a.zst"))


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*gone\.jsonl"):
        list(read_lines(tmp_path / "gone.jsonl"))
