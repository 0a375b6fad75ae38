"""Texts to token ids: what SentencePiece says, at many times its speed.

Byte-pair merging is done by preprocessing/bpe.py, which looks at each word once. All else is left to
SentencePiece itself: rewriting a text before it is cut (its normaliser), texts that hold a user-defined
symbol, and models of which it is not proven that words can be encoded apart. Unigram models are of
these: their best path is found by 32-bit sums over the whole text, whose rounding far into a long text
decides between pieces that are nearly as good, so a word's pieces depend on all that precedes it.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from preprocessing.tokenizer.bpe import Merges, joint_tables, merge_table
from preprocessing.tokenizer.vocabulary import SPACE, Algorithm, Kind, Vocabulary, read_vocabulary
from preprocessing.tokenizer.word_cache import encode_all, new_memory

CACHE = 16 << 20
_PROBE = 4000  # pieces whose encoding is compared before the merges are trusted
_RESERVED = (Kind.UNKNOWN, Kind.CONTROL, Kind.BYTE)


class Encoder:
    """Encodes as `model.encode` does, without begin and end marks. To be used by one thread at a time.

    Attributes:
        fallback: Why SentencePiece encodes every text itself; empty where it need not.

    Args:
        model: A SentencePiece model.
        cache: Bytes to take for words encoded before. It changes the speed alone.
    """

    def __init__(self, model: sentencepiece.SentencePieceProcessor, cache: int = CACHE) -> None:
        vocabulary = read_vocabulary(model.serialized_model_proto())
        self._model = model
        self._rewrite = _rewriting(vocabulary, model)
        symbols = vocabulary.of_kind(Kind.USER_DEFINED)
        self._symbol = re.compile("|".join(re.escape(_spaced(symbol)) for symbol in symbols)) if symbols else None
        self._most_ids = 1 if SPACE in vocabulary.of_kind(Kind.NORMAL) else len(SPACE.encode())  # of a byte
        self._memory = new_memory(cache)
        self.fallback = _why_not(vocabulary)
        if not self.fallback:
            self._merges = _merges(vocabulary)
            if self._differs(vocabulary):
                self.fallback = "this version of SentencePiece does not merge as those we know"

    def encode(self, texts: Sequence[str], end: int = -1) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The ids of all texts, flat, and where each text begins in them (texts + 1 offsets).

        Args:
            texts: Any texts. A lone surrogate, which is no text, raises UnicodeEncodeError.
            end: An id to put behind each text, such as `model.eos_id()`; none if negative.
        """
        if self.fallback:
            return _flat(self._ask(texts), end)
        ready = [self._rewrite(text) for text in texts]
        asked = [i for i, text in enumerate(ready) if self._symbol and self._symbol.search(text)]
        if not asked:
            return self._merge(ready, end)
        for i in asked:
            ready[i] = ""
        ids, offsets = self._merge(ready, -1)
        parts = [ids[offsets[i] : offsets[i + 1]] for i in range(len(texts))]
        for i, found in zip(asked, self._ask([texts[i] for i in asked]), strict=True):
            parts[i] = found
        return _flat(parts, end)

    def _merge(self, texts: list[str], end: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The ids of texts as the normaliser leaves them."""
        encoded = [text.encode() for text in texts]
        starts = np.zeros(len(texts) + 1, np.int64)
        np.cumsum([len(data) for data in encoded], out=starts[1:])
        ids = np.empty(int(starts[-1]) * self._most_ids + len(texts), np.int32)
        offsets = np.empty(len(texts) + 1, np.int64)
        data = np.frombuffer(b"".join(encoded), np.uint8)
        encode_all(data, starts, self._merges, self._memory, end, ids, offsets)
        return ids[: offsets[-1]], offsets

    def _ask(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """What SentencePiece says."""
        encoded = [text.encode() for text in texts]
        options: dict[str, Any] = {"add_bos": False, "add_eos": False, "reverse": False, "enable_sampling": False}
        if hasattr(self._model, "EncodeAsNumpy"):  # before version 0.2.3 there are lists only
            options["return_type"] = "numpy"
        found = self._model.encode(encoded, num_threads=1, **options)
        return [np.asarray(ids, np.int32) for ids in found]

    def _differs(self, vocabulary: Vocabulary) -> bool:
        """Whether SentencePiece says otherwise of a sample of its own pieces, put together."""
        pieces = vocabulary.of_kind(Kind.NORMAL)
        some = pieces[:: len(pieces) // _PROBE + 1]
        texts = ["".join(some[i::97] + some[i::89]) for i in range(89)]
        ids, offsets = self.encode(texts)
        parts = [ids[offsets[i] : offsets[i + 1]] for i in range(len(texts))]
        return not all(map(np.array_equal, parts, self._ask(texts)))


def _why_not(vocabulary: Vocabulary) -> str:
    """Why words cannot be merged apart from SentencePiece; empty if they can."""
    normal = set(vocabulary.of_kind(Kind.NORMAL))
    reserved = [piece for kind in _RESERVED for piece in vocabulary.of_kind(kind)]
    if vocabulary.algorithm != Algorithm.BPE:
        return "only BPE models are encoded word by word"
    if not vocabulary.escape_spaces:
        return "the model does not escape spaces"
    if Kind.UNUSED in vocabulary.kinds:
        return "the model has unused pieces"
    if any(len(piece) == 1 or piece in normal for piece in reserved):
        return "a control piece of the model can be met in text"
    return ""


def _merges(vocabulary: Vocabulary) -> Merges:
    """The tables of the kernel. A piece that spells a space as a space is never met in a text, and left out."""
    ids = {
        _spaced(piece): i
        for i, (piece, kind) in enumerate(zip(vocabulary.pieces, vocabulary.kinds, strict=True))
        if kind == Kind.NORMAL and " " not in piece
    }
    symbols = np.invert(np.arange(0x110000, dtype=np.int32))
    for piece, i in ids.items():
        if len(piece) == 1:
            symbols[ord(piece)] = i
    joints = {joint for piece in ids for joint in pairwise(piece)}
    keys, merged = merge_table(*_pairs(ids))
    return Merges(
        symbols,
        *joint_tables(np.array([(ord(a), ord(b)) for a, b in sorted(joints)], np.int64).reshape(-1, 2)),
        keys,
        merged,
        np.array(vocabulary.scores, np.float32),
        np.array([vocabulary.pieces.index(piece) for piece in sorted(vocabulary.of_kind(Kind.BYTE))], np.int32),
        vocabulary.kinds.index(Kind.UNKNOWN),
    )


def _pairs(ids: dict[str, int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Every two symbols that together are a piece, and that piece."""
    symbols = {character: -1 - ord(character) for piece in ids for character in piece} | ids
    pairs, made = [], []
    for piece, i in ids.items():
        for cut in range(1, len(piece)):
            left, right = symbols.get(piece[:cut]), symbols.get(piece[cut:])
            if left is not None and right is not None:
                pairs.append((left, right))
                made.append(i)
    return pairs, made


def _rewriting(vocabulary: Vocabulary, model: sentencepiece.SentencePieceProcessor) -> Callable[[str], str]:
    """What makes of a text the one that is cut, with spaces for U+2581 (SentencePiece takes one for the other)."""
    if vocabulary.charsmap or vocabulary.remove_extra_spaces:
        return lambda text: _spaced(model.normalize(text.encode()).decode())
    if not vocabulary.dummy_prefix:
        return _spaced
    if vocabulary.space_as_suffix:
        return lambda text: _spaced(text) + " " if text else text
    return lambda text: " " + _spaced(text) if text else text


def _spaced(text: str) -> str:
    return text.replace(SPACE, " ")


def _flat(parts: list[NDArray[np.int32]], end: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Arrays one after another, each followed by `end` unless it is negative, and where each begins."""
    last = np.array([end] if end >= 0 else [], np.int32)
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) + len(last) for part in parts], out=offsets[1:])
    pieces = (array for part in parts for array in (part, last))
    return np.concatenate([last[:0], *pieces]), offsets
