"""Stage: tokenise documents into Megatron token shards, a sequence for each document."""

import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import compress, groupby
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import msgspec
import numpy as np

from gristmill.batches import batched
from gristmill.command import command
from gristmill.counts import WRITTEN, Counts, check_max_failed
from gristmill.engine.execution.worker_deaths import note_no_place
from gristmill.engine.options import RunOptions, parse_size
from gristmill.engine.run import StageRun, open_stage
from gristmill.engine.slices import SliceGroup, cut_raw_corpus, leaves_out_damaged, note_reading, read_slices
from gristmill.engine.staleness.outputs import reject_unknown_files
from gristmill.engine.task import Result, Stage, Task
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import paths_of
from gristmill.io.token_shards import (
    SHARD_SUFFIXES,
    ShardRecord,
    SourceRecord,
    TokenShardWriter,
    shard_files,
    token_dtype,
    write_sources,
)
from gristmill.io.tokenizer_file import AnyTokenizer
from gristmill.io.vocabulary import ESCAPED_SPACE
from gristmill.io.writers import Rejects
from preprocessing.document_pass import list_failed
from preprocessing.tokenizer.loading import LONG_TEXT, load_encoder, with_one_engine
from preprocessing.tokenizer.safe_encoder import (
    FailedDocument,
    ReadDocument,
    SafeEncoder,
    TokenizerFailed,
    read_with_slices,
)
from preprocessing.tokenizer.shard_files import (
    ShardReport,
    TokenizerFacts,
    add_to,
    find_usable_tokenizer,
    manifest_task,
    note_engines_that_differed,
    read_facts,
    remove_unrecorded_shards,
    shard_prefix,
    shard_tasks,
    stage_of,
)

if TYPE_CHECKING:
    from preprocessing.tokenizer.loading import AnyEncoder

STAGE = Stage("tokenize_corpus", version=4, libraries=("sentencepiece",))
BATCH_CHARACTERS = 1 << 20  # characters encoded together


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
    max_failed: float = 0.0,
) -> Counts:
    """Encode every document into token shards that Megatron-LM reads.

    Writes the shards tokens_00000.bin, .idx and .sources, tokens_00001.bin and so on; manifest.json with counts per
    source, a checksum of each file and of the tokenizer; data_path.txt, for Megatron-LM's --data-path; and a copy of
    the tokenizer. Each slice of the corpus is encoded into a part first; parts are temporary files.

    A document on which the tokenizer fails has no tokens, and is listed in OUT_DIR.removed.parquet. Is that more than
    `max_failed` of the documents, the stage ends with an error after all others, and the same command with a higher
    limit runs nothing again. With --retry_failed such documents are encoded again.

    Args:
        input_dir: Corpus to tokenise: OUT/train_deduped or OUT/holdout.
        tokenizer: A tokenizer.json, a SentencePiece .model, or a rank file of tiktoken; the folder of a model that has
            one; or a repository ORG/NAME of the Hugging Face Hub. All but SentencePiece need gristmill[tokenizers].
        out_dir: OUT/tokens/train or OUT/tokens/holdout, the folder of token shards to write.
        options: Workers, memory, and when to stop; they change no output.
        shard_size: Maximum size of a shard's .bin. The output of one task is not divided: that of a slice of 64 MiB of
            a .jsonl or .parquet file, of a whole compressed file, or of a group of small files.
        bos: The token that begins each document: none, model (as the tokenizer names it), or a token of its vocabulary.
        eos: The token that ends each document: none, model, or a token of the vocabulary.
        text_column: The column or field of the corpus that holds the text.
        max_failed: Fraction of the documents on which the tokenizer may fail, such as 0.001. If it is more than 0, a
            document on which a worker process dies counts as one, and with 0 that ends the stage.

    Returns:
        Documents read, written, and failed, per source.
    """
    check_max_failed(max_failed)
    tokenizer = find_usable_tokenizer(tokenizer, [out_dir])
    target = parse_size(shard_size, "--shard_size")
    files = list_corpus(input_dir, text_column=text_column)
    with open_stage(
        stage_of(STAGE, tokenizer), out_dir, options, reads={input_dir: paths_of(files)}, publishes=[out_dir]
    ) as run:
        remove_unrecorded_shards(run, out_dir)
        reject_unknown_files(out_dir, (), SHARD_SUFFIXES, run.ledger)
        facts = read_facts(run, tokenizer, bos, eos)
        slices = cut_raw_corpus(run, files)
        encoded = read_slices(
            run, "encode", slices, lambda groups: _part_tasks(run, groups, tokenizer, facts, sets_aside=max_failed > 0)
        )
        counts = encoded.counts
        written = encoded.values(EncodedPart)
        failed = list[FailedDocument]()
        for part in written:
            failed += part.failed
        counts.check_failed(STAGE.name, max_failed, list_failed(run, failed, out_dir), "the tokenizer")
        parts = encoded.paths_of_tasks()
        sizes = encoded.sizes()
        reports = [part.report for part in written]
        joined = run.step("join", shard_tasks(parts, sizes, reports, target, out_dir))
        run.step("manifest", [manifest_task(joined.values(ShardReport), tokenizer, facts, out_dir)])
        counts = run.finish(counts)
    if not options.quiet:
        note_engines_that_differed([report.differed for report in joined.values(ShardReport)])
    return counts


