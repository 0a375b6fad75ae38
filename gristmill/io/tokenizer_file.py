"""Tokenizers behind one interface: SentencePiece models, tokenizer.json of Hugging Face, rank files of tiktoken.

A rank file, a line for each token with its bytes in base64 and its rank, is read as a tokenizer.json (`read_json`). It
has neither the pattern that cuts a text into words nor special tokens: both are what its publisher uses with it.
Merges are ordered by the rank of the token that they make, as tiktoken applies them.
Patterns: openai/tiktoken (tiktoken_ext/openai_public.py), Llama 3 and Qwen (tokenizers of their repositories).
"""

import base64
import binascii
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import sentencepiece

from gristmill.errors import UsageError
from gristmill.io.tokenizer_companions import (
    COMPANIONS,
    CONFIG,
    JSON,
    MODEL,
    RANKS,
    added_tokens,
    companions_of,
    named_token,
    read_config,
)
from gristmill.storage.files import is_file, read_file

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4 = _WORDS.replace("DIGITS", "{1,3}")
QWEN2 = _WORDS.replace("DIGITS", "")
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    rf"{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MIDDLE = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
Kind = Literal["sentencepiece", "tokenizer.json", "tiktoken"]
_NAMES = (JSON, MODEL, RANKS)  # looked for in a folder, in this order
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(?:@[\w./-]+)?")
_ENDS = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend▁of▁sentence\uff5c>", "<|eot_id|>", "<|im_end|>",
)  # fmt: skip  # DeepSeek's have U+FF5C, a bar of full width
_BEGINS = ("<|begin_of_text|>", "<s>", "<bos>", "<\uff5cbegin▁of▁sentence\uff5c>")


class _Encoding(NamedTuple):
    name: str
    pattern: str  # empty: that of GPT-2, which ByteLevel has itself
    special: dict[str, int]
    normalizer: dict[str, Any] | None = None


def _llama3() -> dict[str, int]:
    reserved = [f"reserved_special_token_{i}" for i in range(251)]
    headers = ["start_header_id", "end_header_id", reserved[4], "eot_id"]
    names = ["begin_of_text", "end_of_text", *reserved[:4], *headers, *reserved[5:]]
    return {f"<|{name}|>": 128_000 + i for i, name in enumerate(names)}


_ENCODINGS = {  # by the number of ranks
    50_256: _Encoding("gpt2", "", {"<|endoftext|>": 50_256}),
    50_280: _Encoding("p50k_base", "", {"<|endoftext|>": 50_256}),
    100_256: _Encoding(
        "cl100k_base", GPT4,
        {token: 100_257 + i for i, token in enumerate(("<|endoftext|>", *_MIDDLE))} | {"<|endofprompt|>": 100_276},
    ),
    199_998: _Encoding("o200k_base", _O200K, {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018}),
    128_000: _Encoding("Llama 3", GPT4, _llama3()),
    151_643: _Encoding(
        "Qwen", QWEN2, {"<|endoftext|>": 151_643, "<|im_start|>": 151_644, "<|im_end|>": 151_645}, {"type": "NFC"}
    ),
}  # fmt: skip


def is_ranks(data: bytes) -> bool:
    """Return whether the content of a file begins as a rank file does.

    >>> is_ranks(b"IQ== 0\\nIg== 1\\n"), is_ranks(b"{}")
    (True, False)
    """
    first = data[:512].partition(b"\n")[0].split()
    return len(first) == 2 and first[1].isdigit() and len(first[0]) % 4 == 0 and first[0].rstrip(b"=").isascii()


