"""Stage: mix the sources, shuffle all documents in two passes, and hold some out for evaluation.

Pass 1 reads the corpus once: it drops short documents and duplicates, repeats or samples each source by its
weight, and writes every document to a random part (to that part's bucket; see mixing/shuffle_buckets.py).
Pass 2 shuffles each part in memory and splits it into train and holdout. The result is a uniformly random
order of all documents, the same for any number of workers.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import tyro
from tyro.conf import Positional

from gristmill.command import command, wide_console
from gristmill.counts import Counts
from gristmill.engine.stage import (
    STATE_DIR,
    RunOptions,
    Task,
    outputs_of,
    reject_overlapping_folders,
    reject_unknown_files,
    run_stage,
)
from gristmill.errors import UsageError
from gristmill.io.documents import CORPUS_SUFFIXES, list_corpus
from gristmill.io.readers import Slice, plan_slices
from preprocessing.datasets import shares_table, source_weights
from preprocessing.mixing.drops import check_all_found, write_drops
from preprocessing.mixing.mix import (
    holdout_limits,
    mix_slice,
    source_epochs,
    split_part,
    write_manifest,
    write_weight_numbers,
)
from preprocessing.mixing.sampling import SourceEpochs, check_seed
from preprocessing.mixing.shuffle_buckets import SUFFIX, BucketManifest, index_path, manifest_path

PASS_1 = "pass1"
PASS_2 = "pass2"
MIN_PARTS = 20  # SlimPajama's number
MAX_PART_BYTES = 128 << 20  # of text, estimated: pass 2 holds a part in memory
_COMPRESSION_RATIO = 4  # assumed for compressed files and tables


def pass1(
    input_dir: Path,
    out_dir: Path,
    duplicates: Path | None = None,
    short_docs: Path | None = None,
    weights: Annotated[Mapping[str, float] | str, tyro.conf.arg(constructor=str, metavar="TEXT|FILE.toml")] = "",
    seed: int = 1,
    options: RunOptions = RunOptions(),
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

    Returns:
        Documents read, written, repeated and dropped, per source and reason.
    """
    check_seed(seed)
    files = list_corpus(input_dir)
    reject_overlapping_folders(input_dir, out_dir)
    slices = [s for file in files for s in plan_slices(file)]
    source_weight = source_weights(weights, {file.source for file in files})
    state = out_dir / STATE_DIR
    drops = {file.name: state / "drops" / f"{file.name}.npz" for file in files}
    _run_drops(drops, duplicates, short_docs, state, options)
    epochs = _run_sampling(source_weight, slices, drops, seed, state, options)
    parts = max(MIN_PARTS, math.ceil(sum(map(_text_bytes, slices)) / MAX_PART_BYTES))
    tasks = [_mix_task(s, drops[s.name], epochs[s.source], parts, seed, out_dir) for s in slices]
    reject_unknown_files(out_dir, outputs_of(tasks), CORPUS_SUFFIXES, state / f"{PASS_1}.jsonl")
    counts = run_stage(PASS_1, tasks, state, options)
    check_all_found(counts, drops.values(), tuple(path for path in (duplicates, short_docs) if path))
    bucket_files = {f"{s.label}{SUFFIX}": s.source for s in slices}
    _run_manifest(tasks, BucketManifest(parts, seed, bucket_files, source_weight), out_dir, options)
    if not options.quiet:
        wide_console().print(shares_table(source_weight, counts))
    return counts


def _run_drops(
    drops: dict[str, Path], duplicates: Path | None, short_docs: Path | None, state: Path, options: RunOptions
) -> None:
    """Run the step that splits both key sets by corpus file; `drops` maps each file to its output."""
    provenance = duplicates and duplicates.with_suffix(".parquet")
    inputs = tuple(dict.fromkeys(path for path in (duplicates, short_docs, provenance) if path and path.is_file()))
    if provenance and not provenance.is_file() and not options.quiet:
        print(
            f"note: there is no {provenance} to say which document of each cluster was kept: where that one is short, "
            "the whole cluster is dropped (generate_duplicates_dict writes this table)",
            file=sys.stderr,
        )
    arguments = {
        "duplicates": duplicates, "short_docs": short_docs, "files": list(drops), "outputs": list(drops.values()),
    }  # fmt: skip
    task = Task("drops", write_drops, arguments, inputs, tuple(drops.values()))
    run_stage(f"{PASS_1}-drops", [task], state, options, summary=False)