class EncodedPart(ShardReport):
    """Result of a task: what it encoded, and the documents that have no tokens."""

    failed: list[FailedDocument] = msgspec.field(default_factory=list)

    @property
    def report(self) -> ShardReport:
        """Return the report alone."""
        return ShardReport(self.shard, self.sources, self.lossy_documents, self.differed)


def _part_tasks(
    run: StageRun, groups: Sequence[SliceGroup], tokenizer: Path, facts: TokenizerFacts, sets_aside: bool
) -> Iterator[Task]:
    """Yield a task for each group of slices; its outputs are a part: a temporary shard."""
    for group in groups:
        prefix = run.work / "parts" / group[0].label
        outputs = shard_files(prefix)
        arguments = {"tokenizer": tokenizer, "begin": facts.begin, "end": facts.end, "tokens": outputs[0]}
        yield Task.on_slices(group, encode_slices, arguments, outputs, sets_aside=sets_aside)


@leaves_out_damaged
def encode_slices(group: SliceGroup, tokenizer: Path, begin: int, end: int, tokens: Path) -> Result:
    """Task: write the documents of slices as a part, `tokens` (.bin), .idx, .sources; the value is its EncodedPart.

    `begin` and `end` are the ids that begin and end each document; -1: none.
    """
    model, encoder = load_encoder(tokenizer)
    encoded, differed = with_one_engine(encoder, lambda: _encode(group, model, encoder, (begin, end), tokens))
    encoded.value.differed = differed  # all of the part was encoded anew: its bytes depend on nothing but its texts
    return encoded


def _encode(
    group: SliceGroup, model: AnyTokenizer, encoder: "AnyEncoder", ends: tuple[int, int], tokens: Path
) -> Result:
    counts = Counts({}, [])
    prefix = shard_prefix(tokens)
    lossy = model.kind == "sentencepiece"
    safe = SafeEncoder(encoder, *ends, counts)
    part = EncodedPart(ShardRecord(prefix.name, 0, 0, 0, ""), {}, failed=safe.failed)
    number_of = dict[str, int]()
    document_sources = array("I")
    with TokenShardWriter(prefix, token_dtype(model.vocab_size)) as shard:
        documents = read_with_slices(group, counts, Rejects(tokens), by_original_source=True)
        for batch in batched(documents, size=BATCH_CHARACTERS, size_of=lambda read: len(read.document.text)):
            lengths = _encode_batch(batch, safe, shard)
            for (_, document), length in zip(batch, lengths, strict=True):
                source = document.original_key.source
                size = document.read_bytes
                if isinstance(length, str):
                    counts.add(source, length, size)
                    continue
                counts.add(source, WRITTEN, size)
                document_sources.append(number_of.setdefault(source, len(number_of)))
                for record in (part.shard, part.sources.setdefault(source, SourceRecord())):
                    add_to(record, 1, length, size)
                part.lossy_documents += lossy and ESCAPED_SPACE in document.text
            note_reading(batch[-1].part)
            del batch, document  # a large one is gone before the next is read
    note_no_place()
    part.shard.sha256 = shard.sha256
    part.shard.idx_sha256 = shard.idx_sha256
    part.shard.sources = [*number_of]
    part.shard.sources_sha256 = write_sources(prefix, np.array(document_sources, np.uint32), part.shard.sources)
    return Result(counts, part)


def _encode_batch(batch: list[ReadDocument], encoder: SafeEncoder, shard: TokenShardWriter) -> list[int | str]:
    """Encode documents into a shard, long ones in parts; return the tokens of each, or why it has none."""
    lengths = list[int | str]()
    for is_long, some in groupby(batch, lambda read: len(read.document.text) > LONG_TEXT):
        if is_long:
            lengths += (_encode_long(read, encoder, shard) for read in some)
        else:
            encoded = encoder.encode(list(some))
            of_some = np.diff(encoded.offsets).tolist()
            is_written = [number not in encoded.failed for number in range(len(of_some))]
            shard.add_all(encoded.ids, list(compress(of_some, is_written)))
            lengths += [encoded.failed.get(number, length) for number, length in enumerate(of_some)]
    return lengths


def _encode_long(read: ReadDocument, encoder: SafeEncoder, shard: TokenShardWriter) -> int | str:
    """Encode a long document into a shard; return its tokens, or why it has none."""
    reason = encoder.death(read)
    if reason:
        return reason
    try:
        return shard.add_parts(encoder.encode_parts(read))
    except TokenizerFailed as error:
        return encoder.leave_out(read, error)


if __name__ == "__main__":
    command(tokenize_corpus)
