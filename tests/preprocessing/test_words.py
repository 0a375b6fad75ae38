"""Words of texts: pieces between spaces as `str.split` finds them, learnt once, and forgotten when there are many."""

import random

import pytest

from preprocessing.quality import pieces, words
from preprocessing.quality.pieces import hash_words
from preprocessing.quality.words import WordSplitter, count_sentences, split_piece

ALPHABET = "ab.,-'!? \n\t\u2003\u0085\u00a0\u3000\u1680\u205fé磨\u0301\u200b\ud800"


def test_every_code_point_separates_pieces_as_it_does_in_python() -> None:
    splitter = WordSplitter(lambda piece: [piece])
    texts = ["x".join(map(chr, range(start, start + 256))) for start in range(0, 0x110000, 256)]
    for text in texts:
        assert splitter.split(text).hash.tolist() == hash_words(text.split()).tolist(), ascii(text[:4])


def test_words_are_those_of_the_pieces_of_each_line() -> None:
    chance = random.Random(1)
    splitter = WordSplitter()
    for _ in range(3000):
        text = "".join(chance.choices(ALPHABET, k=chance.randrange(80)))
        lines = [line for line in text.split("\n") if line.split()]
        of_lines = [[word for piece in line.split() for word in split_piece(piece)] for line in lines]
        found = splitter.split(text)
        expected = [word for of_line in of_lines for word in of_line]
        assert found.hash.tolist() == hash_words(expected).tolist(), ascii(text)
        assert found.length.tolist() == [len(word) for word in expected]
        assert found.line.tolist() == [line for line, of_line in enumerate(of_lines) for _ in of_line]


@pytest.mark.parametrize(
    "text",
    ["cannot Cannot CANNOT, gonna; dont! theres.", "the The of, with. that)",
     "Messrs. etc. Mr. grinding. GRINDING. a. U.S.",
     "word, word; word: word? word! word) word] word\" word.", "word,, word), (word, word's, don't, x) :D D: ):"],
)  # fmt: skip
def test_words_of_ascii_letters_are_those_of_the_rules(text: str) -> None:
    expected = [word for piece in text.split() for word in split_piece(piece)]
    found = WordSplitter().split(text)
    assert found.hash.tolist() == hash_words(expected).tolist()
    assert found.flags.tolist() == [words._flags_of(word) for word in expected]


def test_a_sentence_begins_after_a_mark_and_with_each_line() -> None:
    splitter = WordSplitter()
    text = "One. Two! (three)\n\n  \nfour? 'five' .\n. six"
    assert [count_sentences(splitter.split(line)) for line in text.split("\n")] == [2, 0, 0, 1, 1]
    assert count_sentences(splitter.split(text)) == 4  # and none goes on from one line to the next


def test_words_stay_the_same_when_pieces_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (words, pieces):
        monkeypatch.setattr(module, "MAX_PIECES", 50)
    splitter = WordSplitter()
    chance = random.Random(1)
    for _ in range(200):
        text = " ".join(f"w{chance.randrange(1000)}," for _ in range(chance.randrange(200)))
        expected = [word for piece in text.split() for word in split_piece(piece)]
        assert splitter.split(text).hash.tolist() == hash_words(expected).tolist()
    assert len(splitter._first) < 300, "pieces were never forgotten"


def test_a_text_with_more_pieces_than_are_remembered_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (words, pieces):
        monkeypatch.setattr(module, "MAX_PIECES", 100)
    splitter = WordSplitter(lambda piece: [piece])
    text = " ".join([*map(str, range(2000)), *map(str, range(2000))])
    for _ in range(2):
        assert splitter.split(text).hash.tolist() == hash_words(text.split()).tolist()
