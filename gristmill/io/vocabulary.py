"""A SentencePiece model's pieces and settings, read from its model file.

SentencePiece's Python interface gives neither the model type, nor the normaliser's settings, nor which pieces
are user-defined. So they are parsed from the file, a protocol-buffer message: wire format at
https://protobuf.dev/programming-guides/encoding, fields in SentencePiece's sentencepiece_model.proto.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

ESCAPED_SPACE = "\u2581"  # a space, in pieces


class PieceType(IntEnum):
    """Type of a piece (ModelProto.SentencePiece.Type)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class ModelType(IntEnum):
    """Algorithm of a model (TrainerSpec.ModelType)."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass
class Vocabulary:
    """Pieces by id, and the settings that affect encoding, under SentencePiece's names and with its defaults."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # float32 values
    types: list[int] = field(default_factory=list)
    model_type: int = ModelType.UNIGRAM
    treat_whitespace_as_suffix: bool = False
    has_charsmap: bool = False  # the normaliser replaces characters, by its precompiled_charsmap
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True

    def of_type(self, piece_type: PieceType) -> list[str]:
        """Return the pieces of one type, in the order of their ids."""
        return [piece for piece, own_type in zip(self.pieces, self.types, strict=True) if own_type == piece_type]


def read_vocabulary(model: bytes) -> Vocabulary:
    """Parse a serialised ModelProto (`SentencePieceProcessor.serialized_model_proto()`)."""
    vocabulary = Vocabulary()
    for number, value in _fields(model):
        if number == 1:  # repeated SentencePiece
            _add_piece(vocabulary, dict(_fields(value)))
        elif number == 2:  # TrainerSpec
            trainer = dict(_fields(value))
            vocabulary.model_type = trainer.get(3, ModelType.UNIGRAM)
            vocabulary.treat_whitespace_as_suffix = bool(trainer.get(24, False))
        elif number == 3:  # NormalizerSpec
            normalizer = dict(_fields(value))
            vocabulary.has_charsmap = bool(normalizer.get(2, b""))
            vocabulary.add_dummy_prefix = bool(normalizer.get(3, True))
            vocabulary.remove_extra_whitespaces = bool(normalizer.get(4, True))
            vocabulary.escape_whitespaces = bool(normalizer.get(5, True))
    return vocabulary


def read_pieces(text: bytes) -> list[tuple[int, str]]:
    """Parse a serialised SentencePieceText, an encoded text: each piece's id and the part of the text that it is of."""
    pieces = []
    for number, value in _fields(text):
        if number == 2:  # repeated SentencePiece
            piece = dict(_fields(value))
            pieces.append((piece.get(2, 0), piece.get(3, b"").decode()))
    return pieces


def _add_piece(vocabulary: Vocabulary, piece: dict[int, Any]) -> None:
    vocabulary.pieces.append(piece[1].decode())
    vocabulary.scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
    vocabulary.types.append(piece.get(3, PieceType.NORMAL))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) of every field of a message: an integer for a varint, bytes for all else."""
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
    """Return (value, end) of the base-128 varint at byte `at`."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
