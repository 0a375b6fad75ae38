"""Stage: mix the sources, shuffle all documents in two passes, and hold some out for evaluation.

Pass 1 reads the corpus once: it drops short documents and duplicates, repeats or samples each source by its
weight, and writes every document to a random part (to that part's bucket; see mixing/shuffle_buckets.py).
Pass 2 shuffles each part in memory and splits it into train and holdout. The result is a uniformly random
order of all documents, the same for any number of workers.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import tyro
from tyro.conf import Positional

from gristmill.command import command, wide_console
from gristmill.counts import Counts
from gristmill.engine.claims import reject_overlapping_folders, reject_unknown_files
from gristmill.engine.options import RunOptions
from gristmill.engine.run import StageRun, open_stage
from gristmill.engine.slices import SliceGroup, cut_corpus, group_slices
from gristmill.engine.task import FileSet, Stage, Task
from gristmill.errors import UsageError
from gristmill.io.documents import CORPUS_SUFFIXES, list_corpus
from gristmill.io.files import reject_unfinished
from gristmill.io.readers import Slice
from preprocessing.datasets import shares_table, source_weights
from preprocessing.mixing.chunks import SPLIT, mark_outdated_chunks, reject_other_parts
from preprocessing.mixing.drops import check_all_found, write_drops
from preprocessing.mixing.mix import (
    files_of,
    find_epochs,
    find_holdout_limit,
    mix_group,
    split_part,
    write_manifest,
    write_weight_numbers,
)
from preprocessing.mixing.sampling import SourceEpochs, check_seed
from preprocessing.mixing.shuffle_buckets import SUFFIX, BucketManifest, index_path, manifest_path

PASS_1 = Stage("pass1", version=1, libraries=("zstandard", "pyarrow"))
PASS_2 = Stage("pass2", version=1, libraries=("zstandard",))
MIN_PARTS = 20  # SlimPajama's number
MAX_PART_BYTES = 128 << 20  # of text after weights, estimated: pass 2 holds a part in memory
_COMPRESSION_RATIO = 4  # assumed for compressed files and tables


def pass1(
    input_dir: Path,
    out_dir: Path,
    duplicates: Path | None = None,
    short_docs: Path | None = None,
    weights: Annotated[Mapping[str, float] | str, tyro.conf.arg(constructor=str, metavar="TEXT|FILE.toml")] = "",
    seed: int = 1,
    options: RunOptions = RunOptions(),
    text_column: str = "text",
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

    Returns:
        Documents read, written, repeated and dropped, per source and reason.
    """
    check_seed(seed)
    files = list_corpus(input_dir, text_column=text_column)
    reject_overlapping_folders(input_dir, out_dir)
    source_weight = source_weights(weights, {file.source for file in files})
    _note_provenance(duplicates, options)
    with open_stage(PASS_1, out_dir, options, reads=[input_dir], publishes=[out_dir]) as run:
        slices = cut_corpus(run, files)
        groups = group_slices(slices)
        text_bytes = sum(_text_bytes(part) * source_weight[part.source] for part in slices)
        parts = max(MIN_PARTS, math.ceil(text_bytes / MAX_PART_BYTES))
        buckets = {group: out_dir / f"{group[0].label}{SUFFIX}" for group in groups}
        reject_unknown_files(out_dir, buckets.values(), CORPUS_SUFFIXES, run.ledger)
        drops = {files_of(group): run.work / "drops" / f"{group[0].name}.npz" for group in groups}
        dropped = run.step("drops", [_drops_task(drops, duplicates, short_docs, options)])
        epochs = _find_epochs(run, source_weight, groups, drops, seed)
        mixed = run.step("mix", [
            _mix_task(group, drops[files_of(group)], epochs[group[0].source], parts, seed, bucket)
            for group, bucket in buckets.items()
        ])  # fmt: skip
        check_all_found(mixed.counts, dropped.values(int)[0], filter(None, (duplicates, short_docs)))
        names = {bucket.relative_to(out_dir).as_posix(): group[0].source for group, bucket in buckets.items()}
        manifest = {"manifest": BucketManifest(parts, seed, names, source_weight), "path": manifest_path(out_dir)}
        run.step("manifest", [Task("manifest", write_manifest, manifest, (manifest_path(out_dir),))])
        counts = run.finish(mixed.counts)
    if not options.quiet:
        wide_console().print(shares_table(source_weight, counts))
    return counts


def _note_provenance(duplicates: Path | None, options: RunOptions) -> None:
    if duplicates and not _provenance(duplicates) and not options.quiet:
        print(
            f"note: there is no {duplicates.with_suffix('.parquet')} to say which document of each cluster was kept: "
            "where that one is short, the whole cluster is dropped (generate_duplicates_dict writes this table)",
            file=sys.stderr,
        )


def _provenance(duplicates: Path) -> Path | None:
    """The table of which document was kept in place of each duplicate: the .parquet file of the same name."""
    table = duplicates.with_suffix(".parquet")
    return table if table.is_file() else None


def _drops_task(
    drops: dict[tuple[str, ...], Path], duplicates: Path | None, short_docs: Path | None, options: RunOptions
) -> Task:
    """The task that splits both key sets by groups of corpus files; `drops` maps each group to its output."""
    outputs = list(drops.values())
    arguments = {
        "duplicates": duplicates, "provenance": duplicates and _provenance(duplicates), "short_docs": short_docs,
        "groups": list(drops), "outputs": outputs,
    }  # fmt: skip
    return Task("drops", write_drops, arguments, tuple(outputs), memory=options.memory_bytes)


