"""Stage: mix and shuffle in two passes, and hold documents out for evaluation.

Pass 1 reads the corpus once and scatters every document that goes on over parts, by a draw from
its key; pass 2 sorts each part in memory by another draw and splits it. The result is a uniformly
random order of the whole, whatever was done by which process when.
"""

import math
import sys
from collections.abc import Iterable
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import msgspec
import numpy as np
from tyro.conf import Positional

from gristmill.command import command, wide_console
from gristmill.counts import READ, WRITTEN, Counts
from gristmill.engine.stage import (
    STATE_DIR,
    RunOptions,
    Task,
    outputs_of,
    reject_overlapping_folders,
    reject_unknown_files,
    run_stage,
)
from gristmill.errors import InputError, UsageError
from gristmill.io.documents import SUFFIXES, list_corpus
from gristmill.io.files import atomic_write_bytes
from gristmill.io.readers import Slice, plan_slices
from gristmill.io.writers import open_jsonl_writer
from preprocessing.datasets import shares, source_weights
from preprocessing.mixing.mix import (
    DUPLICATE,
    SHORT,
    Drops,
    PassOne,
    Share,
    group_by_source,
    mix_slice,
    survey_slice,
    write_drops,
)
from preprocessing.mixing.sampling import NEVER, smallest
from preprocessing.mixing.shuffle_buckets import SUFFIX, Pile, index_path, open_pile

HELD_OUT = "holdout"
PASS_1 = "pass1"
PASS_2 = "pass2"
FEWEST_PARTS = 20  # SlimPajama's number
PART_BYTES = 128 << 20  # more parts where they would be larger: pass 2 holds one in memory
_COMPRESSION = 4  # how much smaller compressed text is taken to be


def pass1(
    input_dir: Path,
    out_dir: Path,
    duplicates: Path | None = None,
    short_docs: Path | None = None,
    weights: str = "",
    seed: int = 1,
    options: RunOptions = RunOptions(),
) -> Counts:
    """Drop short documents and duplicates, weigh the sources, and scatter the rest over the parts of pass 2.

    Args:
        input_dir: NORM/, the normalised corpus: the folder of all sources.
        out_dir: OUT/pass1.
        duplicates: DUP/duplicates.pickle or .parquet; nothing is dropped as a duplicate without it.
        short_docs: FILTERED.pickle or .parquet; nothing is dropped as short without it.
        weights: Epochs per source, book=2.5,c4=1 or a .toml file; otherwise as preprocessing/datasets.py says.
        seed: Seed of every draw: weights, parts, order and holdout.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read, written, repeated and dropped, per source and reason.
    """
    files = list_corpus(input_dir)
    reject_overlapping_folders(input_dir, out_dir)
    slices = [part for file in files for part in plan_slices(file)]
    epochs = source_weights(weights, {file.source for file in files})
    state = out_dir / STATE_DIR
    drops = {file.name: state / "drops" / f"{file.name}.npz" for file in files}
    _divide_drops(drops, duplicates, short_docs, state, options)
    sets = tuple(path for path in (duplicates, short_docs) if path)
    chosen = _choose_shares(epochs, slices, drops, seed, state, options)
    parts = max(FEWEST_PARTS, math.ceil(sum(_text_size(part) for part in slices) / PART_BYTES))
    tasks = [
        _mix_task(part, drops[part.name], chosen[part.source], parts, seed, out_dir / f"{part.label}{SUFFIX}")
        for part in slices
    ]
    reject_unknown_files(out_dir, outputs_of(tasks), SUFFIXES, state / f"{PASS_1}.jsonl")
    counts = run_stage(PASS_1, tasks, state, options)
    _check_dropped(counts, drops.values(), sets)
    _write_head(tasks, PassOne(parts, seed, {}, epochs), out_dir, options)
    if not options.quiet:
        wide_console().print(shares(epochs, counts))
    return counts


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
    """Shuffle the parts start ≤ i < end and split them, into the folder chunk<chunk> of train and holdout.

    The holdout is an exact fraction of each source's documents, and at least one of a source with
    two or more, so that no source is left out.

    Args:
        start: The first part.
        end: The first part not to take; past the end means all. Pass 1 makes 20 parts, or more of a large corpus.
        chunk: Number of the folder to write to.
        input_dir: OUT/pass1.
        train_dir: OUT/train.
        holdout_dir: OUT/holdout.
        holdout: Fraction of each source's documents to hold out; SlimPajama's is 0.17 %.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read, written to train and held out, per source.
    """
    head = _read_head(input_dir)
    if not 0 <= start < min(end, head.parts):
        raise UsageError(f"parts {start} to {end}: pass1 made {head.parts} parts: wanted 0 ≤ start < end")
    if not 0 <= holdout < 1:
        raise UsageError(f"--holdout {holdout}: wanted a fraction of 0 or more and less than 1, such as 0.0017")
    if train_dir.resolve() == holdout_dir.resolve():
        raise UsageError(f"--train_dir and --holdout_dir are both {train_dir}: wanted two folders")
    limits = _holdout_limits(input_dir, head, holdout)
    tasks = []
    for part in range(start, min(end, head.parts)):
        train = train_dir / f"chunk{chunk}" / f"example_train_{part}.jsonl.zst"
        held = holdout_dir / f"chunk{chunk}" / f"example_holdout_{part}.jsonl.zst"
        arguments = {"part": part, "input_dir": input_dir, "limits": limits, "train": train, "held": held}
        tasks.append(Task(f"part {part}", split_part, arguments, (_head_path(input_dir),), (train, held)))
    ledger = train_dir / STATE_DIR / f"{PASS_2}.jsonl"
    for folder in (train_dir, holdout_dir):
        reject_unknown_files(folder, outputs_of(tasks), SUFFIXES, ledger)
    is_all = start == 0 and end >= head.parts
    return run_stage(PASS_2, tasks, train_dir / STATE_DIR, options, stale_prefix="" if is_all else None)


