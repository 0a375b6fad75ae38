"""Stage: encode each document of a mix once, shuffle its tokens, and write train set and holdout as token shards.

`mix` has decided which documents are in the mix and how often. A task for each slice of the corpus encodes them, and
writes a row of tokens for each copy to a random part's bucket, as pass1 does with lines; beyond some hundred files or
parts these are gathered in levels. Each part is then sorted into a random order, and written to its shard, of one part
or several. So text is read once, and what is moved are tokens. All files but the shards are temporary. A document on
which the tokenizer fails is in no shard, and the documents after it move up.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

from gristmill.batches import batched
from gristmill.budget import Budget
from gristmill.command import command
from gristmill.counts import Counts, check_max_failed
from gristmill.engine.options import RunOptions, parse_size
from gristmill.engine.run import StageRun, open_stage
from gristmill.engine.slices import cut_corpus, group_slices
from gristmill.engine.staleness.outputs import reject_unknown_files
from gristmill.engine.staleness.records import StepResult
from gristmill.engine.task import FileSet, Stage, Task
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import paths_of
from gristmill.io.token_shards import SHARD_SUFFIXES, shard_files, token_dtype
from preprocessing.document_pass import list_failed
from preprocessing.mixing.decided_corpus import find_decisions, open_mix, reject_other_corpus
from preprocessing.mixing.mix import gather
from preprocessing.mixing.mix_manifest import ORDER, OrderRecord, mix_manifest_path, write_order
from preprocessing.mixing.shuffle_buckets import SUFFIX, Share, part_path
from preprocessing.mixing.token_rows import COMPRESSION, EncodedGroup, encode_group, write_token_shard
from preprocessing.tokenizer.safe_encoder import FailedDocument
from preprocessing.tokenizer.shard_files import (
    ShardReport,
    TokenizerFacts,
    find_usable_tokenizer,
    manifest_task,
    note_engines_that_differed,
    read_facts,
    remove_unrecorded_shards,
    shard_tasks,
    stage_of,
)
from preprocessing.tokenizer.shard_joining import shard_name

STAGE = Stage("encode", version=2, libraries=("zstandard", "pyarrow", "sentencepiece"))
TRAIN = "train"
HOLDOUT = "holdout"
MIN_PARTS = 8  # for the workers
MAX_PART_BYTES = 128 << 20  # of tokens, estimated; twice as many if measured
FAN_OUT = 256  # files that a task opens at once; a corpus of more slices or parts is gathered in levels
_BYTES_A_TOKEN = 3  # of text, assumed
_UNEVEN = 1.05  # some parts are larger than the mean, as documents are drawn at random


def encode(
    input_dir: Path,
    mix_dir: Path,
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
    """Encode the documents of a mix into shuffled token shards that Megatron-LM reads.

    Writes OUT/tokens/order.json, by which documents are found again, and OUT/tokens/train and OUT/tokens/holdout: each
    has the shards tokens_00000.bin, .idx and .sources and so on;
    manifest.json with counts per source, a checksum of each file and of the tokenizer; data_path.txt, for Megatron-LM's
    --data-path; and a copy of the tokenizer.

    A document on which the tokenizer fails has no tokens, and is listed in OUT/tokens.removed.parquet. Is that more
    than `max_failed` of the documents, the stage ends with an error after all others, and the same command with a
    higher limit runs nothing again. With --retry_failed such documents are encoded again.

    Args:
        input_dir: The clean corpus that mix read.
        mix_dir: OUT/mix, which mix wrote.
        tokenizer: A tokenizer.json, a SentencePiece .model, or a rank file of tiktoken; the folder of a model that has
            one; or a repository ORG/NAME of the Hugging Face Hub. All but SentencePiece need gristmill[tokenizers].
        out_dir: OUT/tokens, the folder of both sets of token shards.
        options: Workers, memory, and when to stop; they change no output.
        shard_size: Bytes of a shard's .bin, about. A part of the shuffle, of some 128 MiB, is not divided.
        bos: The token that begins each document: none, model (as the tokenizer names it), or a token of its vocabulary.
        eos: The token that ends each document: none, model, or a token of the vocabulary.
        text_column: The column or field of the corpus that holds the text.
        max_failed: Fraction of the documents on which the tokenizer may fail, such as 0.001. If it is more than 0, a
            document on which a worker process dies counts as one, and with 0 that ends the stage.

    Returns:
        Documents read, written to train, held out, and failed, per source; copies count as documents.
    """
    check_max_failed(max_failed)
    targets = {name: out_dir / name for name in (TRAIN, HOLDOUT)}
    tokenizer = find_usable_tokenizer(tokenizer, list(targets.values()))
    shard_bytes = parse_size(shard_size, "--shard_size")
    files = list_corpus(input_dir, text_column=text_column)
    manifest, decisions_files = open_mix(mix_dir)
    with open_stage(
        stage_of(STAGE, tokenizer), out_dir, options,
        reads={input_dir: paths_of(files), mix_dir: decisions_files}, publishes=list(targets.values()),
        files=[out_dir / ORDER],
    ) as run:  # fmt: skip
        run.tag(mix_manifest_path(mix_dir))  # was read above
        reject_other_corpus(files, manifest, mix_dir)
        for target in targets.values():
            remove_unrecorded_shards(run, target)
            reject_unknown_files(target, (), SHARD_SUFFIXES, run.ledger)
        facts = read_facts(run, tokenizer, bos, eos)
        groups = group_slices(cut_corpus(run, files))
        decisions = find_decisions(groups, manifest, mix_dir)
        row_bytes = manifest.text_bytes * token_dtype(facts.vocab_size).itemsize // _BYTES_A_TOKEN
        buckets = max(MIN_PARTS, math.ceil(row_bytes / MAX_PART_BYTES))
        is_gathered = max(len(groups), buckets) > FAN_OUT
        tasks = []
        for group, of_group in zip(groups, decisions, strict=True):
            output = run.work / "encoded" / f"{group[0].label}{SUFFIX}"
            arguments = {
                "decisions": of_group, "tokenizer": tokenizer, "begin": facts.begin, "end": facts.end,
                "seed": manifest.seed, "buckets": 1 if is_gathered else buckets, "output": output,
            }  # fmt: skip
            tasks.append(Task.on_slices(group, encode_group, arguments, (output,), sets_aside=max_failed > 0))
        encoded = run.step("encode", tasks)
        buckets_of_parts = _gather(run, encoded, buckets) if is_gathered else _scattered(encoded, buckets)
        order = OrderRecord(len(buckets_of_parts))
        order_path = out_dir / ORDER
        run.step("order", [Task("order", write_order, {"record": order, "path": order_path}, (order_path,))])
        shards = _group_parts(buckets_of_parts, encoded, shard_bytes)
        shards_to_write = _shard_tasks(run, shards, manifest.labels, facts, targets[TRAIN], options)
        shuffled = run.step("shuffle", shards_to_write)
        counts = encoded.counts.merge(shuffled.counts)
        failed = list[FailedDocument]()
        for report in encoded.values(EncodedGroup):
            failed += report.failed
        counts.check_failed(STAGE.name, max_failed, list_failed(run, failed, out_dir), "the tokenizer")
        of_train = [train for train, _ in shuffled.values(list[ShardReport])]
        run.step(f"manifest {TRAIN}", [manifest_task(of_train, tokenizer, facts, targets[TRAIN])])
        held_out = run.step(f"join {HOLDOUT}", _join_tasks(shuffled, shard_bytes, targets[HOLDOUT]))
        of_holdout = held_out.values(ShardReport)
        run.step(f"manifest {HOLDOUT}", [manifest_task(of_holdout, tokenizer, facts, targets[HOLDOUT])])
        counts = run.finish(counts)
    if not options.quiet:
        note_engines_that_differed([report.differed for report in encoded.values(EncodedGroup)])
    return counts


PartRows = tuple[Share, FileSet]  # where the rows of a part are


def _row_bytes(encoded: StepResult) -> int:
    """Return the bytes of the rows that all tasks wrote."""
    return sum(report.row_bytes for report in encoded.values(EncodedGroup))


def _parts_a_bucket(row_bytes: int, buckets: int) -> int:
    """Return how many parts share a bucket: one, or more if parts would be more than twice as large as they should."""
    expected = math.ceil(row_bytes / MAX_PART_BYTES)
    if expected <= 2 * buckets:
        return 1
    return math.ceil(expected / buckets)


def _scattered(encoded: StepResult, buckets: int) -> list[PartRows]:
    """Return where the rows of each part are: in bucket files that hold rows of all parts."""
    parts_a_bucket = _parts_a_bucket(_row_bytes(encoded), buckets)
    parts = buckets * parts_a_bucket
    files = FileSet(tuple(encoded.paths()))
    rows_of_parts = list[PartRows]()
    for part in range(parts):
        share = Share(part, parts, part // parts_a_bucket, parts_a_bucket)
        rows_of_parts.append((share, files))
    return rows_of_parts


def _gather(run: StageRun, encoded: StepResult, buckets: int) -> list[PartRows]:
    """Gather the rows of each part in levels; return where they are: each part has files of its own."""
    row_bytes = _row_bytes(encoded)
    parts = buckets * _parts_a_bucket(row_bytes, buckets)
    folder = run.work / "parts"
    files_a_part = gather(run, encoded.paths(), parts, row_bytes, FAN_OUT, folder, COMPRESSION)
    rows_of_parts = list[PartRows]()
    for part in range(parts):
        paths = tuple(part_path(folder, part, number) for number in range(files_a_part))
        rows_of_parts.append((Share(part, parts), FileSet(paths)))
    return rows_of_parts


def _group_parts(parts: list[PartRows], encoded: StepResult, shard_bytes: int) -> list[list[PartRows]]:
    """Return the parts of each shard: as many as are expected to have at most `shard_bytes`, or one."""
    part_bytes = _UNEVEN * _row_bytes(encoded) / len(parts)
    count = len(parts)
    if part_bytes:
        count = max(1, int(shard_bytes / part_bytes))
    return list(batched(parts, count))


def _shard_tasks(
    run: StageRun, shards: list[list[PartRows]], sources: list[str], facts: TokenizerFacts, train_dir: Path,
    options: RunOptions,
) -> Iterator[Task]:  # fmt: skip
    """Yield the task of each shard of the train set, which also writes a part of the holdout."""
    memory = Budget.of(options.memory_bytes, min(options.processes, len(shards))).share
    for number, parts in enumerate(shards):
        train = shard_files(train_dir / shard_name(number))
        holdout = shard_files(run.work / "holdout" / f"part_{number:05}")
        shares, files = zip(*parts, strict=True)
        arguments = {
            "shares": list(shares), "files": list(files), "sources": sources,
            "dtype": token_dtype(facts.vocab_size).name, "train": train[0], "holdout": holdout[0],
        }  # fmt: skip
        yield Task(f"shard {number}", write_token_shard, arguments, (*train, *holdout), memory=memory)


def _join_tasks(shuffled: StepResult, shard_bytes: int, target: Path) -> Iterator[Task]:
    """Return the tasks that join the parts of the holdout, one of each shard of the train set, into shards."""
    first = len(SHARD_SUFFIXES)  # output of the holdout; the train set's come before
    files = [paths[first:] for paths in shuffled.paths_of_tasks()]
    reports = [holdout for _, holdout in shuffled.values(list[ShardReport])]
    return shard_tasks(files, shuffled.sizes(first), reports, shard_bytes, target)


if __name__ == "__main__":
    command(encode)
