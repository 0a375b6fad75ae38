"""Small tokenizers of the kinds that published models have, trained on a few sentences."""

import base64
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gristmill.io.tokenizer_file import GPT4, QWEN2

PROSE = [
    "the mill grinds grain into flour while water turns its wheel and nobody counts 12 or 7 sacks",
    "The miller's daughter said: “no, 1,024 sacks (or more) were ground in 1887!”   And then…\n\nNo, WE'LL see.",
    "мельница мелет зерно в муку, пока вода вращает колесо",
    "水車は水の力で回り、穀物を粉にする。水車小屋の中は静かだ。",
    "def grind(grain):\n    return flour(grain)  # 2 * x\n\n\n",
    "la farine était moulue; le café fermé où l’eau coule",
] * 3
END, BEGIN = "<|endoftext|>", "<|begin|>"


def _byte_level(pattern: str | None, normalizer: Any = None, **options: Any) -> Tokenizer:
    found = Tokenizer(models.BPE(**options))
    words = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words)
    found.pre_tokenizer = pre_tokenizers.Sequence([*words, letters]) if words else letters
    if normalizer:
        found.normalizer = normalizer
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[END, BEGIN], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    found.train_from_iterator(PROSE, trainer)
    return found


def _llama2() -> Tokenizer:
    found = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    found.train_from_iterator(PROSE, trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False))
    return found


def _unigram() -> Tokenizer:
    found = Tokenizer(models.Unigram())
    found.pre_tokenizer, found.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )  # fmt: skip
    found.train_from_iterator(PROSE, trainer)
    return found


def _bert() -> Tokenizer:
    found = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    found.normalizer, found.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    found.train_from_iterator(PROSE, trainer)
    return found


FAST: dict[str, Callable[[], Tokenizer]] = {  # gigatoken encodes as these
    "GPT-2": lambda: _byte_level(None),
    "Llama 3": lambda: _byte_level(GPT4, ignore_merges=True),
    "Qwen": lambda: _byte_level(QWEN2, normalizers.NFC()),
    "Llama 2": _llama2,
}
SLOW: dict[str, Callable[[], Tokenizer]] = {  # only tokenizers does
    "an unknown pattern": lambda: _byte_level(r"\w{1,3}|\W"),
    "unigram": _unigram,
    "BERT": _bert,
}


@cache
def content_of(name: str) -> str:
    """The tokenizer.json of a name in FAST or SLOW."""
    found: str = (FAST | SLOW)[name]().to_str()
    return found


def write_ranks(path: Path, count: int, gap: int = -1) -> dict[bytes, int]:
    """Write a rank file of `count` tokens: those of the tokenizer "Llama 3", then ones that no text has.

    No token has the rank `gap`.
    """
    letters = json.loads(content_of("Llama 3"))["model"]["vocab"]
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)}
    others = iter(range(256, 512))
    byte_of = {chr(byte) if byte in seen else chr(next(others)): byte for byte in range(256)}
    names = sorted((name for name in letters if not name.startswith("<|")), key=letters.__getitem__)
    tokens = [bytes(byte_of[letter] for letter in name) for name in names]
    tokens += [b"\xff\xfe" + number.to_bytes(4, "big") for number in range(count - len(tokens))]
    ranks = {token: rank + (0 <= gap <= rank) for rank, token in enumerate(tokens)}
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()))
    return ranks
