"""SentenceSample: the documents with the smallest numbers, whatever is in memory."""

import heapq
from contextlib import closing
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from preprocessing.mixing.shuffle_buckets import LineBuffer
from preprocessing.train_tokenizer import Sampled, SentenceSample

DOCUMENTS = st.lists(st.tuples(st.integers(0, 3) | st.integers(0, 2**64 - 1), st.sampled_from("ab"), st.text("aö\n")))


def sample_in_memory(documents: list[tuple[int, str, str]], budget: int) -> tuple[list[int], int]:
    """The positions of the documents with the smallest numbers, added one by one, and the bytes that are left out."""
    chosen: list[tuple[int, int]] = []
    sizes = [len(text.encode()) for *_, text in documents]
    for position, (number, *_) in enumerate(documents):
        heapq.heappush(chosen, (-number, -position))
        while sum(sizes[-at] for _, at in chosen) > budget and len(chosen) > 1:
            heapq.heappop(chosen)
    kept = sorted(-at for _, at in chosen)
    return kept, sum(sizes) - sum(sizes[at] for at in kept)


@given(documents=DOCUMENTS, budget=st.integers(1, 60))
def test_the_sample_is_that_of_a_heap_of_texts(tmp_path_factory, documents, budget) -> None:
    kept, left_out = sample_in_memory(documents, budget)
    with closing(LineBuffer(Path(tmp_path_factory.getbasetemp()), 8)) as buffer:
        sample = SentenceSample(budget, buffer)
        left = [found for document in documents for found in sample.add(*document)]
        written = b"".join(sample.blocks())
        found = sorted(sample.documents())
    assert sum(each.size for each in left) == left_out and len(left) + len(kept) == len(documents)
    assert found == sorted(Sampled(source, len(text.encode())) for _, source, text in (documents[at] for at in kept))
    lines = (line for at in kept for line in documents[at][2].split("\n") if line)
    assert written == "".join(f"{line}\n" for line in lines).encode()
