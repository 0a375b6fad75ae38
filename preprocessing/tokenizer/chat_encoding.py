"""The ids of a chat, and which of them are targets: the tokens of what the assistant says."""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from gristmill.io.tokenizer_file import AnyTokenizer, JsonTokenizer, SentencePieceTokenizer
from gristmill.io.vocabulary import read_pieces


class TextTokens(NamedTuple):
    """The ids of a text, and the characters of it that each is of: `ends` are exclusive."""

    ids: list[int]
    starts: list[int]
    ends: list[int]


def encode_chat(
    model: AnyTokenizer, text: str, spans: Sequence[tuple[int, int]], end: int
) -> tuple[list[int], list[bool]]:
    """Return the ids of a chat, and which of them are targets; `end` ends it, unless it is -1.

    A token that has a character in one of the spans is a target, also if it begins before with a space, as the first
    word of an answer does. So are bytes of a character, which a tokenizer may place at its beginning, without a length.
    """
    if isinstance(model, SentencePieceTokenizer):
        tokens = _encode_sentencepiece(model, text)
    else:
        tokens = _encode(model, text)
    ids = tokens.ids
    starts = np.array(tokens.starts, np.int64)
    ends = np.array(tokens.ends, np.int64)
    is_target = np.zeros(len(ids), bool)
    for first, last in spans:
        is_target |= (starts < last) & ((ends > first) | (starts >= first))
    mask: list[bool] = is_target.tolist()
    if end >= 0 and ids[-1:] != [end]:
        ids.append(end)
        mask.append(False)
    return ids, mask


def special_tokens(model: AnyTokenizer) -> dict[str, str]:
    """Return the tokens that a chat template may name, of a tokenizer without a tokenizer_config.json."""
    ids = {"bos_token": model.special({}, "bos"), "eos_token": model.special({}, "eos")}
    if isinstance(model, JsonTokenizer):
        token_of = model.model.id_to_token
    else:
        token_of = model.model.id_to_piece
        ids |= {"pad_token": model.model.pad_id(), "unk_token": model.model.unk_id()}
    tokens = dict[str, str]()
    for name, piece in ids.items():
        if piece >= 0:
            tokens[name] = str(token_of(piece))
    return tokens


def _encode(model: JsonTokenizer, text: str) -> TextTokens:
    encoding = model.model.encode(text, add_special_tokens=False)
    tokens = TextTokens(list(encoding.ids), [], [])
    for start, end in encoding.offsets:
        tokens.starts.append(start)
        tokens.ends.append(end)
    return tokens


def _encode_sentencepiece(model: SentencePieceTokenizer, text: str) -> TextTokens:
    """Encode the text between control tokens by SentencePiece, which itself takes `</s>` in a text for text."""
    tokens = TextTokens([], [], [])
    start = 0
    for part, control in _cut_at_control_tokens(model, text):
        if control >= 0:
            pieces = [(control, part)]
        else:
            pieces = read_pieces(model.model.encode(part, out_type="serialized_proto"))
        for piece, surface in pieces:
            tokens.ids.append(piece)
            tokens.starts.append(start)
            start += len(surface)
            tokens.ends.append(start)
    return tokens


def _cut_at_control_tokens(model: SentencePieceTokenizer, text: str) -> Iterator[tuple[str, int]]:
    """Yield the parts of a text in order, each with its id if it is a control token, or -1."""
    control, pattern = _control_tokens(model)
    parts = [text]
    if control:
        parts = pattern.split(text)
    for part in parts:
        if part:
            yield part, control.get(part, -1)


@lru_cache(maxsize=1)
def _control_tokens(model: SentencePieceTokenizer) -> tuple[dict[str, int], re.Pattern[str]]:
    """Return the ids of the control tokens, and a pattern that finds them, the longest first."""
    processor = model.model
    control = dict[str, int]()
    for piece in range(model.vocab_size):
        if processor.is_control(piece):
            control[processor.id_to_piece(piece)] = piece
    longest_first = sorted(control, key=len, reverse=True)
    return control, re.compile(f"({'|'.join(map(re.escape, longest_first))})")
