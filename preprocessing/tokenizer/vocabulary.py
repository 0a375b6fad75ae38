"""What a SentencePiece model says about itself: its pieces, their scores and kinds, and how it treats white space.

SentencePiece's own interface tells neither the algorithm, nor the normaliser's settings, nor which pieces are
user-defined, so they are read from the model file: a protocol-buffer message
(https://protobuf.dev/programming-guides/encoding, sentencepiece_model.proto).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

SPACE = "\u2581"  # how pieces spell a space


class Kind(IntEnum):
    """What a piece is for."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Algorithm(IntEnum):
    """How pieces are chosen."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass
class Vocabulary:
    """Pieces by id, and the settings that decide which text becomes which piece."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # float32, as SentencePiece compares them
    kinds: list[int] = field(default_factory=list)
    algorithm: int = Algorithm.UNIGRAM
    space_as_suffix: bool = False
    charsmap: bool = False  # the normaliser rewrites characters
    dummy_prefix: bool = True
    remove_extra_spaces: bool = True
    escape_spaces: bool = True

    def of_kind(self, kind: Kind) -> list[str]:
        """The pieces of one kind, in the order of their ids."""
        return [piece for piece, found in zip(self.pieces, self.kinds, strict=True) if found == kind]


def read_vocabulary(model: bytes) -> Vocabulary:
    """Read a serialised model (`SentencePieceProcessor.serialized_model_proto()`).

    Field numbers and defaults are those of SentencePiece's ModelProto, TrainerSpec and NormalizerSpec.
    """
    vocabulary = Vocabulary()
    for number, value in _fields(model):
        if number == 1:
            _add_piece(vocabulary, dict(_fields(value)))
        elif number == 2:
            trainer = dict(_fields(value))
            vocabulary.algorithm = trainer.get(3, Algorithm.UNIGRAM)
            vocabulary.space_as_suffix = bool(trainer.get(24, False))
        elif number == 3:
            normalizer = dict(_fields(value))
            vocabulary.charsmap = bool(normalizer.get(2, b""))
            vocabulary.dummy_prefix = bool(normalizer.get(3, True))
            vocabulary.remove_extra_spaces = bool(normalizer.get(4, True))
            vocabulary.escape_spaces = bool(normalizer.get(5, True))
    return vocabulary


def _add_piece(vocabulary: Vocabulary, piece: dict[int, Any]) -> None:
    vocabulary.pieces.append(piece[1].decode())
    vocabulary.scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
    vocabulary.kinds.append(piece.get(3, Kind.NORMAL))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of every field: an integer, or the bytes of anything else."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(key & 7)
        if size is None:
            size, at = _varint(message, at)
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The integer at `at`, seven bits a byte and the lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
