"""Preprocessing stages: normalise, apply a function, filter, mix and shuffle, hold out, train a tokenizer, tokenise.

A stage is imported when its name is first used: a step on documents is imported without the engine.
"""

from typing import TYPE_CHECKING

from gristmill.lazy_package import import_lazily

if TYPE_CHECKING:
    from preprocessing.apply import apply
    from preprocessing.encode import encode
    from preprocessing.filter import filter
    from preprocessing.mix import mix
    from preprocessing.normalize_text import normalize_text
    from preprocessing.shuffle_holdout import pass1, pass2
    from preprocessing.tokenize_corpus import tokenize_corpus
    from preprocessing.train_tokenizer import train_tokenizer

__all__ = ["apply", "encode", "filter", "mix", "normalize_text", "pass1", "pass2", "tokenize_corpus", "train_tokenizer"]

import_lazily(__name__, __all__, {"shuffle_holdout": ("pass1", "pass2")})
