"""The manifest of token shards, `manifest.json`: tokenizer, shards, sources; verification of shards against it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from gristmill.errors import InputError, UsageError
from gristmill.io.files import reject_unfinished
from gristmill.storage.files import is_file, list_names, read_file
from gristmill.storage.local import atomic_write_bytes, sha256_file

MANIFEST = "manifest.json"
SOURCES = ".sources"
SHARD_SUFFIXES = (".bin", ".idx", SOURCES)  # of the files of a shard
REMEDY = "Restore the file from a copy, or run tokenize_corpus again"
_UINT16_VOCABULARY = 65_500  # Megatron chooses uint16 below this size
_VERSIONS = (1, 2, 3)  # of the manifest; 1 has no checksums of the .idx files, 2 no sources of the documents
Count = Annotated[int, msgspec.Meta(ge=0)]


class TokenizerRecord(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The tokenizer of the shards. `path` is relative to the manifest's folder.

    `end_of_document` and `begin_of_document` are the ids that end and begin each document; -1: none, or, of an imported
    model, unknown.
    """

    path: str
    sha256: str
    vocab_size: Count
    end_of_document: Annotated[int, msgspec.Meta(ge=-1)]
    begin_of_document: Annotated[int, msgspec.Meta(ge=-1)] = -1


class ShardRecord(msgspec.Struct, forbid_unknown_fields=True):
    """One shard: documents, tokens (end-of-document included), UTF-8 bytes of text; SHA-256 of its files.

    `sources` are the names that the numbers in its .sources file stand for; without such a file (an empty
    `sources_sha256`) nothing is known of which document is of which source.
    """

    name: str
    documents: Count
    tokens: Count
    bytes: Count
    sha256: str
    idx_sha256: str = ""  # empty in manifests of version 1
    sources: list[str] = []
    sources_sha256: str = ""


class SourceRecord(msgspec.Struct, forbid_unknown_fields=True):
    """Documents, tokens and UTF-8 bytes of one source, summed over all shards."""

    documents: Count = 0
    tokens: Count = 0
    bytes: Count = 0


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """`manifest.json`: the tokenizer, the shards of one folder in order, and totals per source."""

    tokenizer: TokenizerRecord
    dtype: str
    shards: list[ShardRecord]
    sources: dict[str, SourceRecord]
    lossy_documents: int = 0  # documents with U+2581, which SentencePiece decodes as a space
    version: int = max(_VERSIONS)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @property
    def source_names(self) -> list[str]:
        """The sources of the documents; none where a shard with documents does not say which are of which."""
        known = all(shard.sources_sha256 for shard in self.shards if shard.documents)
        return sorted({name for shard in self.shards for name in shard.sources}) if known else []

    def save(self, folder: Path) -> None:
        """Write `folder/manifest.json` atomically."""
        atomic_write_bytes(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Read `folder/manifest.json`. UsageError if there is none, InputError if it is damaged or unfinished."""
        reject_unfinished(folder)
        path = folder / MANIFEST
        if not is_file(path):
            below = " or ".join(
                str(folder / name) for name in sorted(list_names(folder)) if is_file(folder / name / MANIFEST)
            )
            hint = f"try {below}" if below else "make it with gristmill tokenize"
            raise UsageError(f"no token shards in {folder}: expected {path}; {hint}")
        try:
            with read_errors(path):
                manifest = msgspec.json.decode(read_file(path), type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is damaged ({error}). {REMEDY}") from error
        if fault := manifest.fault():
            raise InputError(f"{path} is damaged: {fault}. {REMEDY}")
        return manifest

    def fault(self) -> str:
        """What contradicts itself in the manifest, with what was expected; empty if nothing does."""
        tokenizer, names = self.tokenizer, [shard.name for shard in self.shards]
        if self.version not in _VERSIONS:
            return f"its version is {self.version}; expected {' or '.join(map(str, _VERSIONS))}"
        if self.version > 1 and not all(shard.idx_sha256 for shard in self.shards):
            return "a shard has no idx_sha256; expected the SHA-256 of its .idx"
        if strange := [name for shard in self.shards for name in shard.sources if name not in self.sources]:
            return f"a shard has documents of {strange[0]!r}; expected one of its sources: {', '.join(self.sources)}"
        if (most := max(tokenizer.end_of_document, tokenizer.begin_of_document)) >= tokenizer.vocab_size:
            return f"a document ends or begins with {most}; expected an id from 0 to {tokenizer.vocab_size - 1}, or -1"
        if self.dtype != (expected := token_dtype(tokenizer.vocab_size).name):
            return f"dtype is {self.dtype!r}; expected {expected!r} for a vocabulary of {tokenizer.vocab_size:,}"
        repeated = [name for name, count in Counter(names).items() if count > 1]
        return f"it names shard {repeated[0]!r} twice; expected each once" if repeated else ""


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 for vocabularies below 65,500 ids, else int32, as Megatron chooses."""
    return np.dtype(np.uint16) if vocab_size < _UINT16_VOCABULARY else np.dtype(np.int32)


def with_suffix(prefix: Path, suffix: str) -> Path:
    """A file of the shard `prefix`: its .bin, .idx or .sources; the name of a shard may have dots itself."""
    return prefix.with_name(prefix.name + suffix)


def verify_checksums(folder: Path, record: ShardRecord) -> None:
    """Read one shard and raise InputError where the SHA-256 of one of its files is not the recorded one."""
    expected_of = {".bin": record.sha256, ".idx": record.idx_sha256, SOURCES: record.sources_sha256}
    for suffix, expected in expected_of.items():
        path = with_suffix(folder / record.name, suffix)
        with read_errors(path):
            found = sha256_file(path) if expected else ""
        if found != expected:
            raise InputError(
                f"{path} is damaged or of another run: its SHA-256 is {found[:12]}…, and {MANIFEST} says "
                f"{expected[:12]}…. {REMEDY}"
            )


def require_known_ids(tokens: NDArray[np.integer], manifest: Manifest, prefix: Path) -> None:
    """Raise InputError where an id is not of the tokenizer; `prefix` is the shard they were read from."""
    size = manifest.tokenizer.vocab_size
    least, most = int(tokens.min(initial=0)), int(tokens.max(initial=0))
    if least < 0 or most >= size:
        wrong = least if least < 0 else most
        raise InputError(f"{prefix}.bin is damaged: it holds id {wrong}; expected ids from 0 to {size - 1}. {REMEDY}")


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of reading `path` into an InputError that says how to get the file back."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} is not readable ({error.strerror}). {REMEDY}") from error
