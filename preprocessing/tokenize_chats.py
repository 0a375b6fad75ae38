"""Command: encode chats into token shards, with masks of what the assistant says, by a model's own template."""

import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
from numpy.typing import NDArray
from rich.text import Text
from tyro.conf import Positional

from gristmill.budget import usable_cores
from gristmill.command import command
from gristmill.counts import Counts
from gristmill.engine.execution.local import Call, LocalExecutor
from gristmill.engine.options import parse_size
from gristmill.errors import InputError, UsageError, require, wrap_write_errors
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import CorpusFile, Reading, Slice, source_of
from gristmill.io.readers import plan_slices, read_documents
from gristmill.io.token_masks import MaskRecord, write_mask, write_masks
from gristmill.io.token_shards import (
    Manifest,
    ShardRecord,
    SourceRecord,
    TokenizerRecord,
    TokenShardWriter,
    token_dtype,
    write_sources,
)
from gristmill.io.tokenizer_companions import companions_of, copies_in, read_config
from gristmill.io.tokenizer_file import JsonTokenizer, find_tokenizer_file, open_tokenizer, special_id
from gristmill.io.writers import Rejects
from gristmill.storage.files import is_file, is_folder, reject_remote
from gristmill.storage.local import partial_path, sha256_file
from gristmill.text import utf8_size
from gristmill.wording import count_of
from preprocessing.tokenizer.chat_template import ChatError, ChatTemplate

_SOURCE = "chats"  # of a file that is in no folder


@dataclass(frozen=True)
class ChatOptions:
    """How chats are encoded: the tokenizer's file, a template in place of its own, the field, the last token's id."""

    tokenizer: Path
    template: Path | None
    column: str
    end: int


@dataclass
class EncodedChats:
    """Chats of a slice: their ids and masks, concatenated, the tokens and bytes of each, and what was left out.

    `reasons` has the example of each reason; `rewritten` counts messages of the assistant that are no targets.
    """

    source: str
    ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    lengths: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    rewritten: int = 0


def tokenize_chats(
    chats: Positional[Path],
    out_dir: Positional[Path],
    tokenizer: Path,
    template: Path | None = None,
    messages: str = "messages",
    eos: str = "model",
    max_malformed: float = 0.001,
    shard_size: str = "512MiB",
    workers: int | None = None,
) -> Text:
    """Encode chats into token shards whose masks say what the assistant says: the targets of fine-tuning.

    A record has a list of messages, {"role": "user", "content": "…"}, and may have `tools`. The text is that of the
    model's own chat template; the assistant's messages are the targets, up to the token that ends each. Each chat is a
    document, which ends with the end-of-document token, if the template has not written it.

    gristmill tokenize-chats chats.jsonl OUT/chats --tokenizer hf_folder

    gristmill train --data.train OUT/chats --data.packing best-fit --data.mask_documents true --init_from …

    Args:
        chats: A .jsonl or .parquet file, or a folder of them.
        out_dir: New or empty folder for the token shards.
        tokenizer: A tokenizer.json, the folder of a model that has one, or a repository ORG/NAME of the Hub.
        template: Jinja file with another chat template than the tokenizer's.
        messages: Field with the list of messages.
        eos: Token that ends each document: none, model, or a token of the vocabulary.
        max_malformed: Fail if more than this fraction of the records is left out: not a chat, refused by the template,
            or without a message of the assistant.
        shard_size: Size of a shard's .bin, about.
        workers: Worker processes; by default one per core.
    """
    reject_remote(chats, out_dir)
    require(0 <= max_malformed <= 1, f"--max_malformed {max_malformed}: expected a fraction from 0 to 1")
    require(workers is None or workers > 0, f"--workers {workers}: expected 1 or more")
    limit = parse_size(shard_size, "--shard_size")
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UsageError(f"{out_dir} is not an empty folder; give a new or empty folder")
    path = find_tokenizer_file(tokenizer)
    model = open_tokenizer(path)
    if not isinstance(model, JsonTokenizer):
        raise UsageError(
            f"{path} has no special tokens in texts; expected a tokenizer.json, or a model's folder with one"
        )
    ChatTemplate.load(path, template)
    end = special_id(model, path, read_config(companions_of(path)), "eos", eos)
    options = ChatOptions(path, template, messages, end)
    parts = [part for file in _files_of(chats, messages) for part in plan_slices(file)]
    calls = [Call(encode_slice, {"part": part, "options": options}) for part in parts]
    partial = partial_path(out_dir)
    shutil.rmtree(partial, ignore_errors=True)
    with wrap_write_errors(out_dir):
        partial.mkdir(parents=True)
        try:
            with LocalExecutor(workers or usable_cores()) as executor:
                writer = _ShardWriter(partial, token_dtype(model.vocab_size), limit)
                for part in _in_order(executor.run(calls)):
                    writer.add(part)
            writer.close()
            _check(writer, chats, max_malformed)
            for source, copy in copies_in(partial, path).items():
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(source, copy)
            record = TokenizerRecord(path.name, sha256_file(path), model.vocab_size, end)
            writer.save(record)
            if out_dir.exists():
                out_dir.rmdir()
            partial.replace(out_dir)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return Text(writer.describe(out_dir))


