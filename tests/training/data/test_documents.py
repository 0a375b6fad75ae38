from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gristmill.errors import InputError
from training.data.sequences import TokenSequences

# tokens 0 … 22: shards of 9, 0, 4 and 10 tokens; one document is empty, one crosses several sequences
LENGTHS: list[list[int]] = [[3, 0, 5, 1], [], [4], [10]]
SPANS = [(0, 0, 3), (2, 3, 5), (3, 8, 1), (4, 9, 4), (5, 13, 10)]  # number, start, length, without the empty one


@pytest.fixture
def folder(shards: Callable[..., Path], tmp_path: Path) -> Path:
    return shards(tmp_path, [[[7] * length for length in lengths] for lengths in LENGTHS])


@pytest.mark.parametrize("start", range(23))
def test_tokens_lie_in_the_documents_of_the_index(folder: Path, start: int) -> None:
    index = TokenSequences(folder, 4).documents
    for stop in range(start + 1, 24):
        spans = index.between(start, stop)
        held = spans.overlap(start, stop)
        found = [row for row, tokens in zip(np.stack(spans, 1).tolist(), held, strict=True) if tokens]
        assert found == [[*span] for span in SPANS if span[1] < stop and span[1] + span[2] > start]
        assert held.sum() == stop - start


def test_positions_restart_with_each_document_and_each_sequence(folder: Path) -> None:
    data = TokenSequences(folder, 6)
    cut, whole, crossing = data.positions([1, 0, 2]).tolist()
    assert cut == [0, 1, 0, 0, 1, 2]  # tokens 6 and 7 of a document that starts at 3: it counts from here
    assert whole == [0, 1, 2, 0, 1, 2]
    assert crossing == [0, 0, 1, 2, 3, 4]


def test_an_index_whose_documents_are_not_in_order_is_an_error(folder: Path) -> None:
    data = TokenSequences(folder, 6)
    path = folder / "shard-00000.idx"
    content = bytearray(path.read_bytes())
    content[34 + 4 * 4 : 34 + 4 * 4 + 8] = (999).to_bytes(8, "little")  # where the first document starts
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"shard-00000.idx is damaged: its documents 0 to 3 are not in order"):
        data.positions([0])
