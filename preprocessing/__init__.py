"""Preprocessing stages: normalise, apply a function, filter, mix and shuffle, hold out, train a tokenizer, tokenise."""

import warnings

from preprocessing.apply import apply
from preprocessing.encode import encode
from preprocessing.filter import filter
from preprocessing.mix import mix
from preprocessing.normalize_text import normalize_text
from preprocessing.shuffle_holdout import pass1, pass2
from preprocessing.tokenize_corpus import tokenize_corpus
from preprocessing.train_tokenizer import train_tokenizer

__all__ = ["apply", "encode", "filter", "mix", "normalize_text", "pass1", "pass2", "tokenize_corpus", "train_tokenizer"]

# For `python -m preprocessing.x`, which runs x again, as __main__: `command` calls the function of the import above.
warnings.filterwarnings("ignore", rf"'{__name__}\.\w+' found in sys\.modules", RuntimeWarning, "runpy")