def _files_of(chats: Path, column: str) -> list[CorpusFile]:
    """Return the files of chats, each with the roles of its messages as its text."""
    require(is_file(chats) or is_folder(chats), f"{chats}: expected a file or a folder of chats, but there is none")
    files = list_corpus(chats) if is_folder(chats) else [CorpusFile(chats, chats.name, chats.stat().st_size)]
    reading = Reading(message="{role}\n")
    return [CorpusFile(file.path, file.name, file.size, column, reading) for file in files]


def _in_order(results: Iterator[tuple[int, EncodedChats]]) -> Iterator[EncodedChats]:
    """Yield results by their numbers."""
    waiting = dict[int, EncodedChats]()
    expected = 0
    for number, result in results:
        waiting[number] = result
        while expected in waiting:
            yield waiting.pop(expected)
            expected += 1


@cache
def _open(options: ChatOptions) -> tuple[JsonTokenizer, ChatTemplate]:
    model = open_tokenizer(options.tokenizer)
    assert isinstance(model, JsonTokenizer)
    return model, ChatTemplate.load(options.tokenizer, options.template)


def encode_slice(part: Slice, options: ChatOptions) -> EncodedChats:
    """Encode the chats of a slice; a worker calls it."""
    model, template = _open(options)
    counts = Counts({}, [])
    ids: list[int] = []
    mask: list[bool] = []
    source = source_of(part.name) if "/" in part.name else _SOURCE
    encoded = EncodedChats(source, np.empty(0, np.int64), np.empty(0, bool))
    for document in read_documents(part, counts, _ChatRejects(encoded)):
        try:
            chat = template.apply(document.value(options.column), document.value("tools"))
            own_ids, own_mask = encode_chat(model, chat.text, chat.spans, options.end)
            if not any(own_mask):
                raise ChatError("no token of the assistant")
        except ChatError as error:
            _leave_out(encoded, str(error), f"{document.key.file} line {document.key.row + 1}")
            continue
        ids += own_ids
        mask += own_mask
        encoded.lengths.append(len(own_ids))
        encoded.sizes.append(utf8_size(chat.text))
        encoded.rewritten += chat.rewritten
    encoded.ids = np.array(ids, np.int64)
    encoded.mask = np.array(mask, bool)
    return encoded


def encode_chat(
    model: JsonTokenizer, text: str, spans: list[tuple[int, int]], end: int
) -> tuple[list[int], list[bool]]:
    """Return the ids of a chat, and which of them begin in one of the spans; `end` ends it, unless it is -1."""
    encoding = model.model.encode(text, add_special_tokens=False)
    ids: list[int] = list(encoding.ids)
    starts = np.array([start for start, _ in encoding.offsets], np.int64)
    is_target = np.zeros(len(ids), bool)
    for first, last in spans:
        is_target |= (starts >= first) & (starts < last)
    mask: list[bool] = is_target.tolist()
    if end >= 0 and ids[-1:] != [end]:
        ids.append(end)
        mask.append(False)
    return ids, mask


class _ChatRejects(Rejects):
    """Notes malformed records, without a file of them."""

    def __init__(self, encoded: EncodedChats) -> None:
        self.encoded = encoded

    def add(self, file: str, line: int, reason: str, record: bytes | dict[str, Any]) -> None:  # noqa: ARG002
        """See Rejects."""
        _leave_out(self.encoded, reason, f"{file} line {line}")


