"""Stage: leave out lines, or paragraphs, that a corpus repeats, such as menus, notices and licences.

Documents → digests of their units → sorted, equal ones are repeats → documents without them.
"""

import sys
from pathlib import Path
from typing import Any

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

from tyro.conf import Positional

from dedup.candidates.digest_join import digest_groups, join_digests
from dedup.candidates.input_shards import Scope
from dedup.candidates.repeated_units import (
    EMPTIED,
    GROUP_UNIT,
    CountBy,
    KeepUnit,
    check_left_alone,
    digest_units,
    join_units,
    split_repeats,
    write_without_repeats,
)
from dedup.candidates.text_units import TextUnit
from gristmill.command import command
from gristmill.counts import CHANGED, Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.rewriting import OutputFormat, open_rewriting, rewrite_corpus
from gristmill.engine.run import StageRun
from gristmill.engine.slices import cut_raw_corpus, group_slices
from gristmill.engine.task import Stage, Task
from gristmill.errors import require
from gristmill.io.documents import CorpusFile, sources_of
from gristmill.wording import count_of

STAGE = Stage("remove_lines", version=3, libraries=("unicode", "zstandard", "zlib", "pyarrow"))


def remove_lines(
    data_dir: Positional[Path],
    target_dir: Positional[Path],
    unit: TextUnit = "line",
    options: RunOptions = RunOptions(),
    *,
    keep: KeepUnit = "first",
    min_count: int = 6,
    min_characters: int = 20,
    scope: Scope = "global",
    count_by: CountBy = "occurrence",
    leave_alone: tuple[str, ...] = (),
    format: OutputFormat = "jsonl",
    text_column: str = "text",
) -> Counts:
    """Write the documents of a corpus without the lines, or paragraphs, that it repeats.

    Units are compared without the spaces around them, and the text that stays keeps its bytes. The table
    TARGET_DIR.lines.parquet lists each document that lost text: its file and row in data_dir, how many units and bytes
    it lost, and how many units it had.

    Args:
        data_dir: Folder of the corpus.
        target_dir: Output folder; files keep their relative paths.
        unit: line, or paragraph: the text between blank lines.
        options: Workers, memory, and when to stop; they change no output.
        keep: Which of several equal units to keep: the first in the order of the corpus, or none.
        min_count: Minimum number of occurrences of a unit that is removed.
        min_characters: Minimum length of a unit that is removed: short lines repeat for good reason in code and verse.
        scope: per-source counts the units of each source alone.
        count_by: Count occurrences of a unit, or documents that contain it. With document, the refrain of a single poem
            stays, and --keep first leaves the first document as it is.
        leave_alone: Sources whose units are neither counted nor removed, such as code or poems.
        format: Format of the output files: jsonl, or parquet, where each field has one type in all files of a source.
        text_column: The column or field that holds the text.

    Returns:
        Documents read, written, and left out as nothing was left of them, and the bytes that others lost (changed).
    """
    check_limits(min_count, min_characters)
    table = lost_path(target_dir)
    with open_rewriting(STAGE, data_dir, target_dir, options, text_column, format, [table]) as (run, files, targets):
        check_left_alone(leave_alone, sources_of(files))
        digested = {"unit": unit, "min_characters": min_characters, "scope": scope, "leave_alone": leave_alone}
        joined = {"min_count": min_count, "keep": keep, "count_by": count_by}
        repeats = _find_repeats(run, files, digested, joined)
        done = rewrite_corpus(
            run, "write", files, targets, write_without_repeats, {"unit": unit}, table=table,
            of_group=lambda group: {"repeats": repeats[group[0].label]},
        )  # fmt: skip
        counts = run.finish(done.counts)
    units, documents = map(sum, zip(*done.values(tuple[int, int]), strict=True))
    if not options.quiet:
        size = sum(counts.total(reason).bytes for reason in (CHANGED, EMPTIED))
        removed = count_of(units, unit)
        changed = count_of(documents, "document")
        print(f"{STAGE.name}: {removed} ({count_of(size, 'byte')}) removed from {changed}", file=sys.stderr)
    return counts


def check_limits(min_count: int, min_characters: int) -> None:
    """Raise UsageError for a number out of range."""
    require(min_count >= 2, f"--min_count: expected 2 or more, got {min_count}; try 6")
    require(min_characters >= 0, f"--min_characters: expected 0 or more, got {min_characters}; try 20")


def lost_path(target_dir: Path) -> Path:
    """Return the table of what documents lost, next to `target_dir`."""
    return target_dir.with_name(f"{target_dir.name}.lines.parquet")


def _find_repeats(
    run: StageRun, files: list[CorpusFile], arguments: dict[str, Any], join_arguments: dict[str, Any]
) -> dict[str, Path]:
    """Run the steps that find the repeats, given arguments of two of them; return each group's file, by its label."""
    slices = cut_raw_corpus(run, files)
    digested = digest_groups(run, "digests", slices, digest_units, arguments)
    groups = group_slices(slices)
    repeats, _ = join_digests(run, digested, GROUP_UNIT, "repeats", join_units, join_arguments)
    folder = run.work / "repeats"
    outputs = tuple(folder / f"{group[0].label}.bin" for group in groups)
    given = {"repeats": repeats, "outputs": outputs}
    run.step("split", [Task("split", split_repeats, given, outputs, memory=run.options.memory_bytes)])
    return {group[0].label: output for group, output in zip(groups, outputs, strict=True)}


if __name__ == "__main__":
    command(remove_lines)
