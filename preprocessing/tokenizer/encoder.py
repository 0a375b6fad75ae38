"""Encoder: token ids of texts, the same as SentencePiece's, at many times its speed.

BPE models are encoded by the compiled functions in bpe.py, each word once. SentencePiece itself does the
rest: it normalises texts, encodes those with a user-defined symbol, and all texts of models for which it is not
proven that words can be encoded separately. Unigram models are among these: SentencePiece finds the best path
with 32-bit sums over the whole text, and their rounding decides between pieces of nearly equal score, so that a
word's pieces depend on the text before it.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from gristmill.budget import reserve_memory
from gristmill.io.vocabulary import ESCAPED_SPACE, ModelType, PieceType, Vocabulary, read_vocabulary
from gristmill.text import utf8_size
from preprocessing.tokenizer.bpe import MARGIN, Merges, bigram_tables, encode_texts, merge_table, new_word_cache

CACHE_BYTES = 16 << 20
_LONG = 1 << 16  # characters of a text that are encoded together
# Bytes of memory for a byte of UTF-8, its line and its text included:
_SENTENCEPIECE_MEMORY = 64  # of a text that SentencePiece encodes; it takes 20 to 57 (0.2.1, BPE and unigram)
_WORD_MEMORY = 64  # of a word: merge_by_heap takes up to 58
_PROBE_PIECES = 4000  # pieces in the texts that are compared with SentencePiece when an encoder is made
_RESERVED = (PieceType.UNKNOWN, PieceType.CONTROL, PieceType.BYTE)  # never found by matching text


class Encoder:
    """Encodes texts as `model.encode` does, without begin and end of sentence. Not thread-safe.

    Attributes:
        fallback: Reason that SentencePiece itself encodes every text; empty if it does not.
        has_bytes: Whether characters outside the vocabulary become their UTF-8 bytes.

    Args:
        model: A SentencePiece model.
        cache_bytes: Size of the word cache. It affects the speed, not the ids.
    """

    def __init__(self, model: sentencepiece.SentencePieceProcessor, cache_bytes: int = CACHE_BYTES) -> None:
        vocabulary = read_vocabulary(model.serialized_model_proto())
        self._model = model
        self._normalize = _normalizer(vocabulary, model)
        self.has_bytes = bool(vocabulary.of_type(PieceType.BYTE))
        symbols = vocabulary.of_type(PieceType.USER_DEFINED)
        self._symbols = None
        if symbols:
            self._symbols = re.compile("|".join(map(re.escape, map(_unescape, symbols))))
        has_space = ESCAPED_SPACE in vocabulary.of_type(PieceType.NORMAL)
        self._max_ids_per_byte = 1 if has_space else len(ESCAPED_SPACE.encode())  # of a space, as byte pieces
        self._cache = new_word_cache(cache_bytes)
        self.fallback = _fallback_reason(vocabulary)
        if not self.fallback:
            # without pieces with a plain space: SentencePiece escapes the spaces of a text, so it never finds them
            self._pieces = dict[str, int]()
            for i, (piece, piece_type) in enumerate(zip(vocabulary.pieces, vocabulary.types, strict=True)):
                if piece_type == PieceType.NORMAL and " " not in piece:
                    self._pieces[_unescape(piece)] = i
            self._bigrams = set[str]()
            for piece in self._pieces:
                self._bigrams.update(map("".join, pairwise(piece)))
            self._merges = _build_merges(vocabulary, self._pieces, self._bigrams)
            if self._disagrees(vocabulary):
                self.fallback = "this version of SentencePiece merges differently"

    def encode(self, texts: Sequence[str], end_id: int = -1) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Encode texts; returns (ids, offsets), where the ids of text i are ids[offsets[i] : offsets[i + 1]].

        `ids` is int32 and holds the ids of all texts; `offsets` is int64, of length texts + 1.

        Args:
            texts: Any texts. Raises UnicodeEncodeError for a lone surrogate.
            end_id: Id to append to each text, such as `model.eos_id()`; none if negative.
        """
        if self.fallback:
            return _concatenate(self._encode_with_sentencepiece(texts), end_id)
        normalized = [self._normalize(text) for text in texts]
        with_symbol = list[int]()
        if self._symbols:
            with_symbol = [i for i, text in enumerate(normalized) if self._symbols.search(text)]
        if not with_symbol:
            return self._merge(normalized, end_id)
        for i in with_symbol:
            normalized[i] = ""
        ids, offsets = self._merge(normalized, -1)
        parts = _split_by_text(ids, offsets)
        encoded = self._encode_with_sentencepiece([texts[i] for i in with_symbol])
        for i, part in zip(with_symbol, encoded, strict=True):
            parts[i] = part
        return _concatenate(parts, end_id)

    def encode_parts(
        self, text: str, end_id: int = -1, size: int = _LONG, what: str = "a text"
    ) -> Iterator[NDArray[np.int32]]:
        """Yield the ids of one text as `encode` gives them: of parts of about `size` characters, for less memory.

        Raises UsageError, which names `what`, if the text cannot be divided and needs more memory than there is.
        """
        normalized = None if self.fallback else self._normalize(text)
        if normalized is None or (self._symbols and self._symbols.search(normalized)):
            with reserve_memory(
                _SENTENCEPIECE_MEMORY * utf8_size(text), f"{what}, which SentencePiece itself encodes,"
            ):
                yield self.encode([text], end_id)[0]
            return
        start = 0
        end = -1
        while end < len(normalized):
            end = self._cut_after(normalized, start + size)
            part = normalized[start:end]
            word = utf8_size(part) if len(part) > 2 * size else 0
            with reserve_memory(
                _WORD_MEMORY * word, f"{what}, with {len(part):,} characters that the vocabulary may join,"
            ):
                yield self._merge([part], end_id if end == len(normalized) else -1)[0]
            start = end

    def _cut_after(self, text: str, at: int) -> int:
        """Return the first place from `at` on where the ids of both sides are the same apart as together (bpe.py).

        Without byte pieces a character next to it is a piece: an unknown one would be merged with unknown ones on the
        other side.
        """
        for cut in range(at, len(text)):
            before = text[cut - 1]
            after = text[cut]
            if before + after not in self._bigrams and (
                self.has_bytes or before in self._pieces or after in self._pieces
            ):
                return cut
        return len(text)

    def _merge(self, texts: list[str], end_id: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        encoded = [text.encode() for text in texts]
        starts = np.zeros(len(texts) + 1, np.int64)
        np.cumsum([len(data) for data in encoded], out=starts[1:])
        ids = np.empty(int(starts[-1]) * self._max_ids_per_byte + len(texts) + MARGIN, np.int32)
        offsets = np.empty(len(texts) + 1, np.int64)
        data = b"".join([*encoded, bytes(MARGIN + 1)])  # so `eights` has two rows or more: of one, numba compiles anew
        eights = np.ndarray((len(data) - 7,), np.uint64, data, strides=(1,))
        encode_texts(np.frombuffer(data, np.uint8), eights, starts, self._merges, self._cache, end_id, ids, offsets)
        return ids[: offsets[-1]], offsets

    def _encode_with_sentencepiece(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        encoded = [text.encode() for text in texts]
        options: dict[str, Any] = {"add_bos": False, "add_eos": False, "reverse": False, "enable_sampling": False}
        if hasattr(self._model, "EncodeAsNumpy"):  # SentencePiece 0.2.3 and later; lists before
            options["return_type"] = "numpy"
        lists = self._model.encode(encoded, num_threads=1, **options)
        return [np.asarray(ids, np.int32) for ids in lists]

    def _disagrees(self, vocabulary: Vocabulary) -> bool:
        """Return whether SentencePiece gives other ids for texts made of a sample of its pieces."""
        pieces = vocabulary.of_type(PieceType.NORMAL)
        some = pieces[:: len(pieces) // _PROBE_PIECES + 1]
        texts = _mixed_texts(some)
        ids, offsets = self.encode(texts)
        theirs = self._encode_with_sentencepiece(texts)
        return not all(map(np.array_equal, _split_by_text(ids, offsets), theirs))


def _mixed_texts(words: Sequence[str]) -> list[str]:
    """Return 89 texts that have each word twice, before and after others."""
    return ["".join([*words[i::97], *words[i::89]]) for i in range(89)]


def _split_by_text(ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> list[NDArray[np.int32]]:
    """Split the ids of all texts into one array per text."""
    return [ids[start:end] for start, end in pairwise(offsets.tolist())]


def _fallback_reason(vocabulary: Vocabulary) -> str:
    """Return the reason that words of this model cannot be encoded separately; empty if they can."""
    normal = set(vocabulary.of_type(PieceType.NORMAL))
    reserved = list[str]()
    for piece_type in _RESERVED:
        reserved += vocabulary.of_type(piece_type)
    if vocabulary.model_type != ModelType.BPE:
        return "only BPE models can be encoded word by word"
    if not vocabulary.escape_whitespaces:
        return "the model does not escape spaces"
    if PieceType.UNUSED in vocabulary.types:
        return "the model has unused pieces"
    if any(len(piece) == 1 or piece in normal for piece in reserved):
        return "a control piece of the model may occur in text"
    return ""


def _build_merges(vocabulary: Vocabulary, ids: dict[str, int], bigrams: set[str]) -> Merges:
    """Return a vocabulary as tables for compiled functions, given ids of pieces and the pairs of letters in them."""
    symbols = np.invert(np.arange(0x110000, dtype=np.int32))
    for piece, i in ids.items():
        if len(piece) == 1:
            symbols[ord(piece)] = i
    pairs_of_letters = np.array([[*map(ord, pair)] for pair in sorted(bigrams)], np.int64).reshape(-1, 2)
    scores = np.array(vocabulary.scores, np.float32)
    bytes_in_order = sorted(vocabulary.of_type(PieceType.BYTE))
    ids_of_bytes = list(map(vocabulary.pieces.index, bytes_in_order))
    return Merges(
        symbols,
        *bigram_tables(pairs_of_letters),
        merge_table(*_pairs(ids), scores),
        np.array(ids_of_bytes, np.int32),
        vocabulary.types.index(PieceType.UNKNOWN),
    )


def _pairs(ids: dict[str, int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return pairs of symbols, and the ids of the pieces that they make."""
    characters = set[str]().union(*ids)
    symbols = {character: -1 - ord(character) for character in characters} | ids
    pairs = []
    pieces = []
    for piece, i in ids.items():
        for cut in range(1, len(piece)):
            left = symbols.get(piece[:cut])
            right = symbols.get(piece[cut:])
            if left is not None and right is not None:
                pairs.append((left, right))
                pieces.append(i)
    return pairs, pieces


def _normalizer(vocabulary: Vocabulary, model: sentencepiece.SentencePieceProcessor) -> Callable[[str], str]:
    """Return a function that normalises a text as the model asks, with spaces in place of U+2581."""
    if vocabulary.has_charsmap or vocabulary.remove_extra_whitespaces:
        return lambda text: _unescape(model.normalize(text.encode()).decode())
    if not vocabulary.add_dummy_prefix:
        return _unescape
    if vocabulary.treat_whitespace_as_suffix:
        return lambda text: _unescape(text) + " " if text else text
    return lambda text: " " + _unescape(text) if text else text


def _unescape(text: str) -> str:
    return text.replace(ESCAPED_SPACE, " ")


def _concatenate(parts: list[NDArray[np.int32]], end_id: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return (ids, offsets) of all parts, each followed by `end_id` unless that is negative."""
    last = np.array([end_id] if end_id >= 0 else [], np.int32)
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) + len(last) for part in parts], out=offsets[1:])
    pieces = [last[:0]]
    for part in parts:
        pieces += [part, last]
    return np.concatenate(pieces), offsets