def _leave_out(encoded: EncodedChats, reason: str, where: str) -> None:
    encoded.left_out[reason] += 1
    encoded.reasons.setdefault(reason, where)


class _ShardWriter:
    """Writes shards of about `limit` bytes, one after the other."""

    def __init__(self, folder: Path, dtype: np.dtype, limit: int) -> None:
        self.folder = folder
        self.dtype = dtype
        self.limit = limit
        self.shards: list[ShardRecord] = []
        self.masks: dict[str, MaskRecord] = {}
        self.sources: dict[str, SourceRecord] = {}
        self.left_out = Counter[str]()
        self.reasons: dict[str, str] = {}
        self.rewritten = 0
        self._waiting: list[EncodedChats] = []
        self._tokens = 0

    def add(self, part: EncodedChats) -> None:
        """Take the chats of a slice."""
        self.left_out += part.left_out
        for reason, where in part.reasons.items():
            self.reasons.setdefault(reason, where)
        self.rewritten += part.rewritten
        if part.lengths:
            self._waiting.append(part)
            self._tokens += len(part.ids)
        if self._tokens * self.dtype.itemsize >= self.limit:
            self.close()

    def close(self) -> None:
        """Write the chats that wait as a shard."""
        if not self._waiting:
            return
        name = f"chats_{len(self.shards):05d}"
        prefix = self.folder / name
        with TokenShardWriter(prefix, self.dtype) as shard:
            for part in self._waiting:
                shard.add_all(part.ids, part.lengths)
        size = sum(sum(part.sizes) for part in self._waiting)
        record = ShardRecord(name, len(shard.lengths), shard.tokens, size, shard.sha256, shard.idx_sha256)
        record.sources = list(dict.fromkeys(part.source for part in self._waiting))
        numbers = [np.full(len(part.lengths), record.sources.index(part.source)) for part in self._waiting]
        record.sources_sha256 = write_sources(prefix, np.concatenate(numbers), record.sources)
        for part in self._waiting:
            total = self.sources.setdefault(part.source, SourceRecord())
            total.documents += len(part.lengths)
            total.tokens += len(part.ids)
            total.bytes += sum(part.sizes)
        self.masks[name] = write_mask(prefix, np.concatenate([part.mask for part in self._waiting]))
        self.shards.append(record)
        self._waiting = []
        self._tokens = 0

    def save(self, tokenizer: TokenizerRecord) -> None:
        """Write the manifest and the masks' records."""
        write_masks(self.folder, self.masks)
        Manifest(tokenizer, self.dtype.name, self.shards, self.sources).save(self.folder)

    def describe(self, folder: Path) -> str:
        """Return what was written, and what was left out."""
        documents = sum(shard.documents for shard in self.shards)
        tokens = sum(shard.tokens for shard in self.shards)
        targets = sum(mask.targets for mask in self.masks.values())
        lines = [
            f"{folder}: {count_of(documents, 'chat')}, {count_of(tokens, 'token')}, of which {targets:,} "
            f"({targets / tokens:.1%}) are the assistant's"
        ]
        for reason, count in self.left_out.items():
            lines.append(f"left out: {count_of(count, 'record')}: {reason} (first {self.reasons[reason]})")
        if self.rewritten:
            lines.append(
                f"no targets: {count_of(self.rewritten, 'message')} of the assistant, which the template writes "
                "otherwise once others follow"
            )
        return "\n".join(lines)


def _check(writer: _ShardWriter, chats: Path, max_malformed: float) -> None:
    """Raise InputError where too many records were left out, or all of them."""
    kept = sum(shard.documents for shard in writer.shards)
    lost = writer.left_out.total()
    if kept and lost <= max_malformed * (kept + lost):
        return
    if not lost:
        raise InputError(f"{chats} has no chats; expected records with a list of messages")
    reason, count = writer.left_out.most_common(1)[0]
    raise InputError(
        f"{chats}: {lost:,} of {count_of(kept + lost, 'record')} would be left out, more than --max_malformed "
        f"{max_malformed:g}; of {count:,} the reason is: {reason} (first {writer.reasons[reason]})"
    )


if __name__ == "__main__":
    command(tokenize_chats)
