"""Sequences of the tokens of one text, as a model with a given tokenizer reads it."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gristmill.errors import InputError, UsageError, require, wrap_read_errors
from gristmill.io.token_shards import Manifest, ShardRecord, TokenizerRecord, token_dtype
from gristmill.io.tokenizer_companions import copies_in
from gristmill.io.tokenizer_file import open_tokenizer
from gristmill.storage.local import atomic_write_bytes, sha256_file
from training.data.sequences import Indices, TokenSequences
from training.kernels.cross_entropy import IGNORE_INDEX


class TextSequences:
    """The tokens of a text file in sequences of T, with the interface of `TokenSequences`; padding is IGNORE_INDEX.

    Every token of the text is a counted target once, but for the first where no token comes before it. Sequences that
    overlap predict what is in several of them in the first one (see `is_context`).
    """

    def __init__(
        self, file: Path, length: int, tokenizer: Path, before: Sequence[int], record: TokenizerRecord, stride: int = 0
    ) -> None:
        """Encode `file` with the `tokenizer` of `record`; `length` is T, a sequence starts every `stride` tokens; 0: T.

        `before`: ids that come before the text, see before_document.

        Raises UsageError where there is no such file or no text in it, InputError where it is not UTF-8.
        """
        if not file.is_file():
            raise UsageError(f"{file}: no such file; expected a text file in UTF-8")
        with wrap_read_errors(file):
            data = file.read_bytes()
        try:
            ids = open_tokenizer(tokenizer).encode(data.decode())
        except UnicodeDecodeError as error:
            raise InputError(f"{file} is not UTF-8 ({error}); convert it first") from error
        if not ids:
            raise UsageError(f"{file} is empty; expected text")
        self.folder = file
        self.length = length
        read = [*before, *ids]
        if len(read) < 2:
            raise UsageError(
                f"{file} is one token, before which there is nothing to predict it from; expected more text"
            )
        self.stride = stride or length
        self.rows = 1 + max(0, -(-(len(read) - 1 - length) // self.stride))
        self.ids = np.full((self.rows - 1) * self.stride + length + 1, IGNORE_INDEX, np.int64)
        self.ids[: len(read)] = read
        shard = ShardRecord(file.name, 1, len(ids), len(data), "")
        self.manifest = Manifest(record, token_dtype(record.vocab_size).name, [shard], {})

    def __len__(self) -> int:
        return self.rows

    def batch(self, indices: Indices) -> Tensor:
        """Return the sequences `indices`: (len(indices), T + 1) int64."""
        starts = np.asarray(indices, np.int64) * self.stride
        return torch.from_numpy(self.ids[starts[:, None] + np.arange(self.length + 1)])

    def targets(self, _indices: Indices, tokens: Tensor) -> Tensor:
        """Return the targets of sequences, whose `tokens` `batch` has read: all but the first of each."""
        return tokens[:, 1:]

    def is_context(self, indices: Indices) -> Tensor:
        """Return which targets of the sequences `indices` the sequence before has predicted: (len(indices), T) bool."""
        later = torch.from_numpy(np.asarray(indices) > 0)
        return later[:, None] & (torch.arange(self.length) < self.length - self.stride)

    def positions(self, indices: Indices) -> Tensor:
        """Return the positions of the inputs of the sequences `indices`, of one document: (len(indices), T) int64."""
        return torch.arange(self.length).repeat(len(indices), 1)


def copy_tokenizer(parts: Sequence[TokenSequences], out_dir: Path) -> None:
    """Copy the tokenizer of token shards, if it is there, to a run's folder, whose checkpoints read text with it.

    All sets have one tokenizer; that of chats comes with the template that they were written by.
    """
    chats = (part for part in parts if part.masks is not None)
    data = next(chats, parts[0])
    if tokenizer := find_tokenizer(data.manifest.tokenizer, [data.local]):
        for path, copy in copies_in(out_dir, tokenizer).items():
            atomic_write_bytes(copy, path.read_bytes())


def find_tokenizer(record: TokenizerRecord, folders: Iterable[Path]) -> Path | None:
    """Return the tokenizer of `record` in the first of the folders that has it, by its SHA-256; None if none has."""
    for folder in folders:
        for path in (folder / record.path, folder / Path(record.path).name):
            if is_tokenizer(path, record):
                return path
    return None


def require_tokenizer(given: Path | None, record: TokenizerRecord, folders: Sequence[Path], what: str) -> Path:
    """Return the tokenizer of a checkpoint, whose record has `record`: the `given` one, or that in one of the folders.

    Raises UsageError where `given` is another one, or where `what`, which needs it, has none.
    """
    if given is not None:
        require(
            not record.sha256 or is_tokenizer(given, record),
            f"{given} is not the checkpoint's tokenizer, which has the SHA-256 {record.sha256}",
        )
        return given
    require(
        bool(record.sha256),
        f"{what} needs the checkpoint's tokenizer, which it does not name: give --tokenizer FILE",
    )
    tokenizer = find_tokenizer(record, folders)
    if tokenizer is None:
        raise UsageError(
            f"{what} needs the checkpoint's tokenizer {record.path} (sha256 {record.sha256[:12]}), which is not in "
            f"{folders[-2]}; give it by --tokenizer FILE"
        )
    return tokenizer


def is_tokenizer(path: Path, record: TokenizerRecord) -> bool:
    """Return whether a file is the tokenizer of `record`, by its SHA-256."""
    return path.is_file() and sha256_file(path) == record.sha256


def before_document(record: TokenizerRecord, masked: bool = False) -> list[int]:
    """Return the ids seen before a document's text: another document's end unless `masked`, and its own beginning."""
    return [i for i in (-1 if masked else record.end_of_document, record.begin_of_document) if i >= 0]


def begin_text(record: TokenizerRecord, masked: bool, ids: Sequence[int]) -> list[int]:
    """Return the `ids` of a text from its beginning: after those that a model has seen before a document's text.

    The end of another document begins a text of no ids where the model has seen nothing there, as something has to.
    """
    return [*before_document(record, masked), *ids] or before_document(record)
