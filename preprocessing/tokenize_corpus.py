"""Stage: tokenise documents into Megatron token shards, a sequence for each document."""

import shutil
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import msgspec
import numpy as np

from gristmill.batches import batched
from gristmill.command import command
from gristmill.counts import WRITTEN, Counts
from gristmill.engine.options import RunOptions, parse_size
from gristmill.engine.outputs import reject_unknown_files
from gristmill.engine.run import StageRun, StepResult, open_stage
from gristmill.engine.slices import SliceGroup, cut_raw_corpus, leaves_out_damaged, read_slices
from gristmill.engine.task import Result, Stage, Task
from gristmill.errors import UsageError
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import Document, paths_of
from gristmill.io.files import is_unfinished, rejects_path
from gristmill.io.readers import Rejects, read_documents
from gristmill.io.token_shards import (
    MANIFEST,
    SHARD_SUFFIXES,
    Manifest,
    ShardRecord,
    SourceRecord,
    TokenizerRecord,
    TokenShardWriter,
    token_dtype,
    with_suffix,
    write_sources,
)
from gristmill.io.tokenizer_file import (
    COMPANIONS,
    AnyTokenizer,
    Kind,
    companions_of,
    find_tokenizer_file,
    read_config,
    require_tokenizers,
    special_id,
)
from gristmill.io.vocabulary import ESCAPED_SPACE
from gristmill.storage.files import remove_files
from gristmill.storage.local import atomic_write, atomic_write_bytes, concatenate, sha256_file
from gristmill.text import utf8_size
from gristmill.wording import count_of
from preprocessing.tokenizer.loading import LONG_TEXT, JsonEncoder, load_encoder, with_one_engine
from preprocessing.tokenizer.shard_joining import blend, join_parts, plan_token_shards, shard_name, shards_in

if TYPE_CHECKING:
    from preprocessing.tokenizer.encoder import Encoder

STAGE = Stage("tokenize_corpus", version=4, libraries=("sentencepiece",))
DATA_PATH = "data_path.txt"
BATCH_CHARACTERS = 1 << 20  # characters encoded together


class TokenizerFacts(msgspec.Struct):
    """Facts of a tokenizer that the stage needs; `fallback` is the reason that a slower library encodes, if any.

    `begin` and `end` are the ids that begin and end each document, or -1. Without byte pieces, a character that is in
    no piece of a SentencePiece model becomes the unknown id.
    """

    sha256: str
    vocab_size: int
    begin: int
    end: int
    kind: Kind
    fallback: str
    has_bytes: bool = True


class ShardReport(msgspec.Struct):
    """Counts of one part or shard, for the manifest; `differed` says where gigatoken and tokenizers did not agree."""

    shard: ShardRecord
    sources: dict[str, SourceRecord]
    lossy_documents: int = 0  # with U+2581, which SentencePiece decodes as a space, so that a text is not restored
    differed: str = ""


