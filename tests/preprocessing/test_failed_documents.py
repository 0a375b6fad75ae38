"""Documents on which a tokenizer fails have no tokens, not even those that end one; they are counted and listed."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tokenizers
from numpy.typing import NDArray

from gristmill.counts import READ, WRITTEN, Counts
from gristmill.engine.options import RunOptions
from gristmill.errors import UsageError
from gristmill.io.documents import DocKey, Document, Slice
from gristmill.io.token_shards import open_shards
from preprocessing.encode import encode
from preprocessing.mix import mix
from preprocessing.tokenize_chats import tokenize_chats
from preprocessing.tokenize_corpus import tokenize_corpus
from preprocessing.tokenizer.safe_encoder import ReadDocument, SafeEncoder, TokenizerFailed
from tests.verify_shards import verify_shards

LONG = "grain " * 15_000  # characters: a text that is encoded in parts
TEXTS = ["the mill", "the unheard mill", LONG, f"{LONG} unheard", "grain", "", "unheard"]
FAILED = {1, 3, 6}
LISTED = [("web/a.jsonl", row, f"id {row}", "failed: tokenizer") for row in sorted(FAILED)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer of words that fails on those that it does not know, as its library does without a token for them."""
    vocabulary = {"</s>": 0, "<s>": 1, "the": 2, "mill": 3, "grain": 4}
    of_words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    of_words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    path = tmp_path / "tokenizer.json"
    of_words.save(str(path))
    return path


@pytest.fixture
def corpus_of_texts(tmp_path: Path, write) -> Path:
    write(tmp_path / "in/web/a.jsonl", [{"text": text, "id": f"id {row}"} for row, text in enumerate(TEXTS)])
    return tmp_path / "in"


def expected_documents(tokenizer: Path) -> list[list[int]]:
    """Return the ids of the other documents, between the tokens that begin and end each."""
    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    return [[1, *library.encode(text).ids, 0] for row, text in enumerate(TEXTS) if row not in FAILED]


def documents_in(folder: Path) -> list[list[int]]:
    return [ids.tolist() for shard in open_shards(folder)[1] for ids in shard]


def listed_in(table: Path) -> list[tuple[Any, ...]]:
    return [(row["file"], row["row"], row["id"], row["rule"]) for row in pq.read_table(table).to_pylist()]


def test_tokenize_leaves_them_out(tmp_path: Path, corpus_of_texts: Path, tokenizer: Path, quiet: RunOptions) -> None:
    out = tmp_path / "tokens"
    said = r"tokenize_corpus: the tokenizer failed on 3 of 7 documents, .* line 2: Exception: WordLevel error: .*listed"
    with pytest.raises(UsageError, match=said):
        tokenize_corpus(corpus_of_texts, tokenizer, out, quiet, bos="<s>")
    counts = tokenize_corpus(corpus_of_texts, tokenizer, out, quiet, bos="<s>", max_failed=0.5)
    assert (counts.total(READ).documents, counts.total(WRITTEN).documents) == (7, 4)
    assert documents_in(out) == expected_documents(tokenizer)
    verify_shards(out)
    assert listed_in(tmp_path / "tokens.removed.parquet") == LISTED


def test_encode_leaves_out_all_copies(
    tmp_path: Path, corpus_of_texts: Path, tokenizer: Path, quiet: RunOptions
) -> None:
    mix(corpus_of_texts, tmp_path / "mix", holdout=0, options=quiet, weights="web=2")
    arguments = (corpus_of_texts, tmp_path / "mix", tokenizer, tmp_path / "tokens", quiet)
    with pytest.raises(UsageError, match="encode: the tokenizer failed on 6 of 14 documents, more than"):
        encode(*arguments, bos="<s>")
    counts = encode(*arguments, bos="<s>", max_failed=0.5)
    assert counts.total("failed: tokenizer").documents == 6
    for name, copies in (("train", 2), ("holdout", 0)):
        expected = Counter(map(tuple, copies * expected_documents(tokenizer)))
        assert Counter(map(tuple, documents_in(tmp_path / "tokens" / name))) == expected
        verify_shards(tmp_path / "tokens" / name)
    assert listed_in(tmp_path / "tokens.removed.parquet") == LISTED


def test_chats_are_left_out(tmp_path: Path, write, tokenizer: Path, quiet: RunOptions) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for message in messages %}the {{ message.content }} {% endfor %}")
    chats = list[dict[str, object]]()
    for row, answer in enumerate(("mill", "unheard", "grain")):
        messages = [{"role": "user", "content": "grain"}, {"role": "assistant", "content": answer}]
        chats.append({"messages": messages, "id": f"id {row}"})
    write(tmp_path / "chats.jsonl", chats)
    arguments = (tmp_path / "chats.jsonl", tmp_path / "tokens", tokenizer, quiet)
    with pytest.raises(UsageError, match="tokenize_chats: the tokenizer failed on 1 of 3 documents, more than"):
        tokenize_chats(*arguments, template=template)
    counts = tokenize_chats(*arguments, template=template, max_failed=0.5)
    assert counts.total("failed: tokenizer").documents == 1
    assert documents_in(tmp_path / "tokens") == [[2, 4, 2, 3, 0], [2, 4, 2, 4, 0]]
    assert listed_in(tmp_path / "tokens.removed.parquet") == [("chats/chats.jsonl", 1, "id 1", "failed: tokenizer")]


class Picky:
    """Fails on texts with a word, and on so many together."""

    def __init__(self, word: str = "", together: int = 100) -> None:
        self.word = word
        self.together = together

    def encode(self, texts: Sequence[str], end_id: int = -1) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        if len(texts) >= self.together or (self.word and any(self.word in text for text in texts)):
            raise RuntimeError("too much")
        return np.full(len(texts), end_id, np.int32), np.arange(len(texts) + 1)


def read_documents(count: int) -> list[ReadDocument]:
    part = Slice(Path("web/a.jsonl"), "web/a.jsonl")
    texts = [f"text {row}." for row in range(count)]
    return [ReadDocument(part, Document(text, DocKey("web/a.jsonl", row), {})) for row, text in enumerate(texts)]


@pytest.mark.parametrize(("word", "failed"), [("7", {7, 17, 27}), ("3", {3, 13, 23, *range(30, 34)})])
def test_those_that_fail_alone_are_found_among_those_that_are_encoded_together(word: str, failed: set[int]) -> None:
    counts = Counts({}, [])
    encoder = SafeEncoder(Picky(word), -1, 5, counts)  # type: ignore[arg-type]
    encoded = encoder.encode(read_documents(34))
    assert encoded.failed == dict.fromkeys(sorted(failed), "failed: tokenizer")
    assert np.diff(encoded.offsets).tolist() == [int(row not in failed) for row in range(34)]
    assert encoded.ids.tolist() == [5] * (34 - len(failed))
    assert [document.row for document in encoder.failed] == sorted(failed)
    assert counts.failures[0] == f"the tokenizer failed at web/a.jsonl line {min(failed) + 1}: RuntimeError: too much"


@pytest.mark.parametrize("picky", [Picky("text"), Picky(together=30)], ids=["on most", "on none alone"])
def test_a_tokenizer_that_fails_on_most_or_on_none_alone_ends_the_stage(picky: Picky) -> None:
    encoder = SafeEncoder(picky, -1, 5, Counts({}, []))  # type: ignore[arg-type]
    with pytest.raises(TokenizerFailed, match=r"the tokenizer failed at web/a\.jsonl line 1: RuntimeError: too much"):
        encoder.encode(read_documents(34))
