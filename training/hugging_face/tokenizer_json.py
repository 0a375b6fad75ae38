"""tokenizer.json and tokenizer_config.json: a SentencePiece model as transformers' fast tokenizer, with the same ids.

The format is that of the library tokenizers: normalizer, model, post-processor, decoder. Spaces become U+2581 as in
SentencePiece, so that white space is kept; characters outside the vocabulary become UTF-8 bytes. Text that looks like a
control piece ("</s>") is text, as it is for SentencePiece. Bytes that are no UTF-8 may be decoded to another number of
replacement characters. Unigram models there may choose another path of equal score.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.errors import UsageError
from gristmill.io.vocabulary import ESCAPED_SPACE, ModelType, PieceType, Vocabulary

_ENDS = ("bos_token", "eos_token", "pad_token")
PLAIN_FIELDS = frozenset(("tokenizer_class", "model_max_length", "clean_up_tokenization_spaces", *_ENDS))
"""What plain_tokenizer_config may write."""


def tokenizer_json(vocabulary: Vocabulary, end: int, before: Sequence[int]) -> dict[str, Any]:
    """Build tokenizer.json. `end`: id of the end-of-document token, or -1; `before`: ids that begin a text.

    Raises UsageError for a SentencePiece model whose ids such a file cannot reproduce, with the reason.
    """
    if reason := _reason_against(vocabulary):
        raise UsageError(
            f"the tokenizer cannot be written as tokenizer.json with the same ids: {reason}. Export without --tokens, "
            "and use the SentencePiece model itself"
        )
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": ESCAPED_SPACE}
    prefix = [{"type": "Prepend", "prepend": ESCAPED_SPACE}] if vocabulary.add_dummy_prefix else []
    ends = [end] if end >= 0 else []
    control = [i for i, kind in enumerate(vocabulary.types) if kind == PieceType.CONTROL]  # no text, if generated
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(vocabulary, i) for i in sorted({*ends, *before, *control, _unknown(vocabulary)})],
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None if vocabulary.model_type == ModelType.BPE else _split_reserved(vocabulary),
        "post_processor": _begin_with({vocabulary.pieces[i]: i for i in before}) if before else None,
        "decoder": {"type": "Sequence", "decoders": list(_decoders(vocabulary))},
        "model": _bpe(vocabulary) if vocabulary.model_type == ModelType.BPE else _unigram(vocabulary),
    }


def tokenizer_config(vocabulary: Vocabulary, end: int, begin: int, context: int, chats: bool = False) -> dict[str, Any]:
    """Build tokenizer_config.json. `end`, `begin`: ids or -1; `context`: the longest sequence of the model.

    The tokens that a chat template writes, such as "</s>", are found in the text of `chats`.
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": not chats,
        "unk_token": vocabulary.pieces[_unknown(vocabulary)],
        **{name: vocabulary.pieces[i] for name, i in _named(end, begin).items() if i >= 0},
    }


def plain_tokenizer_config(content: str, end: int, begin: int, context: int) -> dict[str, Any]:
    """Build tokenizer_config.json for a tokenizer.json that came without: `content`, and ids of tokens or -1."""
    tokens = {token["id"]: token["content"] for token in json.loads(content).get("added_tokens", [])}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **{name: tokens[i] for name, i in _named(end, begin).items() if i in tokens},
    }


def _named(end: int, begin: int) -> dict[str, int]:
    """Return the ids of the tokens that transformers asks for by name, or -1."""
    return dict(zip(_ENDS, (begin if begin >= 0 else end, end, end), strict=True))


