"""Loading a tokenizer with the encoder that is fastest for it, and counting the tokens of texts.

A tokenizer.json is encoded by gigatoken where it can: byte-level BPE and SentencePiece-like BPE at 30 to 90 times the
speed of tokenizers. It is not taken at its word: where the file declares what gigatoken does not do, tokenizers itself
encodes; for others both libraries encode probes when an encoder is made, and then one text of each batch. Where they
differ, tokenizers itself encodes.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gristmill.budget import reserve_memory
from gristmill.io.tokenizer_file import AnyTokenizer, JsonTokenizer, SentencePieceTokenizer, open_tokenizer
from gristmill.text import utf8_size

Done = TypeVar("Done")
_MAX_COMPARED = 1 << 14  # characters of a text that tokenizers encodes, too, for comparison
_FAST_MEMORY = 44  # bytes for a byte of UTF-8: gigatoken takes 3 to 41
_SLOW_MEMORY = 270  # bytes for a byte of UTF-8: tokenizers takes 125 to 253
_PROBE_TOKENS = 4000
_PROBES = (
    "The mill's stones don't turn. WE'LL SEE: it’s 1234567.89 €, ½, ٣٤ and x²!",
    "\n\n\n  indented\t\ttabs \r\n \u00a0\u2003end  ",
    "Größe, naïve, Москва, Ἀθῆναι, שלום, مرحبا, नमस्ते, ไทย, 你好，世界。こんにちは 한국어 e\u0301 \u212b \uac00\u11a8",
    "👩‍👩‍👧‍👦 🇫🇷 ✈\ufe0f \U0001f9d1\U0001f3fd \u200b\u200d\ufeff \u2581\u2581 \x00\x01\x7f \U0010fffd \ue000",
    "def f(x):\n    return {'a': [1, 2], \"b\": x ** 2}  # <s></s> [INST] <unk> <0x0A>\n",
    "",
    " ",
)
_PROBE_ADDED = 500  # added tokens that are looked at in each context
_CONTEXTS = (
    "{0}", "a{0}b", " {0} ", "  {0}\u00a0 x", "x {0}\n\ny", "{0}{1}", "{0} {1}", ".{0}.", "1{0}2", "_{0}_",
    "\n{0}\t{1}", "é{0}\u0301水{0}水",
)  # fmt: skip


class EnginesDifferError(Exception):
    """gigatoken and tokenizers give other ids for a text; the message shows it."""


class JsonEncoder:
    """Encodes texts with a tokenizer.json. Not thread-safe.

    Attributes:
        fallback: Reason that tokenizers itself encodes every text; empty if gigatoken does.

    Args:
        tokenizer: The tokenizer, opened by tokenizers.
    """

    def __init__(self, tokenizer: JsonTokenizer) -> None:
        self._tokenizer = tokenizer
        self.fallback = ""
        try:
            from gigatoken import gigatoken_rs
        except ImportError:
            self.fallback = "gigatoken is not installed: pip install 'gristmill[tokenizers]'"
            return
        try:
            self.fallback = undone_flags(json.loads(tokenizer.content))
            if self.fallback:
                return
            self._fast: Any = gigatoken_rs.load_hf_json(tokenizer.content.encode())
            self._compare(self._probes(), *self._encode_fast(self._probes()))
        except Exception as error:
            self.fallback = f"gigatoken does not encode as this tokenizer ({str(error).splitlines()[0][:160]})"

    def encode(self, texts: Sequence[str], end_id: int = -1) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Encode texts, each followed by `end_id` unless that is negative: (ids, offsets) as Encoder.encode gives them.

        Raises EnginesDifferError where tokenizers encodes a sampled text otherwise: set `fallback`, and encode again.
        """
        ids, offsets = self._encode(texts)
        if end_id >= 0:
            ids = np.insert(ids, offsets[1:], end_id)
            offsets = offsets + np.arange(len(offsets))
        return ids, offsets

    def encode_parts(self, text: str, end_id: int = -1, what: str = "a text") -> Iterator[NDArray[np.int32]]:
        """Yield the ids of one long text. Raises UsageError, which names `what`, if there is too little memory."""
        size = utf8_size(text) * (_SLOW_MEMORY if self.fallback else _FAST_MEMORY)
        with reserve_memory(size, f"{what}, which is encoded as a whole,"):
            yield self.encode([text], end_id)[0]

    def _encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        if self.fallback:
            return _join([self._tokenizer.encode(text) for text in texts])
        ids, offsets = self._encode_fast(texts)
        short = [i for i, text in enumerate(texts) if len(text) <= _MAX_COMPARED]
        if short:
            at = short[len(ids) % len(short)]
            self._compare([texts[at]], ids[offsets[at] : offsets[at + 1]], offsets[at : at + 2] - offsets[at])
        return ids, offsets

    def _encode_fast(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        layout = self._fast.encode_batch(list(texts), parallel=False).layout
        ids = np.asarray(layout.content.data)
        offsets = np.asarray(layout.offsets.data)
        return ids.view(np.int32), offsets.astype(np.int64, copy=False)

    def _compare(self, texts: Sequence[str], ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> None:
        for i, text in enumerate(texts):
            ours = ids[offsets[i] : offsets[i + 1]]
            theirs = self._tokenizer.encode(text)
            if not np.array_equal(ours, theirs):
                at = 0
                while at < min(len(ours), len(theirs)) and ours[at] == theirs[at]:
                    at += 1
                raise EnginesDifferError(f"other ids from token {at} on of a text that begins {text[:40]!r}")

    def _probes(self) -> list[str]:
        """Return the texts of many scripts, and of tokens of the vocabulary, side by side."""
        size = self._tokenizer.vocab_size
        some = range(0, size, size // _PROBE_TOKENS + 1)
        words = [self._tokenizer.decode([i]) for i in some]
        added = [token["content"] for token in json.loads(self._tokenizer.content).get("added_tokens") or ()]
        some_added = added[:: len(added) // _PROBE_ADDED + 1]
        mixed = ["".join(words[i::97] + words[i::89]) for i in range(89)]
        within = list[str]()
        for token, following in zip(some_added, [*some_added[1:], *some_added[:1]], strict=True):
            within += [context.format(token, following) for context in _CONTEXTS]
        return [*_PROBES, *mixed, *within]


def undone_flags(content: dict[str, Any]) -> str:
    """Return what a tokenizer.json declares of its added tokens that gigatoken does not do; empty if it does all."""
    added = content.get("added_tokens") or []
    contents = [token["content"] for token in added]
    has_space_outside = any(content != content.strip() for content in contents)
    for token in added:
        shown = f"the added token {token['content']!r}"
        if token.get("single_word"):
            return f"gigatoken does not find whole words alone (single_word), as {shown} is to be found"
        if token.get("normalized") and content.get("normalizer"):
            return f"gigatoken does not look for tokens in normalized text, as for {shown}"
        if has_space_outside and (token.get("lstrip") or token.get("rstrip")):
            return f"gigatoken differs where a token begins or ends with a space and one takes spaces, as {shown}"
    return ""


def _join(parts: Sequence[Sequence[int]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return np.array(list(chain.from_iterable(parts)), np.int32), offsets


if TYPE_CHECKING:
    from preprocessing.tokenizer.encoder import Encoder

    AnyEncoder = Encoder | JsonEncoder
LONG_TEXT = 1 << 16  # characters: a longer text is encoded in parts, which hold the memory that they need


def load_encoder(path: Path) -> tuple[AnyTokenizer, "Encoder | JsonEncoder"]:
    """Load a tokenizer and its encoder, once per process, so that all slices share the word cache.

    Raises UsageError if `path` is no tokenizer.
    """
    return _load(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _load(path: Path, mtime_ns: int) -> tuple[AnyTokenizer, "Encoder | JsonEncoder"]:  # noqa: ARG001
    """Return new_encoder's result, cached until the modification time of the file changes."""
    return new_encoder(path)


def new_encoder(path: Path) -> tuple[AnyTokenizer, "Encoder | JsonEncoder"]:
    """Load a tokenizer and its encoder."""
    model = open_tokenizer(path)
    if not isinstance(model, SentencePieceTokenizer):
        return model, JsonEncoder(model)
    from preprocessing.tokenizer.encoder import Encoder  # here, as it imports numba

    return model, Encoder(model.model)


def count_tokens(tokenizer: Path, texts: Sequence[str]) -> int:
    """Return the number of tokens of all texts, but for ends of documents. Raises UsageError as load_encoder."""
    return sum(count_tokens_of_each(tokenizer, texts))


def count_tokens_of_each(tokenizer: Path, texts: Sequence[str]) -> list[int]:
    """Return the number of tokens of each text, without tokens that begin and end documents."""
    encoder = load_encoder(tokenizer)[1]
    short = [text for text in texts if len(text) <= LONG_TEXT]

    def count() -> list[int]:
        _, offsets = encoder.encode(short)
        lengths_of_short = iter(np.diff(offsets).tolist())
        lengths = list[int]()
        for text in texts:
            if len(text) > LONG_TEXT:
                lengths.append(sum(map(len, encoder.encode_parts(text))))
            else:
                lengths.append(next(lengths_of_short))
        return lengths

    return with_one_engine(encoder, count)[0]


def with_one_engine(encoder: "Encoder | JsonEncoder", work: Callable[[], Done]) -> tuple[Done, str]:
    """Return `work`'s result, all encoded by one library, and where the two differed: then tokenizers did it."""
    try:
        return work(), ""
    except EnginesDifferError as error:
        assert isinstance(encoder, JsonEncoder)
        encoder.fallback = str(error)
        try:
            return work(), encoder.fallback
        finally:
            encoder.fallback = ""