def ranks_to_json(path: Path, data: bytes) -> dict[str, Any]:
    """Return the tokenizer.json of a rank file's content. UsageError for a damaged file or an unknown encoding."""
    ranks = _read_ranks(path, data)
    encoding = _ENCODINGS.get(len(ranks))
    if encoding is None:
        sizes = [f"{count:,} ({known_encoding.name})" for count, known_encoding in _ENCODINGS.items()]
        known = ", ".join(sizes)
        raise UsageError(
            f"{path} has {len(ranks):,} ranks, and a rank file does not say how to cut words: expected {known}; "
            "convert it to a tokenizer.json with the pattern of its model"
        )
    if {*range(max(ranks.values()))} - {*ranks.values(), *encoding.special.values()}:
        raise UsageError(f"{path} is damaged: expected ranks from 0 on without a gap")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special_token(token, number) for token, number in encoding.special.items()],
        "normalizer": encoding.normalizer,
        "pre_tokenizer": _pre_tokenizer(encoding.pattern),
        "post_processor": None,
        "decoder": _byte_level(use_regex=True),
        "model": _bpe_model(ranks, encoding.special),
    }


def _special_token(token: str, number: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": token, **flags, "special": True}


def _pre_tokenizer(pattern: str) -> dict[str, Any]:
    """Return what cuts texts into words by a pattern, or by that of GPT-2 if it is empty."""
    if not pattern:
        return _byte_level(use_regex=True)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


def _bpe_model(ranks: dict[bytes, int], special: dict[str, int]) -> dict[str, Any]:
    """Return the byte-pair encoding of tokens by rank, whose bytes are spelt by letters."""
    spelt = {token: "".join(map(_LETTERS.__getitem__, token)) for token in ranks}
    vocabulary = {spelt[token]: rank for token, rank in ranks.items()}
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": True,
        # tokenizers numbers an added token by this vocabulary, or else takes the next id that is free
        "vocab": vocabulary | special,
        "merges": [(spelt[left], spelt[right]) for left, right in _merges(ranks)],
    }


