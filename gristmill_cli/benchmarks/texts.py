"""Texts of a folder, in parts that processes read at the same time: of token shards, decoded, or of a corpus."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gristmill.counts import Counts
from gristmill.errors import UsageError, require
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import Slice
from gristmill.io.readers import plan_slices, read_documents
from gristmill.io.token_shards import MANIFEST, Manifest, ShardRecord, TokenShard, read_sources
from gristmill.io.tokenizer_file import open_tokenizer
from gristmill.io.writers import Rejects
from gristmill.storage.files import is_file, is_folder, reject_remote

_DOCUMENTS = 2000  # of a part of a shard


class NamedText(NamedTuple):
    """A document's text, where it is (a key of the corpus, or SHARD@NUMBER), and its source, if that is known.

    `number` is that of the document in a folder of tokens; -1 in a corpus.
    """

    name: str
    source: str
    text: str
    number: int = -1


@dataclass(frozen=True)
class TokenPart:
    """Documents `first` up to `end` of a shard, to be decoded; `before` is how many documents are in shards before."""

    folder: Path
    record: ShardRecord
    tokenizer: Path
    special: tuple[int, ...]
    before: int
    first: int
    end: int

    def read(self) -> Iterator[NamedText]:
        """Yield the documents; the text is what the tokenizer makes of the document's own tokens."""
        tokenizer = open_tokenizer(self.tokenizer)
        shard = TokenShard(self.folder / self.record.name)
        numbers = read_sources(self.folder, self.record) if self.record.sources_sha256 else None
        for number in range(self.first, min(self.end, len(shard))):
            ids = [token for token in shard[number].tolist() if token not in self.special]
            source = "" if numbers is None else self.record.sources[numbers[number]]
            yield NamedText(f"{self.record.name}@{number}", source, tokenizer.decode(ids), self.before + number)


@dataclass(frozen=True)
class CorpusPart:
    """A slice of a file of a corpus."""

    part: Slice

    def read(self) -> Iterator[NamedText]:
        """Yield the documents, without malformed ones."""
        for document in read_documents(self.part, Counts({}, []), Rejects(None)):
            yield NamedText(str(document.key), document.source, document.text)


Part = TokenPart | CorpusPart


def is_token_folder(folder: Path) -> bool:
    """Return whether a folder has token shards."""
    return is_file(folder / MANIFEST)


def parts_of(folder: Path, tokenizer: Path | None = None, text_column: str = "text") -> list[Part]:
    """Return the parts of a folder of token shards, or of a corpus. Raises UsageError where it is neither.

    `tokenizer` is that of the tokens, where it is not next to them.
    """
    reject_remote(folder)
    if is_token_folder(folder):
        return list(_parts_of_tokens(folder, tokenizer))
    require(is_folder(folder), f"{folder}: expected a folder of token shards or of a corpus, but there is none")
    parts: list[Part] = []
    for file in list_corpus(folder, text_column=text_column):
        parts += [CorpusPart(part) for part in plan_slices(file)]
    return parts


def _parts_of_tokens(folder: Path, tokenizer: Path | None) -> Iterator[TokenPart]:
    from training.data.text import find_tokenizer, is_tokenizer  # here, as it imports torch

    manifest = Manifest.load(folder)
    record = manifest.tokenizer
    path = tokenizer
    if path is not None:
        require(not record.sha256 or is_tokenizer(path, record), f"{path} is not the tokenizer of {folder}")
    elif record.sha256:
        path = find_tokenizer(record, [folder])
    if path is None:
        raise UsageError(
            f"{folder} has tokens without their tokenizer ({record.path or 'unknown'}); give it by --tokenizer FILE"
        )
    special = tuple(number for number in (record.end_of_document, record.begin_of_document) if number >= 0)
    before = 0
    for shard in manifest.shards:
        for first in range(0, shard.documents, _DOCUMENTS):
            end = min(first + _DOCUMENTS, shard.documents)
            yield TokenPart(folder, shard, path, special, before, first, end)
        before += shard.documents