def split_part(part: int, input_dir: Path, limits: dict[str, int], train: Path, held: Path) -> Counts:
    """Shuffle one part of all piles, and write its documents to train or holdout."""
    counts = Counts({}, [])
    members = []
    for name, source in _read_head(input_dir).piles.items():
        pile = open_pile(input_dir / name)
        for line, i in pile.read_part(part):
            is_held = pile.holdout[i] != NEVER and int(pile.holdout[i]) <= limits.get(source, -1)
            members.append((int(pile.order[i]), source, line, is_held, int(pile.size[i])))
    members.sort(key=lambda member: member[:3])
    with open_jsonl_writer(train) as train_lines, open_jsonl_writer(held) as held_lines:
        for _, source, line, is_held, size in members:
            (held_lines if is_held else train_lines).write(line)
            counts.add(source, READ, size)
            counts.add(source, HELD_OUT if is_held else WRITTEN, size)
    return counts


def write_head(out_dir: Path, piles: list[Path], head: PassOne) -> Counts:
    """Write pass1.json, the list of piles and where each comes from."""
    for path in piles:
        name = path.relative_to(out_dir).as_posix()
        head.piles[name] = Slice("", name).source
    atomic_write_bytes(_head_path(out_dir), msgspec.json.format(msgspec.json.encode(head), indent=2) + b"\n")
    return Counts({}, [])


def _divide_drops(
    drops: dict[str, Path], duplicates: Path | None, short_docs: Path | None, state: Path, options: RunOptions
) -> None:
    sets = [duplicates, short_docs, duplicates and duplicates.with_suffix(".parquet")]
    inputs = tuple(dict.fromkeys(path for path in sets if path and path.is_file()))
    if duplicates and not duplicates.with_suffix(".parquet").is_file() and not options.quiet:
        print(
            f"note: no {duplicates.with_suffix('.parquet')} says which documents were kept for these duplicates: where "
            "the kept one is short, its whole cluster is dropped (generate_duplicates_dict writes that table)",
            file=sys.stderr,
        )
    arguments = {
        "duplicates": duplicates, "short_docs": short_docs, "files": list(drops), "outputs": list(drops.values()),
    }  # fmt: skip
    task = Task("drops", write_drops, arguments, inputs, tuple(drops.values()))
    run_stage(f"{PASS_1}-drops", [task], state, options, summary=False)


