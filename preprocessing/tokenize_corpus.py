"""Stage: tokenise documents into Megatron token shards, a sequence per document that ends in its end-of-document id."""

import shutil
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import msgspec
import numpy as np
import sentencepiece

from gristmill.batches import batched
from gristmill.command import command
from gristmill.counts import WRITTEN, Counts
from gristmill.engine.stage import STATE_DIR, RunOptions, Task, outputs_of, reject_unknown_files, run_stage
from gristmill.errors import UsageError
from gristmill.io.documents import list_corpus
from gristmill.io.files import atomic_write, atomic_write_bytes, sha256_file
from gristmill.io.readers import Slice, plan_slices, read_documents
from gristmill.io.token_shards import (
    MANIFEST,
    Manifest,
    ShardRecord,
    SourceRecord,
    TokenizerRecord,
    TokenShardWriter,
    token_dtype,
)
from gristmill.io.writers import Rejects
from gristmill.text import utf8_size

if TYPE_CHECKING:
    from preprocessing.tokenizer.encoder import Encoder

NAME = "tokenize_corpus"
_ESCAPED_SPACE = "\u2581"  # SentencePiece decodes it as a space, so that a text with it is not restored
BATCH_CHARACTERS = 1 << 20  # characters encoded together


class ShardReport(msgspec.Struct):
    """Counts of one shard, for the manifest."""

    shard: ShardRecord
    sources: dict[str, SourceRecord]
    lossy_documents: int = 0  # with U+2581, which decodes as a space


def tokenize_corpus(input_dir: Path, tokenizer: Path, out_dir: Path, options: RunOptions = RunOptions()) -> Counts:
    """Encode every document with a SentencePiece model into token shards that Megatron-LM reads.

    Writes a shard (.bin and .idx) for each input file, several for a large one; manifest.json with counts
    per source, a checksum of each shard and of the tokenizer; and a copy of the tokenizer.

    Args:
        input_dir: Corpus to tokenise: OUT/train_deduped or OUT/holdout.
        tokenizer: A SentencePiece .model file with an end-of-sentence piece, which ends each document.
        out_dir: OUT/tokens/train or OUT/tokens/holdout, the folder of token shards to write.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read and written, per source.
    """
    if not tokenizer.is_file():
        raise UsageError(f"{tokenizer}: wanted a SentencePiece model, and there is no such file. Run train_tokenizer")
    fallback = load_encoder(tokenizer)[1].fallback
    if fallback and not options.quiet:
        print(f"note: SentencePiece itself encodes the texts, which is slower: {fallback}", file=sys.stderr)
    state = out_dir / STATE_DIR
    slices = [s for file in list_corpus(input_dir) for s in plan_slices(file)]
    tasks = [_slice_task(s, tokenizer, out_dir, state) for s in slices]
    reject_unknown_files(out_dir, outputs_of(tasks), (".bin", ".idx"), state / f"{NAME}.jsonl")
    counts = run_stage(NAME, tasks, state, options)
    reports = tuple(task.outputs[2] for task in tasks)
    outputs = (out_dir / MANIFEST, out_dir / tokenizer.name)
    arguments = {"reports": reports, "tokenizer": tokenizer, "out_dir": out_dir}
    manifest = Task("manifest", write_manifest, arguments, (*reports, tokenizer), outputs)
    run_stage(f"{NAME}-manifest", [manifest], state, options, summary=False)
    return counts


