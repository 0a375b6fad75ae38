"""Stage: normalise text to Unicode NFC, so that equal texts have equal bytes. Writes .jsonl[.gz|.zst]."""

import importlib.util
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import tyro

from gristmill.command import command
from gristmill.counts import CHANGED, WRITTEN, Counts
from gristmill.engine.claims import reject_overlapping_folders, reject_unknown_files
from gristmill.engine.options import RunOptions
from gristmill.engine.run import StageRun, StepResult, open_stage
from gristmill.engine.slices import SliceGroup, cut_corpus, group_slices
from gristmill.engine.task import Stage, Task
from gristmill.errors import UsageError
from gristmill.io.documents import CORPUS_SUFFIXES, JSONL_SUFFIXES, list_corpus, stem
from gristmill.io.files import concatenate, rejects_path
from gristmill.io.readers import Slice, read_documents
from gristmill.io.writers import Rejects, open_jsonl_writer
from gristmill.text import utf8_size

STAGE = Stage("normalize_text", version=1, libraries=("unicode", "zstandard", "zlib", "pyarrow"))
FILES_PER_INDEX = 64  # as in SlimPajama


def normalize_text(
    data_dir: Annotated[Path, tyro.conf.arg(aliases=["-d"])],
    target_dir: Annotated[Path, tyro.conf.arg(aliases=["-t"])],
    zst: bool = False,
    idx: int = -1,
    ftfy: bool = False,
    options: RunOptions = RunOptions(),
) -> Counts:
    """Normalise every text of a corpus to Unicode NFC; all other fields are copied unchanged.

    The format follows from the file name. An output file has its input's name and compression; a .parquet or
    .arrow file becomes .jsonl.zst. A large file is normalised by several tasks, in pieces.

    Args:
        data_dir: Folder with .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .arrow files, in any subfolders.
        target_dir: Output folder; files keep their relative paths.
        zst: Compress all output with zstd, even if the input is not compressed.
        idx: Index of the block of 64 files to normalise, to split a folder among machines; -1 for all files.
        ftfy: Repair mojibake with ftfy first, as SlimPajama did. It also rewrites Chinese punctuation and code.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read, written and malformed per source.
    """
    if ftfy:
        check_ftfy()
    files = list_corpus(data_dir)
    reject_overlapping_folders(data_dir, target_dir)
    targets = {file.name: target_dir / output_name(file.name, zst) for file in files}
    _reject_name_collisions(targets)
    chosen = files if idx < 0 else files[idx * FILES_PER_INDEX : (idx + 1) * FILES_PER_INDEX]
    if not chosen:
        raise UsageError(f"--idx {idx}: {data_dir} has {len(files)} files, so wanted 0 to {(len(files) - 1) // 64}")
    stage = replace(STAGE, libraries=(*STAGE.libraries, "ftfy")) if ftfy else STAGE
    with open_stage(
        stage, target_dir, options, selection=f"/idx{idx}" if idx >= 0 else "", plans=None if idx >= 0 else "",
        reads=[data_dir], publishes=[target_dir],
    ) as run:  # fmt: skip
        reject_unknown_files(target_dir, targets.values(), CORPUS_SUFFIXES, run.ledger)
        slices = cut_corpus(run, chosen)
        pieces = [part for part in slices if _is_piece(part)]
        done = run.step("normalize", _normalize_tasks(run, slices, targets, ftfy))
        if pieces:
            run.step("join", _join_tasks(run, pieces, targets, done))
        return run.finish(done.counts)


def check_ftfy() -> None:
    """Raise UsageError if the package that --ftfy needs is not installed."""
    if importlib.util.find_spec("ftfy") is None:
        raise UsageError("--ftfy needs the package ftfy, which is not installed: pip install 'gristmill[ftfy]'")


def output_name(name: str, zst: bool) -> str:
    """Name of the normalised file for an input file name.

    >>> output_name("book/a.parquet", False), output_name("a.jsonl", True), output_name("a.jsonl.gz", False)
    ('book/a.jsonl.zst', 'a.jsonl.zst', 'a.jsonl.gz')
    """
    return f"{stem(name)}.jsonl.zst" if zst or not name.endswith(JSONL_SUFFIXES) else name


def _reject_name_collisions(targets: dict[str, Path]) -> None:
    by_target = defaultdict(list)
    for name, path in targets.items():
        by_target[path].append(name)
    for path, names in by_target.items():
        if len(names) > 1:
            raise UsageError(f"{' and '.join(names)} would both be written to {path}: rename one of them")


def _is_piece(part: Slice) -> bool:
    """Whether a slice is only a part of its file."""
    return part.start > 0 or part.end is not None


def _normalize_tasks(run: StageRun, slices: list[Slice], targets: dict[str, Path], ftfy: bool) -> Iterator[Task]:
    """A task for each group of small files, and each piece of a large one, whose output is temporary."""
    for group in group_slices(slices):
        outputs = tuple(_piece_path(run, part, targets) if _is_piece(part) else targets[part.name] for part in group)
        arguments = {"group": group, "outputs": outputs, "ftfy": ftfy}
        yield Task(group[0].label, normalize_slices, arguments, outputs, sum(part.size for part in group))


def _piece_path(run: StageRun, part: Slice, targets: dict[str, Path]) -> Path:
    """Path of a piece, with the target's suffix and so its compression."""
    name = targets[part.name].name
    return run.work / part.name / f"{part.start}{name.removeprefix(stem(name))}"


def _join_tasks(run: StageRun, pieces: list[Slice], targets: dict[str, Path], done: StepResult) -> Iterator[Task]:
    """A task for each large file: it joins the pieces, and the files of their malformed records."""
    written = {run.ledger.path(output) for record in done.records for output in record.outputs}
    for name, of_file in groupby(pieces, key=lambda part: part.name):
        paths = [_piece_path(run, part, targets).absolute() for part in of_file]
        found = [path for path in map(rejects_path, paths) if path in written]
        arguments = {"pieces": paths, "rejects": found, "target": targets[name]}
        yield Task(name, join_pieces, arguments, (targets[name],))


def normalize_slices(group: SliceGroup, outputs: tuple[Path, ...], ftfy: bool) -> Counts:
    """Task: normalise each slice of a group into its output."""
    counts, fix = Counts({}, []), _ftfy() if ftfy else _nfc
    for part, output in zip(group, outputs, strict=True):
        with open_jsonl_writer(output) as sink:
            for document in read_documents(part, counts, Rejects(output)):
                size = utf8_size(document.text)
                document.replace_text(fix(document.text))
                written = utf8_size(document.text)
                sink.write(document.to_json())
                counts.add(part.source, WRITTEN, written)
                if written != size:
                    counts.add(part.source, CHANGED, size - written, documents=0)
    return counts


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _ftfy() -> Callable[[str], str]:
    import ftfy

    return lambda text: ftfy.fix_text(text, normalization="NFC")


def join_pieces(pieces: list[Path], rejects: list[Path], target: Path) -> None:
    """Task: concatenate the pieces of one file, as .jsonl, .gz and .zst allow, and their malformed records."""
    concatenate(pieces, target)
    rejects_path(target).unlink(missing_ok=True)
    if rejects:
        concatenate(rejects, rejects_path(target))


if __name__ == "__main__":
    command(normalize_text)
