"""Stage: cut spans of text that a corpus repeats, such as headers, footers and banners, wherever they begin and end.

Documents → digests of their blocks → sorted, equal ones repeat, and of some the windows → documents without them.
"""

import sys
from pathlib import Path
from typing import Any

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

from tyro.conf import Positional

from dedup.candidates.digest_join import digest_groups, join_digests
from dedup.candidates.exact_copies import RowLocator
from dedup.candidates.repeated_spans import (
    EMPTIED,
    FRAGMENT,
    GROUP_BLOCK,
    GROUP_WINDOW,
    digest_blocks,
    digest_open,
    join_blocks,
    join_windows,
    name_kept,
    split_cuts,
    split_kept,
    split_open,
    write_cut,
)
from dedup.candidates.repeated_units import check_left_alone
from dedup.spans.blocks import MAX_BYTES, MIN_BYTES, note_compilation
from dedup.spans.joins import KeepSpan
from gristmill.batches import numbered
from gristmill.command import command
from gristmill.counts import CHANGED, Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.rewriting import OutputFormat, open_rewriting, rewrite_corpus
from gristmill.engine.run import StageRun
from gristmill.engine.slices import SliceGroup, cut_raw_corpus, group_slices
from gristmill.engine.task import FileSet, Stage, Task
from gristmill.errors import require
from gristmill.io.documents import CorpusFile, sources_of
from gristmill.wording import count_of

STAGE = Stage("remove_spans", version=1, libraries=("unicode", "zstandard", "zlib", "pyarrow"))


def remove_spans(
    data_dir: Positional[Path],
    target_dir: Positional[Path],
    min: int = 100,
    options: RunOptions = RunOptions(),
    *,
    keep: KeepSpan = "first",
    min_left: int = 200,
    min_share: float = 0.2,
    leave_alone: tuple[str, ...] = (),
    format: OutputFormat = "jsonl",
    text_column: str = "text",
) -> Counts:
    """Write the documents of a corpus without the spans of text that it repeats, wherever they begin and end.

    A byte repeats if it is in `min` bytes that occur earlier in the corpus, in another document or the same. What
    repeats is cut, but for words of which it has a part only. The table TARGET_DIR.spans.parquet lists what each
    document lost: its file and row in data_dir, the first byte and the number of bytes, and which document kept them.

    Args:
        data_dir: Folder of the corpus.
        target_dir: Output folder; files keep their relative paths.
        min: Minimum length of a span that is cut, in bytes of UTF-8, from 16 on.
        options: Workers, memory, and when to stop; they change no output.
        keep: Which of several equal spans to keep: the first in the order of the corpus, or none.
        min_left: Minimum number of bytes that are left of a document; one that lost spans and has fewer is a fragment,
            which is removed, unless others lost `min` bytes or more for what it has left.
        min_share: Minimum share of its bytes that is left of a document; with less it is a fragment, too.
        leave_alone: Sources whose spans are neither compared nor cut, such as code or poems.
        format: Format of the output files: jsonl, or parquet, where each field has one type in all files of a source.
        text_column: The column or field that holds the text.

    Returns:
        Documents read, written, and left out as nothing or a fragment was left of them, and the bytes that others lost
        (changed).
    """
    check_limits(min, min_left, min_share)
    table = cut_path(target_dir)
    with open_rewriting(STAGE, data_dir, target_dir, options, text_column, format, [table]) as (run, files, targets):
        check_left_alone(leave_alone, sources_of(files))
        note_compilation(options.quiet)
        spans = _find_spans(run, files, min, keep, tuple(leave_alone))
        lost = run.work / "lost.parquet"
        given = {"size": min, "min_left": min_left, "min_share": min_share}
        done = rewrite_corpus(
            run, "write", files, targets, write_cut, given, table=lost,
            of_group=lambda group: spans.of_group(group[0].label),
        )  # fmt: skip
        named = {"lost": lost, "names": spans.names, "places": spans.places, "keep": keep, "table": table}
        run.step("kept documents", [Task("kept documents", name_kept, named, (table,))])
        counts = run.finish(done.counts)
    numbers, documents = map(sum, zip(*done.values(tuple[int, int]), strict=True))
    if not options.quiet:
        size = sum(counts.total(reason).bytes for reason in (CHANGED, EMPTIED, FRAGMENT))
        cut = count_of(numbers, "span")
        changed = count_of(documents, "document")
        print(f"{STAGE.name}: {cut} cut from {changed} ({count_of(size, 'byte')} left out)", file=sys.stderr)
    return counts