def load_encoder(path: Path) -> tuple[sentencepiece.SentencePieceProcessor, "Encoder"]:
    """Load a SentencePiece model and its encoder, once per process, so that all slices share the word cache.

    Raises UsageError if `path` is no SentencePiece model, or one without an end-of-sentence piece.
    """
    return _load(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _load(path: Path, mtime_ns: int) -> tuple[sentencepiece.SentencePieceProcessor, "Encoder"]:  # noqa: ARG001
    """Load a model and its encoder; cached until the modification time of the file changes."""
    from preprocessing.tokenizer.encoder import (
        Encoder,  # here, as it imports numba: `preprocessing` stays quick to import
    )

    model = sentencepiece.SentencePieceProcessor()
    try:
        model.Load(str(path))
    except (RuntimeError, OSError) as error:
        raise UsageError(f"{path} is not a SentencePiece model; train_tokenizer writes one") from error
    if model.eos_id() < 0:
        raise UsageError(f"{path} has no end-of-sentence piece to end documents with: train it with one (eos_id)")
    return model, Encoder(model)


def _slice_task(corpus_slice: Slice, tokenizer: Path, out_dir: Path, state: Path) -> Task:
    prefix, report = out_dir / corpus_slice.label, state / "reports" / f"{corpus_slice.label}.json"
    arguments = {"corpus_slice": corpus_slice, "tokenizer": tokenizer, "prefix": prefix, "report": report}
    outputs = (prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx"), report)
    inputs = (Path(corpus_slice.path), tokenizer)
    return Task(corpus_slice.label, encode_slice, arguments, inputs, outputs, corpus_slice.size)


def encode_slice(corpus_slice: Slice, tokenizer: Path, prefix: Path, report: Path) -> Counts:
    """Write the shard of one slice, `prefix`.bin and .idx, and its ShardReport as JSON."""
    counts, (model, encoder) = Counts({}, []), load_encoder(tokenizer)
    found = ShardReport(ShardRecord(corpus_slice.label, 0, 0, 0, ""), {})
    documents = read_documents(corpus_slice, counts, Rejects(report), by_original_source=True)
    with TokenShardWriter(prefix, token_dtype(model.vocab_size())) as shard:
        for batch in batched(documents, size=BATCH_CHARACTERS, size_of=lambda document: len(document.text)):
            ids, offsets = encoder.encode([document.text for document in batch], model.eos_id())
            lengths = np.diff(offsets).tolist()
            shard.add_all(ids, lengths)
            for document, tokens in zip(batch, lengths, strict=True):
                source, size = document.original_key.source, utf8_size(document.text)
                counts.add(source, WRITTEN, size)
                _add_document(found, source, tokens, size, _ESCAPED_SPACE in document.text)
    found.shard.sha256, found.shard.idx_sha256 = shard.sha256, shard.idx_sha256
    atomic_write_bytes(report, msgspec.json.encode(found))
    return counts


def _add_document(found: ShardReport, source: str, tokens: int, size: int, lossy: bool) -> None:
    _add(found.shard, 1, tokens, size)
    _add(found.sources.setdefault(source, SourceRecord()), 1, tokens, size)
    found.lossy_documents += lossy


def write_manifest(reports: tuple[Path, ...], tokenizer: Path, out_dir: Path) -> Counts:
    """Write manifest.json from the reports of all shards, in their order, and copy the tokenizer."""
    model, _ = load_encoder(tokenizer)
    with atomic_write(out_dir / tokenizer.name) as temporary:
        shutil.copyfile(tokenizer, temporary)
    record = TokenizerRecord(tokenizer.name, sha256_file(tokenizer), model.vocab_size(), model.eos_id())
    manifest = Manifest(record, token_dtype(record.vocab_size).name, [], {})
    for path in reports:
        found = msgspec.json.decode(path.read_bytes(), type=ShardReport)
        manifest.shards.append(found.shard)
        manifest.lossy_documents += found.lossy_documents
        for source, more in found.sources.items():
            _add(manifest.sources.setdefault(source, SourceRecord()), more.documents, more.tokens, more.bytes)
    manifest.sources = dict(sorted(manifest.sources.items()))
    manifest.save(out_dir)
    return Counts({}, [])


def _add(record: ShardRecord | SourceRecord, documents: int, tokens: int, size: int) -> None:
    record.documents += documents
    record.tokens += tokens
    record.bytes += size


if __name__ == "__main__":
    command(tokenize_corpus)
