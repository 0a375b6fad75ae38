"""Stage: mix the sources, shuffle all documents in two passes, and hold some out for evaluation.

Pass 1 reads the corpus once: it drops short documents and duplicates, repeats or samples each source by its
weight, and writes every document to a random part's bucket (see mixing/shuffle_buckets.py). Beyond some hundred files
or parts it brings the parts together in levels (mixing/mix.py), so that work grows with the corpus and not with its
square. Pass 2 shuffles each part and splits it into train and holdout. The result is a uniformly random order of all
documents, the same for any number of levels and workers, and any memory.
"""

import hashlib
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip


import tyro
from tyro.conf import Positional

from gristmill.budget import Budget
from gristmill.command import command
from gristmill.console import wide_console
from gristmill.counts import REPEATED, WRITTEN, Counts, warn_of_losses
from gristmill.engine.options import RunOptions
from gristmill.engine.run import open_stage
from gristmill.engine.slices import SliceGroup, cut_corpus, group_slices
from gristmill.engine.staleness.outputs import reject_unknown_files
from gristmill.engine.staleness.records import StepResult
from gristmill.engine.task import Stage, Task
from gristmill.errors import UsageError
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import CORPUS_SUFFIXES, Slice, names_of, paths_of, sources_of
from gristmill.io.files import reject_unfinished
from gristmill.io.tokenizer_file import find_tokenizer_file
from gristmill.paths import absolute
from preprocessing.datasets import shares_table, source_amounts, source_weights
from preprocessing.mixing.drops import DUPLICATE, check_all_found, drops_task, note_provenance
from preprocessing.mixing.keep_list import find_listed_texts
from preprocessing.mixing.mix import find_epochs, gather, mix_outputs, mix_task, write_manifest
from preprocessing.mixing.sampling import check_seed
from preprocessing.mixing.shuffle_buckets import BucketManifest, manifest_path, parts_folder
from preprocessing.mixing.split import (
    SPLIT,
    check_holdout,
    find_limits,
    note_missing_parts,
    reject_other_holdout,
    reject_other_parts,
    split_tasks,
)

OfSources = Annotated[Mapping[str, float] | str, tyro.conf.arg(constructor=str, metavar="TEXT|FILE.toml")]
PASS_1 = Stage("pass1", version=5, libraries=("zstandard", "pyarrow"))
PASS_2 = Stage("pass2", version=1, libraries=("zstandard",))
MIN_PARTS = 20  # SlimPajama's number of buckets, of which pass2 takes some
MAX_PART_BYTES = 128 << 20  # of lines after weights, estimated; twice as many if measured
FAN_OUT = 256  # files that a task opens at once; a corpus of more slices or parts is gathered in levels
_COMPRESSION_RATIO = 4  # assumed for compressed files and tables


