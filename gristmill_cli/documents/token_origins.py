"""Origins of tokens: of documents in token shards their keys in the corpus of a data run, ids, urls and texts."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
from numpy.typing import NDArray

from gristmill.counts import HELD_OUT
from gristmill.errors import GristmillError, InputError
from gristmill.io.documents import DocKey, Document
from gristmill.io.shard_cache import CacheOptions, ShardCache, TokenRange
from gristmill.io.token_shards import Manifest, TokenShard
from gristmill.io.tokenizer_file import open_tokenizer
from gristmill.storage.files import is_file, resolved
from gristmill.storage.stores import store_of
from gristmill_cli.documents.document_scores import read_scores
from gristmill_cli.documents.duplicates import some_documents
from gristmill_cli.documents.tracer import Tracer
from gristmill_cli.run_config import is_data_run, load_options, read_options
from gristmill_cli.stages.pipeline import clean_corpus
from preprocessing.mixing.token_order import TRAIN

_DECODED = 100  # tokens of a document that are decoded, to show how it begins


@dataclass(frozen=True)
class Origin:
    """Where a document comes from: its key in the corpus, or in what was mixed; its fields; None if unknown."""

    key: DocKey | None = None
    id: str | None = None
    url: str | None = None
    text: str | None = None


class TokenOrigins:
    """The documents of one folder of token shards."""

    def __init__(self, folder: Path) -> None:
        """Raises UsageError or InputError where the folder has no token shards, or its data run is damaged."""
        self.folder = folder
        self.manifest = Manifest.load(folder)
        self._open_shard = cache(lambda name: TokenShard(folder / name))
        self._copies: ShardCache | None = None
        local = folder
        if store_of(folder).needs_copies:
            self._copies = ShardCache(folder, self.manifest, CacheOptions())
            local = self._copies.local
        from training.data.text import find_tokenizer  # here, as it imports torch

        tokenizer = find_tokenizer(self.manifest.tokenizer, [local])
        self._tokenizer = open_tokenizer(tokenizer) if tokenizer else None
        self.fault = ""
        self.set_name = resolved(folder).name
        self._tracer = self._open_run()

    def _open_run(self) -> Tracer | None:
        """Return the tracer of the data run that wrote the folder; None if it lies in no run's folder."""
        tokens = resolved(self.folder).parent
        out = tokens.parent
        if self.set_name not in (TRAIN, HELD_OUT) or not is_file(tokens / "order.json") or not is_data_run(out):
            return None
        try:
            return Tracer(load_options(read_options(out), out))
        except (ValueError, msgspec.ValidationError) as error:
            raise InputError(
                f"{out} has options of another version ({error}): run the same `gristmill run` again"
            ) from error

    def find(self, numbers: Iterable[int]) -> dict[int, Origin]:
        """Return the origins of documents by their numbers in the folder; none where no data run knows it.

        None, and a `fault`, where records of the data run are missing or damaged.
        """
        if self._tracer is None:
            return {}
        try:
            mixed = self._tracer.keys_in_tokens(self.set_name, numbers)
            raw = self._tracer.raw_keys(mixed.values())
        except GristmillError as error:
            self.fault = str(error)
            return {}
        config = self._tracer.config
        documents = some_documents(clean_corpus(config), mixed.values(), config.text_column)
        origins = dict[int, Origin]()
        for number, key in mixed.items():
            origins[number] = _origin(raw.get(key, key), documents.get(key))
        return origins

    def scores(self, numbers: Iterable[int]) -> dict[str, dict[int, float]]:
        """Return the scores of documents, by name and by their numbers in the folder; none where none are known."""
        if self._tracer is None or not self._tracer.config.scores:
            return {}
        try:
            keys = self._tracer.keys_in_tokens(self.set_name, numbers)
            noted = read_scores(self._tracer.config, set(keys.values()))
        except GristmillError as error:
            self.fault = str(error)
            return {}
        by_number = dict[str, dict[int, float]]()
        for name, of_score in noted.items():
            by_number[name] = {}
            for number, key in keys.items():
                if key in of_score:
                    by_number[name][number] = of_score[key]
        return by_number

    def ids(self, shard: str, number: int) -> NDArray:
        """Return the ids of a document of a shard."""
        if self._copies is None:
            return self._open_shard(shard)[number]
        return self._fetch(self._copies, shard, number)

    def _fetch(self, copies: ShardCache, shard: str, number: int) -> NDArray:
        """Return the ids of a document of a shard in a bucket."""
        from training.data.documents import DocumentIndex

        index = DocumentIndex(copies.local, self.manifest)
        names = [record.name for record in self.manifest.shards]
        shard_number = names.index(shard)
        first = int(index.documents[shard_number]) + number
        span = index.numbered(first, first + 1)
        start = int(span.start[0] - index.tokens[shard_number])
        (ids,) = copies.read([TokenRange(shard_number, start, start + int(span.length[0]))])
        return ids

    def decode(self, shard: str, number: int, first: int = 0) -> str | None:
        """Return the beginning of a document from its token `first` on; None without the tokenizer."""
        if self._tokenizer is None:
            return None
        ids = self.ids(shard, number)[first : first + _DECODED].tolist()
        special = (self.manifest.tokenizer.end_of_document, self.manifest.tokenizer.begin_of_document)
        without_special = [number for number in ids if number not in special]
        return self._tokenizer.decode(without_special)


def _origin(key: DocKey, document: Document | None) -> Origin:
    if document is None:
        return Origin(key)
    url = document.value("url")
    if url is not None:
        url = str(url)
    return Origin(key, document.own_id, url, document.text)
