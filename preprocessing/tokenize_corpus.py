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
from gristmill.engine.stage import STATE_DIR, RunOptions, Task, parse_size, reject_unknown_files, run_stage
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
    with_suffix,
)
from gristmill.io.writers import Rejects
from gristmill.text import utf8_size
from preprocessing.tokenizer.shard_joining import blend, join_parts, plan_token_shards, shard_name

if TYPE_CHECKING:
    from preprocessing.tokenizer.encoder import Encoder

NAME = "tokenize_corpus"
DATA_PATH = "data_path.txt"
_SHARDS = f"{NAME}-shards"  # the ledger of the shards
_PARTS = "parts"  # folder of the parts, in the state folder
_ESCAPED_SPACE = "\u2581"  # SentencePiece decodes it as a space, so that a text with it is not restored
BATCH_CHARACTERS = 1 << 20  # characters encoded together


class ShardReport(msgspec.Struct):
    """Counts of one part or shard, for the manifest."""

    shard: ShardRecord
    sources: dict[str, SourceRecord]
    lossy_documents: int = 0  # with U+2581, which decodes as a space


def tokenize_corpus(
    input_dir: Path,
    tokenizer: Path,
    out_dir: Path,
    options: RunOptions = RunOptions(),
    *,
    shard_size: str = "512MiB",
) -> Counts:
    """Encode every document with a SentencePiece model into token shards that Megatron-LM reads.

    Writes the shards tokens_00000.bin and .idx, tokens_00001.bin and so on; manifest.json with counts per source, a
    checksum of each file and of the tokenizer; data_path.txt, for Megatron-LM's --data-path; and a copy of the
    tokenizer. Each slice of the corpus is encoded into a part first, in a work folder that is kept, so that the same
    command later encodes only what is new.

    Args:
        input_dir: Corpus to tokenise: OUT/train_deduped or OUT/holdout.
        tokenizer: A SentencePiece .model file with an end-of-sentence piece, which ends each document.
        out_dir: OUT/tokens/train or OUT/tokens/holdout, the folder of token shards to write.
        options: Workers, memory, and when to stop; they change no output.
        shard_size: Most bytes of a shard's .bin; a slice of the corpus that is larger is a shard of its own.

    Returns:
        Documents read and written, per source.
    """
    if not tokenizer.is_file():
        raise UsageError(f"{tokenizer}: wanted a SentencePiece model, and there is no such file. Run train_tokenizer")
    target = parse_size(shard_size)
    fallback = load_encoder(tokenizer)[1].fallback
    if fallback and not options.quiet:
        print(f"note: SentencePiece itself encodes the texts, which is slower: {fallback}", file=sys.stderr)
    state = out_dir / STATE_DIR
    slices = [s for file in list_corpus(input_dir) for s in plan_slices(file)]
    reject_unknown_files(out_dir, (), (".bin", ".idx"), state / f"{_SHARDS}.jsonl")
    parts = [_part_task(s, tokenizer, state) for s in slices]
    counts = run_stage(NAME, parts, state, options)
    shards = _shard_tasks(parts, target, out_dir, state)
    run_stage(_SHARDS, shards, state, options, summary=False)
    manifest = _manifest_task(tuple(task.outputs[2] for task in shards), tokenizer, out_dir)
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


def _part_task(corpus_slice: Slice, tokenizer: Path, state: Path) -> Task:
    prefix, report = state / _PARTS / corpus_slice.label, state / "reports" / f"{corpus_slice.label}.json"
    arguments = {"corpus_slice": corpus_slice, "tokenizer": tokenizer, "prefix": prefix, "report": report}
    outputs = (with_suffix(prefix, ".bin"), with_suffix(prefix, ".idx"), report)
    inputs = (Path(corpus_slice.path), tokenizer)
    return Task(corpus_slice.label, encode_slice, arguments, inputs, outputs, corpus_slice.size)


def _shard_tasks(parts: list[Task], target: int, out_dir: Path, state: Path) -> list[Task]:
    """Tasks that join the parts, which are written, into shards of at most `target` bytes."""
    reports, sizes = [task.outputs[2] for task in parts], [task.outputs[0].stat().st_size for task in parts]
    tasks = []
    for number, group in enumerate(plan_token_shards(sizes, target)):
        name, mine = shard_name(number), tuple(reports[part] for part in group)
        prefix, report = out_dir / name, state / "shards" / f"{name}.json"
        arguments = {"reports": mine, "folder": state / _PARTS, "prefix": prefix, "report": report}
        inputs = tuple(path for part in group for path in parts[part].outputs)
        outputs = (with_suffix(prefix, ".bin"), with_suffix(prefix, ".idx"), report)
        tasks.append(Task(name, write_shard, arguments, inputs, outputs, sum(sizes[part] for part in group)))
    return tasks


def _manifest_task(reports: tuple[Path, ...], tokenizer: Path, out_dir: Path) -> Task:
    outputs = (out_dir / MANIFEST, out_dir / DATA_PATH, out_dir / tokenizer.name)
    arguments = {"reports": reports, "tokenizer": tokenizer, "out_dir": out_dir}
    return Task("manifest", write_manifest, arguments, (*reports, tokenizer), outputs)


def encode_slice(corpus_slice: Slice, tokenizer: Path, prefix: Path, report: Path) -> Counts:
    """Write the part of one slice, `prefix`.bin and .idx, and its ShardReport as JSON."""
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


def write_shard(reports: tuple[Path, ...], folder: Path, prefix: Path, report: Path) -> Counts:
    """Join the parts of `reports`, which lie in `folder`, into the shard `prefix`; write its ShardReport as JSON."""
    parts = [_read_report(path) for path in reports]
    joined = ShardReport(join_parts(folder, [part.shard for part in parts], prefix), {})
    for part in parts:
        _merge(joined, part)
    atomic_write_bytes(report, msgspec.json.encode(joined))
    return Counts({}, [])


def _merge(total: ShardReport | Manifest, part: ShardReport) -> None:
    """Add the counts per source of a part."""
    total.lossy_documents += part.lossy_documents
    for source, more in part.sources.items():
        _add(total.sources.setdefault(source, SourceRecord()), more.documents, more.tokens, more.bytes)


def _read_report(path: Path) -> ShardReport:
    return msgspec.json.decode(path.read_bytes(), type=ShardReport)


def write_manifest(reports: tuple[Path, ...], tokenizer: Path, out_dir: Path) -> Counts:
    """Write manifest.json and data_path.txt from the reports of all shards, in their order; copy the tokenizer."""
    model, _ = load_encoder(tokenizer)
    with atomic_write(out_dir / tokenizer.name) as temporary:
        shutil.copyfile(tokenizer, temporary)
    record = TokenizerRecord(tokenizer.name, sha256_file(tokenizer), model.vocab_size(), model.eos_id())
    manifest = Manifest(record, token_dtype(record.vocab_size).name, [], {})
    for path in reports:
        found = _read_report(path)
        manifest.shards.append(found.shard)
        _merge(manifest, found)
    manifest.sources = dict(sorted(manifest.sources.items()))
    atomic_write_bytes(out_dir / DATA_PATH, blend(manifest).encode())
    manifest.save(out_dir)
    return Counts({}, [])


def _add(record: ShardRecord | SourceRecord, documents: int, tokens: int, size: int) -> None:
    record.documents += documents
    record.tokens += tokens
    record.bytes += size


if __name__ == "__main__":
    command(tokenize_corpus)
