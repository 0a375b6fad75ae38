"""The text of tokens comes token by token, whole characters only, and ends where a stop begins."""

import random
from pathlib import Path

import pytest

from gristmill.io.tokenizer_file import AnyTokenizer, open_tokenizer
from tests.tokenizers_of_models import content_of
from tests.training.hugging_face.test_tokenizer_json import train
from training.generation.text import Text

SAID = "the miller grinds 水 and  grain.\n\n🌾 grows, naïve"


@pytest.fixture(scope="module", params=["sentencepiece", "tokenizer.json"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AnyTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    if request.param == "sentencepiece":
        path = folder / "tokenizer.model"
        path.write_bytes(train().serialized_model_proto())
    else:
        path = folder / "tokenizer.json"
        path.write_text(content_of("Llama 3"))
    return open_tokenizer(path)


def pieces(text: Text, tokens: list[int]) -> list[str]:
    """What each token adds to the text, up to its end."""
    found = []
    for token in tokens:
        if text.end:
            break
        before = text.text
        text.add(token, frozenset({2}))
        assert text.text.startswith(before)
        found.append(text.text[len(before) :])
    return found


def whole(tokenizer: AnyTokenizer, prompt: list[int], tokens: list[int]) -> str:
    return tokenizer.decode([*prompt, *tokens])[len(tokenizer.decode(prompt)) :]


def test_pieces_are_the_whole_text(tokenizer: AnyTokenizer) -> None:
    prompt = tokenizer.encode("Now")
    tokens = tokenizer.encode(f"Now {SAID}")[len(prompt) :]
    text = Text(prompt, len(tokens), tokenizer)
    found = pieces(text, tokens)
    assert "".join(found) == whole(tokenizer, prompt, tokens) and text.end == "length"
    assert not any("\ufffd" in piece for piece in found) and len(list(filter(None, found))) > 5


def test_random_tokens_have_the_text_that_they_have_together(tokenizer: AnyTokenizer) -> None:
    draw = random.Random(4)
    for _ in range(50):
        tokens = [draw.randrange(3, tokenizer.vocab_size) for _ in range(20)]
        prompt = [draw.randrange(3, tokenizer.vocab_size) for _ in range(3)]
        text = Text(prompt, 20, tokenizer)
        pieces(text, tokens)
        assert text.text == whole(tokenizer, prompt, tokens)


@pytest.mark.parametrize("stop", ["grinds", " and", "\n\n", "水", "er g", "the"])
def test_a_stop_ends_the_text_before_it(tokenizer: AnyTokenizer, stop: str) -> None:
    tokens = tokenizer.encode(SAID)
    text = Text([], 100, tokenizer, [stop, "never said"])
    pieces(text, tokens)
    assert text.text == SAID[: SAID.index(stop)] and text.end == "stop"
    assert tokenizer.decode(tokens[: len(text.tokens)]).endswith(stop) or stop in tokenizer.decode(text.tokens)


def test_what_only_looks_like_a_stop_is_text(tokenizer: AnyTokenizer) -> None:
    tokens = tokenizer.encode(SAID)
    text = Text([], len(tokens), tokenizer, ["and  grain!", "naïve!"])
    pieces(text, tokens)
    assert text.text == SAID and text.end == "length"


def test_the_end_of_a_document_is_no_text(tokenizer: AnyTokenizer) -> None:
    tokens = tokenizer.encode("grain")
    text = Text([], 100, tokenizer)
    pieces(text, [*tokens, 2, *tokens])
    assert text.text == "grain" and text.tokens == tokens and text.end == "document"