def check_limits(min: int, min_left: int, min_share: float) -> None:
    """Raise UsageError for a number out of range."""
    require(
        MIN_BYTES <= min <= MAX_BYTES,
        f"--min {min}: expected {MIN_BYTES} to {MAX_BYTES:,} bytes, as shorter spans repeat in any text; try 100",
    )
    require(min_left >= 0, f"--min_left {min_left}: expected 0 or more bytes; try 200")
    require(0 <= min_share <= 1, f"--min_share {min_share}: expected a share from 0 to 1; try 0.2")


def cut_path(target_dir: Path) -> Path:
    """Return the table of what documents lost, next to `target_dir`."""
    return target_dir.with_name(f"{target_dir.name}.spans.parquet")


class _Spans:
    """Files with what each group loses, and with what others lose for it; the documents in groups."""

    def __init__(self, groups: list[SliceGroup], first_rows: list[list[int]], names: list[str], folder: Path) -> None:
        self.labels = [group[0].label for group in groups]
        self.first_rows = dict(zip(self.labels, first_rows, strict=True))
        self.names = names
        self.places = RowLocator.of(groups, first_rows, numbered(names))
        self.cuts = {label: folder / "cuts" / f"{label}.bin" for label in self.labels}
        self.kept = {label: folder / "kept" / f"{label}.bin" for label in self.labels}
        self.open = {label: folder / "open" / f"{label}.bin" for label in self.labels}

    def of_group(self, label: str) -> dict[str, Any]:
        """Return the arguments of write_cut that differ from group to group."""
        return {"first_rows": self.first_rows[label], "cuts": self.cuts[label], "kept": self.kept[label]}


def _find_spans(
    run: StageRun, files: list[CorpusFile], size: int, keep: KeepSpan, leave_alone: tuple[str, ...]
) -> _Spans:
    """Run the steps that find the repeated spans."""
    slices = cut_raw_corpus(run, files)
    digested = digest_groups(run, "blocks", slices, digest_blocks, {"size": size, "leave_alone": leave_alone})
    groups = group_slices(slices)
    names = [file.name for file in files]
    spans = _Spans(groups, digested.values(list[int]), names, run.work)
    memory = run.options.memory_bytes
    of_blocks, _ = join_digests(run, digested, GROUP_BLOCK, "spans", join_blocks, {"keep": keep}, "scatter blocks")
    outputs = tuple(spans.open.values())
    given: dict[str, Any] = {"spans": of_blocks, "outputs": outputs}
    run.step("split", [Task("split", split_open, given, outputs, memory=memory // 2)])
    windows = list[Task]()
    for group, label in zip(groups, spans.labels, strict=True):
        output = run.work / "windows" / f"{label}.bin"
        first_rows = spans.first_rows[label]
        given = {"first_rows": first_rows, "spans": spans.open[label], "size": size, "output": output}
        windows.append(Task.on_slices(group, digest_open, given, (output,)))
    opened = run.step("windows", windows)
    joined = {"keep": keep}
    of_windows, _ = join_digests(run, opened, GROUP_WINDOW, "join windows", join_windows, joined, "scatter windows")
    span_files = FileSet((*of_blocks.paths, *of_windows.paths))
    cuts = tuple(spans.cuts.values())
    kept = tuple(spans.kept.values())
    tasks = [
        Task("cuts", split_cuts, {"spans": span_files, "size": size, "outputs": cuts}, cuts, memory=memory // 2),
        Task("kept", split_kept, {"spans": span_files, "size": size, "outputs": kept}, kept, memory=memory // 2),
    ]
    run.step("split again", tasks)
    return spans


if __name__ == "__main__":
    command(remove_spans)