def _read_ranks(path: Path, data: bytes) -> dict[bytes, int]:
    try:
        lines = [line.split() for line in data.splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error) as error:
        raise UsageError(f"{path} is damaged ({error}): expected lines of a token in base64 and its rank") from error
    if len({*ranks.values()}) < len(lines) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise UsageError(f"{path} is damaged: expected each rank and token once, and each of the 256 bytes")
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the pairs of tokens that make a token, in the order of its rank."""
    merges = list[tuple[bytes, bytes]]()
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = list[tuple[bytes, bytes]]()
        for cut in range(1, len(token)):
            left = token[:cut]
            right = token[cut:]
            if left in ranks and right in ranks:
                pairs.append((left, right))
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _byte_letters() -> list[str]:
    """Return the letter for each byte in a byte-level tokenizer.json (GPT-2's): itself where it can be seen."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)}
    letters = list[str]()
    unused = 256
    for byte in range(256):
        if byte in seen:
            letters.append(chr(byte))
        else:
            letters.append(chr(unused))
            unused += 1
    return letters


_LETTERS = _byte_letters()


class SentencePieceTokenizer:
    """A SentencePiece model; `model` is the processor, `vocab_size` one more than the largest id."""

    kind: Kind = "sentencepiece"

    def __init__(self, data: bytes) -> None:
        self.model = sentencepiece.SentencePieceProcessor()
        self.model.LoadFromSerializedProto(data)
        self.vocab_size = self.model.vocab_size()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without tokens that begin or end a document."""
        ids: list[int] = self.model.encode(text)
        return ids

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """Return the ids of a text, with the tokens that the tokenizer itself begins or ends a text with."""
        begin = self.model.bos_id()
        return [begin, *self.encode(text)] if begin >= 0 else self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; special tokens are left out."""
        text: str = self.model.decode(list(ids))
        return text

    def id_of(self, token: str) -> int:
        """Return the id of a token, or -1."""
        piece: int = self.model.piece_to_id(token)
        return piece if self.model.id_to_piece(piece) == token else -1

    def finds(self, piece: int) -> bool:
        """Return whether a special token in a text gets its id. A token that begins, ends or pads texts need not."""
        model = self.model
        ends = (model.unk_id(), model.bos_id(), model.eos_id(), model.pad_id())
        return piece in ends or not model.is_control(piece)

    def special(self, config: dict[str, Any], name: Literal["bos", "eos"]) -> int:
        """Return the id of the token that begins or ends documents, by tokenizer_config.json or the model; or -1."""
        named = named_token(config, name)
        if named is not None:
            return self.id_of(named)
        piece: int = self.model.bos_id() if name == "bos" else self.model.eos_id()
        return piece


class JsonTokenizer:
    """A tokenizer.json, or what is read as one, by the library tokenizers, with the methods of SentencePieceTokenizer.

    `content` is its text; `vocab_size` counts added tokens, too.
    """

    def __init__(self, data: str, kind: Kind) -> None:
        from tokenizers import Tokenizer as HuggingFace

        self.kind = kind
        self.content = data
        self.model = HuggingFace.from_str(data)
        self.model.no_truncation()
        self.model.no_padding()
        if getattr(self.model.model, "dropout", None):
            self.model.model.dropout = None  # a text has the same ids every time
        self._vocabulary: dict[str, int] = self.model.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocabulary.values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.model.encode(text, add_special_tokens=False).ids
        return ids

    def encode_with_special_tokens(self, text: str) -> list[int]:
        ids: list[int] = self.model.encode(text, add_special_tokens=True).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.model.decode(list(ids), skip_special_tokens=True)
        return text

    def id_of(self, token: str) -> int:
        return self._vocabulary.get(token, -1)

    def finds(self, piece: int) -> bool:
        return piece in self.model.get_added_tokens_decoder()

    def special(self, config: dict[str, Any], name: Literal["bos", "eos"]) -> int:
        named = named_token(config, name)
        if named is not None:
            return self.id_of(named)
        tokens = _BEGINS if name == "bos" else _ENDS
        for token in tokens:
            piece = self.id_of(token)
            if piece >= 0:
                return piece
        return -1


AnyTokenizer = SentencePieceTokenizer | JsonTokenizer


def open_tokenizer(path: Path) -> AnyTokenizer:
    """Return the tokenizer in a file of any of the kinds. Raises UsageError where it is none of them."""
    data = read_file(path)
    try:
        text = read_json(path, data)
        if text is None:
            return SentencePieceTokenizer(data)
        require_tokenizers(str(path))
        return JsonTokenizer(text, "tiktoken" if is_ranks(data) else "tokenizer.json")
    except (UsageError, MemoryError):
        raise
    except Exception as error:  # tokenizers and SentencePiece raise plain ones
        raise UsageError(
            f"{path} is no tokenizer ({error}): expected a tokenizer.json, a SentencePiece model, or a rank file of "
            "tiktoken"
        ) from error


def require_tokenizers(what: str) -> None:
    """Raise UsageError where the library tokenizers, which `what` needs, is not installed."""
    if find_spec("tokenizers") is None:
        raise UsageError(f"{what} needs the library tokenizers: pip install 'gristmill[tokenizers]'")


def read_json(path: Path, data: bytes) -> str | None:
    """Return the tokenizer.json that a file is, or that a rank file amounts to; None for a SentencePiece model."""
    if is_ranks(data):
        return json.dumps(ranks_to_json(path, data), ensure_ascii=False)
    if data[:64].lstrip().startswith(b"{"):
        return data.decode()
    return None


def require_all_tokens(tokenizer: AnyTokenizer, path: Path, companions: Sequence[Path]) -> None:
    """Raise UsageError where a tokenizer would spell out, in texts, a token that its companions add."""
    for token, number in added_tokens(companions):
        piece = tokenizer.id_of(token)
        if piece < 0:
            fault = "it does not have"
        elif number is not None and number != piece:
            fault = f"has the id {piece} in it"
        elif not tokenizer.finds(piece):
            fault = "it does not look for in texts"
        else:
            continue
        raise UsageError(
            f"{path}: the files beside it add the token {token!r}, which {fault}: texts would spell it out. Make a "
            f"{JSON} with all tokens by transformers: AutoTokenizer.from_pretrained('{path.parent}')"
            ".save_pretrained(FOLDER)"
        )


def special_id(
    tokenizer: AnyTokenizer, path: Path, config: dict[str, Any], name: Literal["bos", "eos"], asked: str
) -> int:
    """Return the id of the token that begins ("bos") or ends ("eos") each document, or -1 for none.

    `asked` is a token, "model" for what the tokenizer names, or "none". Raises UsageError where there is none such.
    """
    if asked == "none":
        return -1
    piece = tokenizer.special(config, name) if asked == "model" else tokenizer.id_of(asked)
    if piece >= 0:
        return piece
    named = named_token(config, name)
    if asked != "model":
        fault = f"{asked!r} is not in its vocabulary"
    elif named is not None:
        fault = f"{CONFIG} beside it names the {name} token {named!r}, which is not in its vocabulary"
    else:
        fault = f"no {name} token is named by it"
    usual = (*_BEGINS, *_ENDS) if name == "bos" else (*_ENDS, *_BEGINS)
    known = [token for token in usual if token != asked and tokenizer.id_of(token) >= 0]
    example = f" TOKEN, such as {known[0]!r}, or --{name}" if known else ""
    raise UsageError(f"{path}: {fault}; give --{name}{example} none")


def find_ends(path: Path, bos: str, eos: str) -> tuple[int, int]:
    """Return the ids of the tokens that begin and end each document; see special_id."""
    tokenizer = open_tokenizer(path)
    companions = companions_of(path)
    require_all_tokens(tokenizer, path, companions)
    config = read_config(companions)
    return special_id(tokenizer, path, config, "bos", bos), special_id(tokenizer, path, config, "eos", eos)


def find_tokenizer_file(given: Path) -> Path:
    """Return a tokenizer's file, given as a file, a model's folder, or a repository ORG/NAME[@REVISION] of the Hub.

    Raises UsageError where there is none.
    """
    if is_file(given):
        return given
    for name in _NAMES:
        if is_file(given / name):
            return given / name
    if not given.exists() and _REPOSITORY.fullmatch(str(given)):
        return _download(str(given))
    raise UsageError(
        f"{given}: expected a tokenizer, but there is no such file; give a tokenizer.json, a SentencePiece model, a "
        "rank file of tiktoken, a folder with one, or a repository ORG/NAME of the Hub; or train one with "
        "train_tokenizer"
    )


def _download(repository: str) -> Path:
    """Return the tokenizer of a repository of the Hub, in huggingface_hub's cache, with its tokenizer_config.json."""
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.errors import (
            EntryNotFoundError,
            HfHubHTTPError,
            HTTPError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
        )
    except ImportError as error:
        raise UsageError(
            f"{repository}: there is no such file; to read it from the Hub: pip install 'gristmill[hub]'"
        ) from error
    name, _, revision = repository.partition("@")
    unreachable = ""  # why; then only the cache is looked in, as a download would be tried for half a minute
    try:
        get_hf_file_metadata(hf_hub_url(name, JSON, revision=revision or None))
    except (HfHubHTTPError, ValueError):
        pass  # the download says it
    except (HTTPError, OfflineModeIsEnabled) as error:
        unreachable = _first_line(error)
    for file in _NAMES:
        try:
            downloaded = Path(
                hf_hub_download(name, file, revision=revision or None, local_files_only=bool(unreachable))
            )
        except LocalEntryNotFoundError as error:
            cause = unreachable or _first_line(error.__cause__ or error)
            raise UsageError(f"{repository}: there is no such file, and the Hub cannot be reached ({cause})") from error
        except EntryNotFoundError:
            continue
        except (HfHubHTTPError, ValueError) as error:
            raise UsageError(
                f"{repository}: there is no such file, nor repository of the Hub ({_first_line(error)})"
            ) from error
        companions = COMPANIONS if file in (JSON, MODEL) else ()
        for companion in companions:
            with suppress(EntryNotFoundError):
                hf_hub_download(name, companion, revision=revision or None, local_files_only=bool(unreachable))
        return downloaded
    raise UsageError(f"{repository}: the repository has no {', '.join(_NAMES)}")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
