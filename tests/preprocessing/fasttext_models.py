"""Small fastText models that fasttext-community 0.11.9 trained, and what it predicts for some texts.

Its module has the name of the one that these tests run with, so both cannot be installed. The models are a softmax over
words and bigrams, one-versus-all with subwords, a hierarchical softmax, and the first kind quantized (.ftz); they tell
__label__hq, sentences of a mill, from __label__cc, those of an advertisement. The last one is unsupervised.
"""

import base64
import json
from pathlib import Path
from typing import Any

_STORED: dict[str, Any] = json.loads((Path(__file__).parent / "foreign_models/fasttext.json").read_bytes())
TEXTS: list[str] = _STORED["texts"]
SUPERVISED = ["softmax.bin", "subword.bin", "hs.bin", "quantized.ftz"]
GOOD = ["the", "mill", "grinds", "grain", "into", "flour", "while", "water", "turns", "its", "wheel", "bread", "fine"]
BAD = ["click", "here", "buy", "now", "cheap", "offer", "free", "win", "prize", "best", "deal", "login", "subscribe"]


def write_model(name: str, path: Path) -> Path:
    """Write a model to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(base64.b64decode(_STORED["models"][name]["model"]))
    return path


def scores_of(name: str) -> list[float]:
    """The probability of __label__hq of each text, as fasttext-community predicts it."""
    scores: list[float] = _STORED["models"][name]["scores"]
    return scores
