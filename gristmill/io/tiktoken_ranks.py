"""Rank files of tiktoken: a line for each token, its bytes in base64 and its rank; as a tokenizer.json.

Such a file has neither the pattern that cuts a text into words nor special tokens: both are those that its publisher
uses with it. Merges are ordered by the rank of the token that they make, as tiktoken applies them.
Patterns: openai/tiktoken (tiktoken_ext/openai_public.py), Llama 3 and Qwen (tokenizers of their repositories).
"""

import base64
import binascii
from pathlib import Path
from typing import Any, NamedTuple

from gristmill.errors import UsageError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4, QWEN2 = _WORDS.replace("DIGITS", "{1,3}"), _WORDS.replace("DIGITS", "")
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    rf"{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MIDDLE = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")


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
    """Whether the content of a file begins as a rank file does.

    >>> is_ranks(b"IQ== 0\\nIg== 1\\n"), is_ranks(b"{}")
    (True, False)
    """
    first = data[:512].partition(b"\n")[0].split()
    return len(first) == 2 and first[1].isdigit() and len(first[0]) % 4 == 0 and first[0].rstrip(b"=").isascii()


def ranks_to_json(path: Path, data: bytes) -> dict[str, Any]:
    """The tokenizer.json of a rank file's content. Raises UsageError for a damaged file or an unknown encoding."""
    ranks = _read_ranks(path, data)
    encoding = _ENCODINGS.get(len(ranks))
    if encoding is None:
        known = ", ".join(f"{count:,} ({found.name})" for count, found in _ENCODINGS.items())
        raise UsageError(
            f"{path} has {len(ranks):,} ranks, and a rank file does not say how to cut words: expected {known}; "
            "convert it to a tokenizer.json with the pattern of its model"
        )
    if {*range(max(ranks.values()))} - {*ranks.values(), *encoding.special.values()}:
        raise UsageError(f"{path} is damaged: expected ranks from 0 on without a gap")
    spelt = {token: "".join(map(_LETTERS.__getitem__, token)) for token in ranks}
    split = {"type": "Split", "pattern": {"Regex": encoding.pattern}, "behavior": "Isolated", "invert": False}
    words = {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags, "special": True} for token, i in encoding.special.items()
        ],
        "normalizer": encoding.normalizer,
        "pre_tokenizer": words if encoding.pattern else _byte_level(use_regex=True),
        "post_processor": None,
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
            # tokenizers numbers an added token by this vocabulary, or else takes the next id that is free
            "vocab": {spelt[token]: rank for token, rank in ranks.items()} | encoding.special,
            "merges": [(spelt[left], spelt[right]) for left, right in _merges(ranks)],
        },
    }  # fmt: skip


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
    """The pairs of tokens that make a token, in the order of its rank."""
    found = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        found += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return found


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level tokenizer.json (GPT-2's): itself where it can be seen."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in seen else chr(next(others)) for byte in range(256)]


_LETTERS = _byte_letters()