def _choose_shares(
    weights: dict[str, float], slices: list[Slice], drops: dict[str, Path], seed: int, state: Path, options: RunOptions
) -> dict[str, Share]:
    """Turn weights into shares: for a fraction, find the draw up to which exactly that many documents lie."""
    surveys = {
        source: [_survey_task(part, drops[part.name], seed, state) for part in parts]
        for source, parts in group_by_source(slices).items()
        if weights[source] % 1
    }
    tasks = [task for some in surveys.values() for task in some]
    if tasks:
        run_stage(f"{PASS_1} survey", tasks, state, options)
    limits = {source: _threshold(outputs_of(some), weights[source] % 1) for source, some in surveys.items()}
    return {source: Share(math.floor(weight), limits.get(source)) for source, weight in weights.items()}


def _survey_task(part: Slice, drops: Path, seed: int, state: Path) -> Task:
    output = state / "survey" / f"{part.label}.npy"
    arguments = {"part": part, "drops": drops, "seed": seed, "output": output}
    return Task(part.label, survey_slice, arguments, (Path(part.path), drops), (output,), part.size)


def _threshold(outputs: list[Path], fraction: float) -> int | None:
    total = sum(len(np.load(path, mmap_mode="r")) for path in outputs)
    limit = smallest(lambda: (np.load(path) for path in outputs), round(fraction * total))
    return None if limit is None else int(limit)


def _mix_task(part: Slice, drops: Path, share: Share, parts: int, seed: int, output: Path) -> Task:
    arguments = {"part": part, "drops": drops, "share": share, "parts": parts, "seed": seed, "output": output}
    return Task(part.label, mix_slice, arguments, (Path(part.path), drops), (output, index_path(output)), part.size)


def _check_dropped(counts: Counts, drops: Iterable[Path], sets: tuple[Path, ...]) -> None:
    """Every row that a key set names must have been met: else the set is of another corpus."""
    named = [np.union1d(loaded.short, loaded.duplicate) for loaded in map(Drops.load, drops)]
    wanted = sum(len(rows) for rows in named)
    met = counts.total(SHORT).documents + counts.total(DUPLICATE).documents
    if met != wanted:
        raise InputError(
            f"{' and '.join(map(str, sets))} name {wanted:,} documents, and {met:,} of them are in the corpus: "
            "they were made from another version of it. Run filter and the dedup stages again"
        )


def _write_head(tasks: list[Task], head: PassOne, out_dir: Path, options: RunOptions) -> None:
    piles = [task.outputs[0] for task in tasks]
    indexes = tuple(task.outputs[1] for task in tasks)
    task = Task("head", write_head, {"out_dir": out_dir, "piles": piles, "head": head}, indexes, (_head_path(out_dir),))
    run_stage(f"{PASS_1}-head", [task], out_dir / STATE_DIR, options, summary=False)


def _head_path(folder: Path) -> Path:
    return folder / "pass1.json"


def _read_head(folder: Path) -> PassOne:
    path = _head_path(folder)
    if not path.is_file():
        raise UsageError(f"{folder} holds no {path.name}: wanted the folder that pass1 wrote. Run pass1 to its end")
    try:
        return msgspec.json.decode(path.read_bytes(), type=PassOne)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is damaged ({error}): run pass1 again") from error


def _holdout_limits(folder: Path, head: PassOne, fraction: float) -> dict[str, int]:
    """For each source the draw up to which documents are held out: exactly `fraction` of them, and at least one."""
    by_source: dict[str, list[Pile]] = {}
    for name, source in head.piles.items():
        by_source.setdefault(source, []).append(open_pile(folder / name))
    limits = {}
    for source, piles in by_source.items():
        total = sum(int((pile.holdout != NEVER).sum()) for pile in piles)
        count = max(round(fraction * total), 1 if total > 1 and fraction > 0 else 0)
        limit = smallest(lambda piles=piles: (pile.holdout for pile in piles), count)  # type: ignore[misc]
        if limit is not None:
            limits[source] = int(limit)
    return limits


def _text_size(part: Slice) -> int:
    return part.size * (1 if part.path.endswith(".jsonl") else _COMPRESSION)


if __name__ == "__main__":
    command(pass1, pass2)