def tokenize_corpus(
    input_dir: Path,
    tokenizer: Path,
    out_dir: Path,
    options: RunOptions = RunOptions(),
    *,
    shard_size: str = "512MiB",
    bos: str = "none",
    eos: str = "model",
    text_column: str = "text",
) -> Counts:
    """Encode every document into token shards that Megatron-LM reads.

    Writes the shards tokens_00000.bin, .idx and .sources, tokens_00001.bin and so on; manifest.json with counts per
    source, a checksum of each file and of the tokenizer; data_path.txt, for Megatron-LM's --data-path; and a copy of
    the tokenizer. Each slice of the corpus is encoded into a part first; parts are temporary files.

    Args:
        input_dir: Corpus to tokenise: OUT/train_deduped or OUT/holdout.
        tokenizer: A tokenizer.json, a SentencePiece .model, or a rank file of tiktoken; the folder of a model that has
            one; or a repository ORG/NAME of the Hugging Face Hub. All but SentencePiece need gristmill[tokenizers].
        out_dir: OUT/tokens/train or OUT/tokens/holdout, the folder of token shards to write.
        options: Workers, memory, and when to stop; they change no output.
        shard_size: Most bytes of a shard's .bin. What one task encodes is not divided: a slice of 64 MiB of a .jsonl or
            .parquet file, a compressed file as a whole, or a group of small files.
        bos: The token that begins each document: none, model (as the tokenizer names it), or a token of its vocabulary.
        eos: The token that ends each document, likewise.
        text_column: The column or field of the corpus that holds the text.

    Returns:
        Documents read and written, per source.
    """
    tokenizer = find_tokenizer_file(tokenizer)
    target, files = parse_size(shard_size, "--shard_size"), list_corpus(input_dir, text_column=text_column)
    if (out_dir / tokenizer.name).resolve() == tokenizer.resolve():
        raise UsageError(f"{tokenizer} lies in the output folder, and would be overwritten: give another --out_dir")
    if tokenizer.suffix in SHARD_SUFFIXES or tokenizer.name in (MANIFEST, DATA_PATH, *COMPANIONS):
        raise UsageError(
            f"{tokenizer} is named as an output of the folder that it is copied to: name it tokenizer.model, or "
            "tokenizer.json"
        )
    companions = companions_of(tokenizer)
    stage = STAGE
    if tokenizer.suffix != ".model":
        require_tokenizers(str(tokenizer))
        stage = replace(STAGE, libraries=("tokenizers",))
    with open_stage(stage, out_dir, options, reads={input_dir: paths_of(files)}, publishes=[out_dir]) as run:
        _remove_unrecorded_shards(run, out_dir)
        reject_unknown_files(out_dir, (), SHARD_SUFFIXES, run.ledger)
        facts = _read_facts(run, {"tokenizer": tokenizer, "companions": companions, "bos": bos, "eos": eos})
        slices = cut_raw_corpus(run, files)
        encoded = read_slices(run, "encode", slices, lambda groups: _part_tasks(run, groups, tokenizer, facts))
        joined = run.step("join", _shard_tasks(run, encoded, target, out_dir))
        run.step("manifest", [_manifest_task(joined, [tokenizer, *companions], facts, out_dir)])
        counts = run.finish(encoded.counts)
    differed = [report.differed for report in joined.values(ShardReport) if report.differed]
    if differed and not options.quiet:
        print(
            f"note: tokenizers encoded parts of {count_of(len(differed), 'shard')}, as gigatoken gave {differed[0]}; "
            "the ids are those of tokenizers",
            file=sys.stderr,
        )
    return counts


def _remove_unrecorded_shards(run: StageRun, out_dir: Path) -> None:
    """Remove shards that a run which was killed wrote, and did not record; they are written again."""
    if is_unfinished(out_dir, run.name):
        remove_files(set(shards_in(out_dir)) - set(map(Path, run.ledger.outputs())))


def _read_facts(run: StageRun, arguments: dict[str, Any]) -> TokenizerFacts:
    """Run the step that loads the tokenizer; print a note if it is slow to encode with, or may lose characters."""
    tokenizer, quiet = arguments["tokenizer"], run.options.quiet
    if tokenizer.suffix == ".model":
        from gristmill.kernels import note_compilation  # here, as they import numba
        from preprocessing.tokenizer.bpe import encode_texts

        note_compilation(encode_texts, seconds=5, quiet=quiet)
    read = run.step("tokenizer", [Task("tokenizer", read_tokenizer, arguments)])
    facts = read.values(TokenizerFacts)[0]
    if facts.fallback and not quiet:
        library = "SentencePiece" if facts.kind == "sentencepiece" else "tokenizers"
        print(f"note: {library} itself encodes the texts, which is slower: {facts.fallback}", file=sys.stderr)
    if not facts.has_bytes and not quiet:
        print(
            f"note: {tokenizer} has no byte pieces: characters that are in none of its pieces become its unknown id, "
            "and are lost. Models of train_tokenizer lose none",
            file=sys.stderr,
        )
    return facts