def _find_epochs(
    run: StageRun,
    weights: dict[str, float],
    groups: Sequence[SliceGroup],
    drops: dict[tuple[str, ...], Path],
    seed: int,
) -> dict[str, SourceEpochs]:
    """Turn weights into epochs; sources with a fractional weight are read once to sample an exact fraction."""
    numbers: dict[str, list[Path]] = {source: [] for source in weights}
    tasks = []
    for group in groups:
        if weights[group[0].source] % 1:
            output = run.work / "sampling" / f"{group[0].label}.npy"
            arguments = {"group": group, "drops": drops[files_of(group)], "seed": seed, "output": output}
            tasks.append(Task(group[0].label, write_weight_numbers, arguments, (output,), _bytes(group)))
            numbers[group[0].source].append(output)
    run.step("sampling", tasks)
    step = run.step("epochs", [
        Task(source, find_epochs, {"weight": weight, "weight_numbers": FileSet(tuple(numbers[source]))})
        for source, weight in weights.items()
    ])  # fmt: skip
    return dict(zip(weights, step.values(SourceEpochs), strict=True))


def _text_bytes(part: Slice) -> int:
    """Bytes of text in a slice, estimated from its size on disk."""
    return part.size * (1 if part.name.endswith(".jsonl") else _COMPRESSION_RATIO)


def _mix_task(group: SliceGroup, drops: Path, epochs: SourceEpochs, parts: int, seed: int, bucket: Path) -> Task:
    outputs = bucket, index_path(bucket)
    arguments = {
        "group": group, "drops": drops, "epochs": epochs, "parts": parts, "seed": seed,
        "output": bucket, "index": outputs[1],
    }  # fmt: skip
    return Task(group[0].label, mix_group, arguments, outputs, _bytes(group))


def _bytes(group: SliceGroup) -> int:
    return sum(part.size for part in group)


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
    """Shuffle the parts start ≤ i < end and split them into train and holdout, in the folder chunk<chunk> of each.

    The holdout is an exact fraction of each source's documents, and at least one of a source with
    two or more, so that no source is left out.

    Args:
        start: First part.
        end: Part after the last one; may exceed the number of parts, which is 20, or more for a large corpus.
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
    for source, target in ((input_dir, train_dir), (input_dir, holdout_dir)):
        reject_overlapping_folders(source, target)
    _reject_nested(train_dir, holdout_dir)
    manifest = BucketManifest.load(manifest_path(input_dir))
    reject_unfinished(input_dir)
    if not 0 <= start < min(end, manifest.parts):
        raise UsageError(f"parts {start} to {end}: pass1 made {manifest.parts} parts: wanted 0 ≤ start < end")
    parts = range(start, min(end, manifest.parts))
    outputs = {part: _outputs(part, train_dir / f"chunk{chunk}", holdout_dir / f"chunk{chunk}") for part in parts}
    plans = "" if len(parts) == manifest.parts else "its own parts"  # no task's name: a part may move to this chunk
    with open_stage(
        PASS_2, train_dir, options, selection=f"/chunk{chunk}", plans=plans,
        reads=[input_dir], publishes=[train_dir, holdout_dir], is_alone=True,  # a part may move to another chunk
    ) as run:  # fmt: skip
        for folder in (train_dir, holdout_dir):
            reject_unknown_files(
                folder, (path for pair in outputs.values() for path in pair), CORPUS_SUFFIXES, run.ledger
            )
        if len(parts) < manifest.parts:
            reject_other_parts(run, manifest.parts, (train_dir, holdout_dir))
        limits = _find_limits(run, input_dir, manifest, holdout)
        buckets = [input_dir / name for name in manifest.bucket_files]
        shared = {
            "manifest": manifest_path(input_dir), "bucket_files": FileSet(tuple(buckets)),
            "indexes": FileSet(tuple(map(index_path, buckets))), "limits": limits,
        }  # fmt: skip
        split = run.step(SPLIT, [
            Task(f"part {part}", split_part, {"part": part, **shared, "train": train, "holdout": held}, (train, held))
            for part, (train, held) in outputs.items()
        ])  # fmt: skip
        with mark_outdated_chunks(run, split, (train_dir, holdout_dir)):
            return run.finish(split.counts)


def _reject_nested(train_dir: Path, holdout_dir: Path) -> None:
    for inner, outer in ((train_dir, holdout_dir), (holdout_dir, train_dir)):
        if inner.resolve().is_relative_to(outer.resolve()):
            raise UsageError(
                f"--train_dir {train_dir} --holdout_dir {holdout_dir}: one lies in the other, and stages that read it "
                "would read both: wanted two folders apart"
            )


def _outputs(part: int, train_dir: Path, holdout_dir: Path) -> tuple[Path, Path]:
    return train_dir / f"example_train_{part}.jsonl.zst", holdout_dir / f"example_holdout_{part}.jsonl.zst"


def _find_limits(run: StageRun, input_dir: Path, manifest: BucketManifest, fraction: float) -> dict[str, int]:
    """The largest holdout number that is held out of each source."""
    indexes: dict[str, list[Path]] = defaultdict(list)
    for name, source in manifest.bucket_files.items():
        indexes[source].append(index_path(input_dir / name))
    step = run.step("limits", [
        Task(source, find_holdout_limit, {"indexes": FileSet(tuple(paths)), "fraction": fraction})
        for source, paths in indexes.items()
    ])  # fmt: skip
    return dict(zip(indexes, step.values(int), strict=True))


def check_holdout(fraction: float) -> None:
    """Raise UsageError for a fraction below 0, of 1 or more, or nan."""
    if not 0 <= fraction < 1:
        raise UsageError(f"--holdout {fraction}: wanted a fraction of 0 or more and less than 1, such as 0.0017")


if __name__ == "__main__":
    command(pass1, pass2)