def pass1(
    input_dir: Path,
    out_dir: Path,
    duplicates: Path | None = None,
    short_docs: Path | None = None,
    weights: OfSources = "",
    seed: int = 1,
    options: RunOptions = RunOptions(),
    text_column: str = "text",
    *,
    bytes: OfSources = "",
    tokens: OfSources = "",
    tokenizer: Path | None = None,
    keep_list: Path | None = None,
    low_scores: Path | None = None,
) -> Counts:
    """Drop short documents and duplicates, weight the sources, and scatter all documents over random parts.

    Args:
        input_dir: NORM/, the normalised corpus: the folder of all sources.
        out_dir: OUT/pass1, for the intermediate files that pass2 reads.
        duplicates: DUP/duplicates.pickle or .parquet, the duplicates to drop; none are dropped without it.
        short_docs: FILTERED.pickle or .parquet, the short documents to drop; none are dropped without it.
        weights: Epochs of each source: book=2.5,c4=1 (a name with a comma in double quotes: "a,b"=2), or a .toml
            file, or in Python a mapping; the weights in preprocessing/datasets.py are the defaults.
        seed: Seed of all random choices: sampling by weight, parts, order and holdout.
        options: Workers, memory, and when to stop; they change no output.
        text_column: The column or field that holds the text.
        bytes: Instead of weights, bytes of text of each source in the mix: book=2e9,web=8e9, or a file. Epochs are
            computed from the documents that are neither short nor duplicates.
        tokens: Or tokens of each source, without the tokens that begin and end documents.
        tokenizer: The tokenizer that counts them, as tokenize_corpus takes it.
        keep_list: File of lines `keep KEY` and `drop KEY`, as gristmill browse writes them, and `drop sha256:DIGEST`,
            as gristmill trace shows them: a document to keep is not dropped as short or duplicate, a document to drop
            always is, and so is each with a text to drop.
        low_scores: Documents to drop whose scores are too low, .pickle or .parquet, as choose_by_score lists them.

    Returns:
        Documents read, written, repeated and dropped, per source and reason. Fewer may be dropped as duplicates than
        are listed: one that is short, too, counts as short, and one that replaces a kept document which is short, or of
        a source with weight 0, is written.
    """
    check_seed(seed)
    files = list_corpus(input_dir, text_column=text_column)
    sources = sources_of(files)
    amounts = source_amounts(bytes, tokens, tokenizer and find_tokenizer_file(tokenizer), weights, sources)
    source_weight = source_weights(weights, sources)
    stage = PASS_1
    if amounts.tokenizer:
        library = "sentencepiece" if amounts.tokenizer.suffix == ".model" else "tokenizers"
        stage = replace(stage, libraries=(*stage.libraries, library))
    with open_stage(stage, out_dir, options, reads={input_dir: paths_of(files)}, publishes=[out_dir]) as run:
        slices = cut_corpus(run, files)
        groups = group_slices(slices)
        reject_unknown_files(out_dir, (), CORPUS_SUFFIXES, run.ledger)
        drops = dict[tuple[str, ...], Path]()
        for group in groups:
            drops[names_of(group)] = run.work / "drops" / f"{group[0].name}.npz"
        absent = tuple(sorted(source for source, weight in source_weight.items() if not weight))
        listed = find_listed_texts(run, keep_list, groups)
        split = drops_task(drops, duplicates, short_docs, absent, keep_list, options, low_scores, listed)
        dropped = run.step("drops", [split])
        ((named, both, is_of_others),) = dropped.values(tuple[int, int, bool])
        note_provenance(duplicates, is_of_others, options)
        source_weight, epochs = find_epochs(run, source_weight, amounts, groups, drops, seed, FAN_OUT)
        text_bytes = sum(_text_bytes(part) * source_weight[part.source] for part in slices)
        buckets = max(MIN_PARTS, math.ceil(text_bytes / MAX_PART_BYTES))
        is_gathered = max(len(groups), buckets) > FAN_OUT
        folder = run.work / "mixed" if is_gathered else out_dir
        written_to = dict[SliceGroup, tuple[Path, Path]]()
        tasks = list[Task]()
        for group in groups:
            outputs = mix_outputs(group, folder, out_dir)
            source_epochs = epochs[group[0].source]
            buckets_of_task = 1 if is_gathered else buckets
            tasks.append(mix_task(group, drops[names_of(group)], source_epochs, buckets_of_task, seed, outputs))
            written_to[group] = outputs
        mixed = run.step("mix", tasks)
        check_all_found(mixed.counts, named, filter(None, (duplicates, short_docs, low_scores, keep_list)))
        manifest = _describe(mixed, written_to, buckets, seed, source_weight, out_dir)
        bucket_files = [bucket for bucket, _ in written_to.values()]
        if is_gathered:
            line_bytes = sum(mixed.values(int))
            manifest.files_a_part = gather(
                run, bucket_files, manifest.parts, line_bytes, FAN_OUT, parts_folder(out_dir)
            )
        else:
            manifest.bucket_files = [_name(path, out_dir) for path in bucket_files]
            manifest.buckets = buckets
        arguments = {"manifest": manifest, "path": manifest_path(out_dir)}
        run.step("manifest", [Task("manifest", write_manifest, arguments, (manifest_path(out_dir),))])
        counts = run.finish(mixed.counts)
        if both and run.ran and not options.quiet:
            kinds = "short or low-scored" if low_scores else "short"
            print(f"note: {both:,} of the {kinds} documents are duplicates, too, and count as {kinds}", file=sys.stderr)
    if not options.quiet:
        wide_console().print(shares_table(source_weight, counts, amounts))
    if run.ran and not (options.quiet or options.of_run):  # a run says it with its own limits
        for line in warn_of_losses(counts, DUPLICATE).values():
            print(f"warning: {line}", file=sys.stderr)
    return counts


def _text_bytes(part: Slice) -> int:
    """Return the bytes of text in a slice, estimated from its size on disk."""
    if part.name.endswith(".jsonl"):
        return part.size
    return part.size * _COMPRESSION_RATIO


