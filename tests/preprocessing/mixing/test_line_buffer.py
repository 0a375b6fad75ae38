"""LineBuffer: the same bytes in memory and in a file, of which memory holds little."""

import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest

from preprocessing.mixing.shuffle_buckets import LineBuffer

LINES = [bytes([i]) * 100_000 for i in range(40)]


@pytest.mark.parametrize("room", [None, 0, 150_000])
def test_bytes_are_read_as_appended(tmp_path: Path, room: int | None) -> None:
    with closing(LineBuffer(tmp_path / "folder", room)) as buffer:
        for chosen in (LINES[:3], LINES[:1], [], LINES):
            buffer.clear()
            for line in chosen:
                buffer.append(line)
            assert buffer.view().tobytes() == b"".join(chosen)
    assert not list(tmp_path.glob("folder/*"))


def test_what_exceeds_the_room_is_not_in_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        with closing(LineBuffer(tmp_path, 1_000_000)) as buffer:
            for line in LINES:
                buffer.append(line)
            assert int(buffer.view().sum(dtype="i8")) == sum(map(sum, LINES))
            assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