def read_tokenizer(tokenizer: Path, companions: list[Path], bos: str, eos: str) -> Result:
    """Task: load a tokenizer; the value is its TokenizerFacts. UsageError if it cannot be used."""
    model, encoder = load_encoder(tokenizer)
    named = read_config(companions)
    begin = special_id(model, tokenizer, named, "bos", bos)
    end = special_id(model, tokenizer, named, "eos", eos)
    has_bytes = isinstance(encoder, JsonEncoder) or encoder.has_bytes
    sha256, size = sha256_file(tokenizer), model.vocab_size
    return Result(Counts({}, []), TokenizerFacts(sha256, size, begin, end, model.kind, encoder.fallback, has_bytes))


def _part_tasks(run: StageRun, groups: Sequence[SliceGroup], tokenizer: Path, facts: TokenizerFacts) -> Iterator[Task]:
    """A task for each group of slices; its outputs are a part: a temporary shard."""
    for group in groups:
        prefix = run.work / "parts" / group[0].label
        outputs = tuple(with_suffix(prefix, suffix) for suffix in SHARD_SUFFIXES)
        arguments = {"tokenizer": tokenizer, "begin": facts.begin, "end": facts.end, "tokens": outputs[0]}
        yield Task.on_slices(group, encode_slices, arguments, outputs)


def _shard_tasks(run: StageRun, encoded: StepResult, target: int, out_dir: Path) -> Iterator[Task]:
    """A task for each shard: it joins parts of at most `target` bytes, and the files of their malformed records."""
    sizes = [record.outputs[0].size for record in encoded.records]
    written = [tuple(map(run.ledger.path, record.outputs)) for record in encoded.records]
    reports, files = encoded.values(ShardReport), len(SHARD_SUFFIXES)
    for number, group in enumerate(plan_token_shards(sizes, target)):
        prefix = out_dir / shard_name(number)
        outputs = tuple(with_suffix(prefix, suffix) for suffix in SHARD_SUFFIXES)
        arguments = {
            "parts": [written[part][:files] for part in group], "reports": [reports[part] for part in group],
            "rejects": [path for part in group for path in written[part][files:]], "tokens": outputs[0],
        }  # fmt: skip
        yield Task(prefix.name, write_shard, arguments, outputs, sum(sizes[part] for part in group))


def _manifest_task(joined: StepResult, tokenizer: Sequence[Path], facts: TokenizerFacts, out_dir: Path) -> Task:
    manifest, data_path = out_dir / MANIFEST, out_dir / DATA_PATH
    copies = {path: out_dir / path.name for path in tokenizer}
    arguments = {"reports": joined.values(ShardReport), "facts": facts, "copies": list(copies.items()),
                 "manifest": manifest, "data_path": data_path}  # fmt: skip
    return Task("manifest", write_manifest, arguments, (manifest, data_path, *copies.values()))


@leaves_out_damaged
def encode_slices(group: SliceGroup, tokenizer: Path, begin: int, end: int, tokens: Path) -> Result:
    """Task: write the documents of slices as a part, `tokens` (.bin), .idx, .sources; the value is its ShardReport.

    `begin` and `end` are the ids that begin and end each document; -1: none.
    """
    model, encoder = load_encoder(tokenizer)
    found, differed = with_one_engine(encoder, lambda: _encode(group, model, encoder, (begin, end), tokens))
    found.value.differed = differed  # all of the part was encoded anew: its bytes depend on nothing but its texts
    return found


