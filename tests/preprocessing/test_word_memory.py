"""The memory for words: as large as asked and no larger, whatever it meets."""

import pytest

from preprocessing.word_memory import new_memory


@pytest.mark.parametrize("size", [0, 1, 4096, 5000, 1 << 20, 32 << 20])
def test_a_memory_takes_what_it_may(size: int) -> None:
    taken = sum(array.nbytes for array in new_memory(size))
    assert size // 2 <= taken <= size + 3072