def _run_sampling(
    weights: dict[str, float], slices: list[Slice], drops: dict[str, Path], seed: int, state: Path, options: RunOptions
) -> dict[str, SourceEpochs]:
    """Turn weights into epochs; sources with a fractional weight are read once to sample an exact fraction."""
    tasks: dict[str, list[Task]] = defaultdict(list)
    for corpus_slice in slices:
        if weights[corpus_slice.source] % 1:
            tasks[corpus_slice.source].append(_sampling_task(corpus_slice, drops[corpus_slice.name], seed, state))
    if tasks:
        run_stage(f"{PASS_1} sampling", [task for of_source in tasks.values() for task in of_source], state, options)
    return {source: source_epochs(weight, outputs_of(tasks[source])) for source, weight in weights.items()}


def _sampling_task(corpus_slice: Slice, drops: Path, seed: int, state: Path) -> Task:
    output = state / "sampling" / f"{corpus_slice.label}.npy"
    arguments = {"corpus_slice": corpus_slice, "drops": drops, "seed": seed, "output": output}
    inputs = (Path(corpus_slice.path), drops)
    return Task(corpus_slice.label, write_weight_numbers, arguments, inputs, (output,), corpus_slice.size)


def _text_bytes(corpus_slice: Slice) -> int:
    """Bytes of text in a slice, estimated from its size on disk."""
    return corpus_slice.size * (1 if corpus_slice.name.endswith(".jsonl") else _COMPRESSION_RATIO)


def _mix_task(corpus_slice: Slice, drops: Path, epochs: SourceEpochs, parts: int, seed: int, out_dir: Path) -> Task:
    output = out_dir / f"{corpus_slice.label}{SUFFIX}"
    arguments = {
        "corpus_slice": corpus_slice, "drops": drops, "epochs": epochs, "parts": parts, "seed": seed, "output": output,
    }  # fmt: skip
    inputs, outputs = (Path(corpus_slice.path), drops), (output, index_path(output))
    return Task(corpus_slice.label, mix_slice, arguments, inputs, outputs, corpus_slice.size)


def _run_manifest(tasks: list[Task], manifest: BucketManifest, out_dir: Path, options: RunOptions) -> None:
    """Run the step that writes pass1.json, after the indexes of all bucket files."""
    indexes = tuple(task.outputs[1] for task in tasks)
    arguments = {"manifest": manifest, "folder": out_dir}
    task = Task("manifest", write_manifest, arguments, indexes, (manifest_path(out_dir),))
    run_stage(f"{PASS_1}-manifest", [task], out_dir / STATE_DIR, options, summary=False)


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
    manifest = BucketManifest.load(input_dir)
    if not 0 <= start < min(end, manifest.parts):
        raise UsageError(f"parts {start} to {end}: pass1 made {manifest.parts} parts: wanted 0 ≤ start < end")
    if train_dir.resolve() == holdout_dir.resolve():
        raise UsageError(f"--train_dir and --holdout_dir are both {train_dir}: wanted two folders")
    limits = holdout_limits(input_dir, manifest, holdout)
    tasks = [
        _split_task(part, input_dir, limits, train_dir / f"chunk{chunk}", holdout_dir / f"chunk{chunk}")
        for part in range(start, min(end, manifest.parts))
    ]
    ledger = train_dir / STATE_DIR / f"{PASS_2}.jsonl"
    for folder in (train_dir, holdout_dir):
        reject_unknown_files(folder, outputs_of(tasks), CORPUS_SUFFIXES, ledger)
    is_all = start == 0 and end >= manifest.parts
    return run_stage(PASS_2, tasks, train_dir / STATE_DIR, options, stale_prefix="" if is_all else None)


def check_holdout(fraction: float) -> None:
    """Raise UsageError for a fraction below 0, of 1 or more, or nan."""
    if not 0 <= fraction < 1:
        raise UsageError(f"--holdout {fraction}: wanted a fraction of 0 or more and less than 1, such as 0.0017")


def _split_task(part: int, input_dir: Path, limits: dict[str, int], train_dir: Path, holdout_dir: Path) -> Task:
    train, holdout = train_dir / f"example_train_{part}.jsonl.zst", holdout_dir / f"example_holdout_{part}.jsonl.zst"
    arguments = {"part": part, "input_dir": input_dir, "limits": limits, "train": train, "holdout": holdout}
    return Task(f"part {part}", split_part, arguments, (manifest_path(input_dir),), (train, holdout))


if __name__ == "__main__":
    command(pass1, pass2)
