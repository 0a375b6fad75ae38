"""Command: character-level token shards of a text file, for small models, with its end as the holdout.

python scripts/prepare_characters.py input.txt OUT
gristmill train --config configs/nanogpt_cpu.toml --data.train OUT/train --data.holdout OUT/holdout …
"""

import io
import sys
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
import sentencepiece
from numpy.typing import NDArray
from tyro.conf import Positional

from gristmill.command import command
from gristmill.errors import InputError, UsageError, wrap_read_errors
from gristmill.io.token_shards import (
    Manifest,
    ShardRecord,
    SourceRecord,
    TokenizerRecord,
    TokenShardWriter,
    token_dtype,
    write_sources,
)
from gristmill.storage.local import atomic_write_bytes, sha256_file

SHARD, TOKENIZER = "characters", "tokenizer.model"
_SPACE = "\u2581"  # SentencePiece's character for a space


def prepare_characters(text: Positional[Path], out_dir: Positional[Path], holdout: float = 0.1) -> None:
    """Write the first part of a text to OUT_DIR/train and the rest to OUT_DIR/holdout, each with its tokenizer.

    Each part is one document. The vocabulary is the distinct characters, plus a last id for the end of a
    document and for unknown characters. Raises UsageError for a text too short or that SentencePiece cannot
    represent, InputError for a text that is not UTF-8.

    Args:
        text: A text file in UTF-8.
        out_dir: Folder for the two folders.
        holdout: Fraction of the characters in the holdout, from the end.
    """
    if not 0 < holdout < 1:
        raise UsageError(f"--holdout {holdout}: give a fraction above 0 and below 1, such as 0.1")
    codes = read_characters(text)
    cut = int(len(codes) * (1 - holdout))
    if not 0 < cut < len(codes):
        raise UsageError(f"{text} has {len(codes)} characters, too few for --holdout {holdout}: give a longer text")
    characters, ids = np.unique(codes, return_inverse=True)
    alphabet = "".join(map(chr, characters))
    model, pieces = character_model(alphabet, text)
    ids = pieces[ids]
    sizes = np.array([len(c.encode()) for c in alphabet])[np.argsort(pieces)]  # of each id, in bytes
    for name, part in (("train", ids[:cut]), ("holdout", ids[cut:])):
        write_part(out_dir / name, part, int(sizes[part].sum()), model, len(alphabet), text.name)
    print(f"{len(alphabet)} distinct characters; {cut:,} in train, {len(ids) - cut:,} in holdout")


def read_characters(text: Path) -> NDArray[np.uint32]:
    """Code points of a text file, with its own line ends; InputError if it is not UTF-8."""
    if not text.is_file():
        raise UsageError(f"{text}: no such file: give a text file")
    with wrap_read_errors(text):
        data = text.read_bytes()
    try:
        return np.frombuffer(data.decode().encode("utf-32-le"), np.uint32)
    except UnicodeDecodeError as error:
        raise InputError(f"{text} is not UTF-8 ({error}); convert it first") from error


def character_model(alphabet: str, text: Path) -> tuple[bytes, NDArray[np.int64]]:
    """A SentencePiece model whose pieces are the characters of `alphabet`, and the id of each character.

    The unknown piece, which SentencePiece requires, comes last. UsageError if a character does not survive
    encoding and decoding.
    """
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([alphabet]), model_writer=written, model_type="char", vocab_size=len(alphabet) + 1,
            character_coverage=1.0, normalization_rule_name="identity", remove_extra_whitespaces=False,
            add_dummy_prefix=False, unk_id=len(alphabet), bos_id=-1, eos_id=-1, pad_id=-1,
            max_sentence_length=4 * len(alphabet) + 16, minloglevel=3,
        )  # fmt: skip
        model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
        ids = np.array([model.piece_to_id(_SPACE if c == " " else c) for c in alphabet], np.int64)
        kept = model.decode(ids.tolist()) == alphabet and model.encode(alphabet) == ids.tolist()
    except RuntimeError:  # its trainer rejects some control characters, and text of line ends only
        kept = False
    if not kept:
        strange = [c for c in alphabet if c == _SPACE or (c < " " and c not in "\t\n\r")] or [alphabet[:8]]
        raise UsageError(f"SentencePiece has no character model of {text} (see {strange}); replace such characters")
    return written.getvalue(), ids


def write_part(folder: Path, ids: NDArray[np.int64], size: int, model: bytes, end: int, source: str) -> None:
    """Write a folder with one shard of one document, `size` bytes of text."""
    dtype = token_dtype(end + 1)
    with TokenShardWriter(folder / SHARD, dtype) as shard:
        shard.add(np.append(ids, end))
    atomic_write_bytes(folder / TOKENIZER, model)
    tokenizer = TokenizerRecord(TOKENIZER, sha256_file(folder / TOKENIZER), end + 1, end)
    digest = write_sources(folder / SHARD, np.zeros(1, np.uint16), [source])
    record = ShardRecord(SHARD, 1, shard.tokens, size, shard.sha256, shard.idx_sha256, [source], digest)
    Manifest(tokenizer, dtype.name, [record], {source: SourceRecord(1, shard.tokens, size)}).save(folder)


if __name__ == "__main__":
    command(prepare_characters)