def _describe(
    mixed: StepResult,
    written_to: dict[SliceGroup, tuple[Path, Path]],
    buckets: int,
    seed: int,
    weights: dict[str, float],
    out_dir: Path,
) -> BucketManifest:
    """Return the manifest, without the bucket files. `written_to` has the outputs of each group.

    There is one part a bucket, or more if the corpus has far more bytes than its compressed files let expect.
    """
    expected = math.ceil(sum(mixed.values(int)) / MAX_PART_BYTES)
    parts_a_bucket = math.ceil(expected / buckets) if expected > 2 * buckets else 1
    documents = dict[str, int]()
    for source in weights:
        copies = mixed.counts.total(WRITTEN, source).documents
        documents[source] = copies - mixed.counts.total(REPEATED, source).documents
    content = hashlib.sha256()
    hashes = list[str]()
    for record in mixed.records:
        hashes += [output.sha256 for output in record.outputs]
    content.update("\n".join(hashes).encode())
    holdout_files = dict[str, str]()
    for group, (_, holdout_numbers) in written_to.items():
        holdout_files[_name(holdout_numbers, out_dir)] = group[0].source
    return BucketManifest(
        parts=buckets * parts_a_bucket,
        seed=seed,
        weights=weights,
        documents=documents,
        content=content.hexdigest(),
        holdout_files=holdout_files,
    )


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def pass2(
    start: Positional[int],
    end: Positional[int],
    chunk: Positional[int],
    input_dir: Path,
    train_dir: Path,
    holdout_dir: Path,
    holdout: float = 0.0017,
    options: RunOptions = RunOptions(),
) -> Counts:
    """Shuffle a share of the parts, from start to end twentieths, and split it into train and holdout.

    Writes to the folder chunk<chunk> of each. As in SlimPajama, a corpus has 20 parts, of which this takes start ≤ i <
    end; a larger corpus has more, and 0 to 20 takes them all. The holdout is an exact fraction of each source's
    documents, and at least one document of each source with two or more.

    Args:
        start: First twentieth of the parts.
        end: Twentieth after the last part; may exceed 20.
        chunk: Number of the output folders, chunk<number>.
        input_dir: OUT/pass1, which pass1 wrote.
        train_dir: OUT/train, the train set to write.
        holdout_dir: OUT/holdout, the documents held out for evaluation.
        holdout: Fraction of each source's documents to hold out; SlimPajama's is 0.17 %.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read, written to train and held out, per source.
    """
    check_holdout(holdout)
    _reject_nested(train_dir, holdout_dir)
    manifest = BucketManifest.load(manifest_path(input_dir))
    reject_unfinished(input_dir)
    if not 0 <= start < min(end, MIN_PARTS):
        raise UsageError(
            f"pass2 {start} {end}: expected 0 ≤ start < end, in twentieths of the {manifest.parts} parts that pass1 "
            f"made: 0 {MIN_PARTS} for all, or 0 {MIN_PARTS // 2} and {MIN_PARTS // 2} {MIN_PARTS} for two chunks"
        )
    holdout_dir = absolute(holdout_dir)
    parts = range(_part_at(start, manifest.parts), _part_at(end, manifest.parts))
    outputs = dict[int, tuple[Path, Path]]()
    for part in parts:
        outputs[part] = _outputs(part, train_dir / f"chunk{chunk}", holdout_dir / f"chunk{chunk}")
    is_whole = len(parts) == manifest.parts
    with open_stage(
        PASS_2, train_dir, options, reads={input_dir: [manifest_path(input_dir)]},
        publishes=[train_dir, holdout_dir], part="" if is_whole else f"chunk{chunk}/{start}-{end}",
    ) as run:  # fmt: skip
        run.tag(manifest_path(input_dir))  # was read above
        reject_other_holdout(run, train_dir, holdout_dir)
        for folder in (train_dir, holdout_dir):
            reject_unknown_files(folder, chain.from_iterable(outputs.values()), CORPUS_SUFFIXES, run.ledger)
        if not is_whole:
            reject_other_parts(run, parts, manifest.parts, absolute(train_dir / f"chunk{chunk}"))
        share = Budget.of(options.memory_bytes, min(options.processes, len(parts))).share
        limits = find_limits(run, input_dir, manifest, holdout, FAN_OUT)
        split = run.step(SPLIT, split_tasks(input_dir, manifest, limits, outputs, share))
        counts = run.finish(split.counts)
    if not options.quiet:
        note_missing_parts(run, manifest.parts)
    return counts


def _part_at(twentieths: int, parts: int) -> int:
    """Return the first part that begins at so many twentieths of all, or after."""
    return math.ceil(min(twentieths, MIN_PARTS) * parts / MIN_PARTS)


def _reject_nested(train_dir: Path, holdout_dir: Path) -> None:
    for inner, outer in ((train_dir, holdout_dir), (holdout_dir, train_dir)):
        if inner.resolve().is_relative_to(outer.resolve()):
            raise UsageError(
                f"--train_dir {train_dir} --holdout_dir {holdout_dir}: one contains the other, so stages that read it "
                "would read both: give two separate folders"
            )


def _outputs(part: int, train_dir: Path, holdout_dir: Path) -> tuple[Path, Path]:
    return train_dir / f"example_train_{part}.jsonl.zst", holdout_dir / f"example_holdout_{part}.jsonl.zst"


if __name__ == "__main__":
    command(pass1, pass2)