def _encode(
    group: SliceGroup, model: AnyTokenizer, encoder: "Encoder | JsonEncoder", ends: tuple[int, int], tokens: Path
) -> Result:
    counts, prefix, lossy = Counts({}, []), _prefix(tokens), model.kind == "sentencepiece"
    found = ShardReport(ShardRecord(prefix.name, 0, 0, 0, ""), {})
    number_of, document_sources = dict[str, int](), array("I")
    with TokenShardWriter(prefix, token_dtype(model.vocab_size)) as shard:
        rejects = Rejects(tokens)
        documents = chain.from_iterable(
            read_documents(part, counts, rejects, by_original_source=True) for part in group
        )
        for batch in batched(documents, size=BATCH_CHARACTERS, size_of=lambda document: len(document.text)):
            lengths = _encode_batch(batch, encoder, *ends, shard)
            for document, length in zip(batch, lengths, strict=True):
                source, size = document.original_key.source, utf8_size(document.text)
                counts.add(source, WRITTEN, size)
                document_sources.append(number_of.setdefault(source, len(number_of)))
                for record in (found.shard, found.sources.setdefault(source, SourceRecord())):
                    _add(record, 1, length, size)
                found.lossy_documents += lossy and ESCAPED_SPACE in document.text
            del batch, document  # a large one is gone before the next is read
    found.shard.sha256, found.shard.idx_sha256, found.shard.sources = shard.sha256, shard.idx_sha256, [*number_of]
    found.shard.sources_sha256 = write_sources(prefix, np.array(document_sources, np.uint32), found.shard.sources)
    return Result(counts, found)


def _encode_batch(
    batch: list[Document], encoder: "Encoder | JsonEncoder", begin: int, end: int, shard: TokenShardWriter
) -> list[int]:
    """Encode documents into a shard, long ones in parts; return the number of tokens of each."""
    lengths: list[int] = []
    first = np.array([begin] if begin >= 0 else [], np.int32)
    for is_long, some in groupby(batch, lambda document: len(document.text) > LONG_TEXT):
        if is_long:
            parts = (encoder.encode_parts(document.text, end, what=f"the text {document.key}") for document in some)
            lengths += (shard.add_parts(chain([first], ids)) for ids in parts)
        else:
            ids, offsets = encoder.encode([document.text for document in some], end)
            if len(first):
                ids, offsets = np.insert(ids, offsets[:-1], begin), offsets + np.arange(len(offsets))
            shard.add_all(ids, found := np.diff(offsets).tolist())
            lengths += found
    return lengths


def write_shard(parts: list[tuple[Path, ...]], reports: list[ShardReport], rejects: list[Path], tokens: Path) -> Result:
    """Task: join parts into the shard `tokens` (.bin), .idx, .sources; the value is its ShardReport."""
    prefixes = [_prefix(part[0]) for part in parts]
    joined = ShardReport(join_parts(prefixes, [report.shard for report in reports], _prefix(tokens)), {})
    for report in reports:
        _merge(joined, report)
    rejects_path(tokens).unlink(missing_ok=True)
    if rejects:
        concatenate(rejects, rejects_path(tokens))
    return Result(Counts({}, []), joined)


def _prefix(tokens: Path) -> Path:
    """The path of a shard without the suffix .bin."""
    return tokens.with_name(tokens.name.removesuffix(".bin"))


def _merge(total: ShardReport | Manifest, part: ShardReport) -> None:
    total.lossy_documents += part.lossy_documents
    if isinstance(total, ShardReport):
        total.differed = total.differed or part.differed
    for source, more in part.sources.items():
        _add(total.sources.setdefault(source, SourceRecord()), more.documents, more.tokens, more.bytes)


def write_manifest(
    reports: list[ShardReport], facts: TokenizerFacts, copies: list[tuple[Path, Path]], manifest: Path, data_path: Path
) -> None:
    """Task: write manifest.json and data_path.txt from the reports of all shards, in order; copy the tokenizer."""
    for original, copy in copies:
        with atomic_write(copy) as temporary:
            shutil.copyfile(original, temporary)
    record = TokenizerRecord(copies[0][1].name, facts.sha256, facts.vocab_size, facts.end, facts.begin)
    found = Manifest(record, token_dtype(record.vocab_size).name, [report.shard for report in reports], {})
    for report in reports:
        _merge(found, report)
    found.sources = dict(sorted(found.sources.items()))
    atomic_write_bytes(data_path, blend(found).encode())
    found.save(manifest.parent)


def _add(record: ShardRecord | SourceRecord, documents: int, tokens: int, size: int) -> None:
    record.documents += documents
    record.tokens += tokens
    record.bytes += size


if __name__ == "__main__":
    command(tokenize_corpus)