def _reason_against(vocabulary: Vocabulary) -> str:
    """Return what of a model has no equal in tokenizer.json; empty if nothing."""
    normal = set(vocabulary.of_type(PieceType.NORMAL))
    if vocabulary.model_type not in (ModelType.BPE, ModelType.UNIGRAM):
        return "it is neither a BPE nor a Unigram model"
    if vocabulary.has_charsmap or vocabulary.remove_extra_whitespaces:
        return "it normalises texts"
    if not vocabulary.escape_whitespaces or vocabulary.treat_whitespace_as_suffix:
        return "it does not write spaces as U+2581 before words"
    if PieceType.USER_DEFINED in vocabulary.types or PieceType.UNUSED in vocabulary.types:
        return "it has user-defined or unused pieces"
    if vocabulary.model_type == ModelType.BPE and (letters := {c for piece in normal for c in piece} - normal):
        return f"the character {min(letters)!r} is in pieces, and not a piece"
    return ""


def _bpe(vocabulary: Vocabulary) -> dict[str, Any]:
    """Byte-pair encoding. A merge is a pair of pieces that make a piece; the piece of the highest score comes first."""
    ids = {piece: i for i, piece in enumerate(vocabulary.pieces)}
    normal = {piece: i for piece, i in ids.items() if vocabulary.types[i] == PieceType.NORMAL}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(normal, key=lambda piece: (-vocabulary.scores[normal[piece]], normal[piece]))
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": vocabulary.pieces[_unknown(vocabulary)],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": _has_bytes(vocabulary),
        "ignore_merges": False,
        "vocab": ids,
        "merges": merges,
    }


def _unigram(vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": _unknown(vocabulary),
        "byte_fallback": _has_bytes(vocabulary),
        "vocab": list(zip(vocabulary.pieces, vocabulary.scores, strict=True)),
    }


def _split_reserved(vocabulary: Vocabulary) -> dict[str, Any]:
    """Pre-tokenizer: cut texts within what looks like a piece that no text has, such as "</s>" or "<0x0A>".

    Unigram of tokenizers would find these pieces; SentencePiece does not. A cut is where no piece of texts crosses, if
    there is such a place, so that no other id changes.
    """
    normal = "\n".join(vocabulary.of_type(PieceType.NORMAL))
    reserved = [*vocabulary.of_type(PieceType.CONTROL), vocabulary.pieces[_unknown(vocabulary)]]
    cuts = [_cut(piece, "", normal) for piece in reserved if len(piece) > 1]
    if _has_bytes(vocabulary):
        cuts.append(_cut("<0x", "[0-9A-F]{2}>", normal))
    pattern = {"Regex": "|".join(cuts)}
    return {"type": "Split", "pattern": pattern, "behavior": "MergedWithPrevious", "invert": False}


def _cut(text: str, following: str, normal: str) -> str:
    """Return the pattern of the character in `text` after which to cut; the pattern `following` comes after it."""
    uncrossed = (cut for cut in range(1, len(text)) if text[cut - 1 : cut + 1] not in normal)
    cut = next(uncrossed, 1)
    before, last, rest = (re.escape(part) for part in (text[: cut - 1], text[cut - 1], text[cut:]))
    return f"(?<={before}){last}(?={rest}{following})"


def _decoders(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    decoders: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": ESCAPED_SPACE}, "content": " "}]
    decoders += [{"type": "ByteFallback"}] * _has_bytes(vocabulary) + [{"type": "Fuse"}]
    return decoders + [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * vocabulary.add_dummy_prefix


def _begin_with(pieces: Mapping[str, int]) -> dict[str, Any]:
    """Post-processor: a text begins with these pieces, whose ids are given."""
    begin = [{"SpecialToken": {"id": piece, "type_id": 0}} for piece in pieces]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [*begin, text],
        "pair": [*begin, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {piece: {"id": piece, "ids": [i], "tokens": [piece]} for piece, i in pieces.items()},
    }


def _special(vocabulary: Vocabulary, piece_id: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": piece_id, "content": vocabulary.pieces[piece_id], **flags, "special": True}


def _unknown(vocabulary: Vocabulary) -> int:
    return vocabulary.types.index(PieceType.UNKNOWN)


def _has_bytes(vocabulary: Vocabulary) -> bool:
    return PieceType.BYTE in vocabulary.types
