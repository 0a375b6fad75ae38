"""Training of a tokenizer on text in files: SentencePiece, or byte-level BPE.

Both run in a process of their own, which imports this module: it imports little.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

from gristmill.errors import UsageError

MAX_SENTENCE_BYTES = 4096  # of a line; SentencePiece skips longer ones
END_OF_TEXT = "<|endoftext|>"  # of byte-level BPE: its only special token
# SentencePiece's errors, with the least and the greatest possible number of pieces
_TOO_SMALL = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")
_TOO_LARGE = re.compile(r"Vocabulary size too high \(\d+\)\. Please set it to a value <= (\d+)")
_THREADS = 4  # fixed, as the trainer's floating-point sums and so the model depend on it


def train_sentencepiece(paths: tuple[Path, ...], model: Path, vocab_size: int, model_type: str, exact: bool) -> None:
    """Train a SentencePiece model on the lines of files. Raises UsageError if they are too few, or too many."""
    try:
        with model.open("wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(line.decode() for line in _read_lines(paths)), model_writer=file,
                vocab_size=vocab_size, model_type=model_type,
                hard_vocab_limit=exact, byte_fallback=True, split_digits=True, normalization_rule_name="identity",
                remove_extra_whitespaces=False, add_dummy_prefix=False, allow_whitespace_only_pieces=True,
                unk_id=0, bos_id=1, eos_id=2, pad_id=-1,
                max_sentence_length=MAX_SENTENCE_BYTES, num_threads=_THREADS, minloglevel=2,
            )  # fmt: skip
    except (RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # the disk's, not SentencePiece's
        raise UsageError(_advice(vocab_size, str(error))) from error


def train_byte_bpe(paths: tuple[Path, ...], model: Path, vocab_size: int, exact: bool, words: str) -> None:
    """Train byte-level BPE on texts, a line of JSON each, cut into words by the pattern `words`.

    Raises UsageError if they are too few.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(words), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(map(json.loads, _read_lines(paths)), trainer)
    reached = tokenizer.get_vocab_size()
    if exact and reached < vocab_size:
        raise UsageError(_too_large(vocab_size, reached))
    model.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def _read_lines(paths: tuple[Path, ...]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as file:
            yield from filter(None, (line.removesuffix(b"\n") for line in file))


def _advice(vocab_size: int, message: str) -> str:
    """Return the message for users of an error of SentencePiece's trainer, with the number of pieces to ask for."""
    if match := _TOO_SMALL.search(message):
        return (
            f"--vocab_size {vocab_size} is too small: the characters of this sample, the bytes and the controls alone "
            f"are {match[1]} pieces: give --vocab_size {match[1]} or more"
        )
    if match := _TOO_LARGE.search(message):
        return _too_large(vocab_size, int(match[1]))
    return f"SentencePiece cannot make {vocab_size} pieces of this sample: {message.strip().rsplit('] ', 1)[-1]}"


def _too_large(vocab_size: int, pieces: int) -> str:
    return (
        f"--vocab_size {vocab_size} is too large: this sample has {pieces} different pieces: give --vocab_size "
        f"{pieces} or less, --exact false for as many as there are, or more text"
    )
