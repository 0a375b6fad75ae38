"""Stage: normalise text to Unicode NFC, so that equal texts have equal bytes. Writes .jsonl[.gz|.zst]."""

import shutil
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import tyro

from gristmill.command import command
from gristmill.counts import CHANGED, WRITTEN, Counts
from gristmill.engine.ledger import Ledger
from gristmill.engine.stage import (
    STATE_DIR,
    RunOptions,
    Task,
    is_done,
    reject_overlapping_folders,
    reject_unknown_files,
    run_stage,
)
from gristmill.errors import UsageError
from gristmill.io.documents import CORPUS_SUFFIXES, JSONL_SUFFIXES, CorpusFile, list_corpus, stem
from gristmill.io.files import atomic_write, rejects_path
from gristmill.io.readers import Slice, plan_slices, read_documents
from gristmill.io.writers import Rejects, open_jsonl_writer
from gristmill.text import utf8_size

NAME = "normalize_text"
PIECES = "normalize_text_pieces"
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
    files = list_corpus(data_dir)
    reject_overlapping_folders(data_dir, target_dir)
    targets = {file.name: target_dir / output_name(file.name, zst) for file in files}
    _reject_name_collisions(targets)
    chosen = files if idx < 0 else files[idx * FILES_PER_INDEX : (idx + 1) * FILES_PER_INDEX]
    if not chosen:
        raise UsageError(f"--idx {idx}: {data_dir} has {len(files)} files, so wanted 0 to {(len(files) - 1) // 64}")
    state = target_dir / STATE_DIR
    tasks, pieces = _plan(chosen, targets, state, ftfy)
    reject_unknown_files(target_dir, targets.values(), CORPUS_SUFFIXES, state / f"{NAME}.jsonl")
    if pieces:  # --max_malformed applies to the whole corpus, below
        run_stage(PIECES, pieces, state, replace(options, max_malformed=1.0), stale_prefix=None)
    counts = run_stage(NAME, tasks, state, options, stale_prefix=None if idx >= 0 else "")
    for file in chosen:  # only these: another process may be working on another --idx
        shutil.rmtree(_pieces_dir(state, file.name, ftfy), ignore_errors=True)
    return counts


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


def _plan(files: list[CorpusFile], targets: dict[str, Path], state: Path, ftfy: bool) -> tuple[list[Task], list[Task]]:
    """(tasks, pieces): `tasks` has one for each file; that of a large file joins the outputs of some of `pieces`.

    A file that is already joined has none in `pieces`.
    """
    tasks, pieces = [], []
    entries = Ledger(state / f"{NAME}.jsonl").read()
    for file in files:
        slices, target = plan_slices(file), targets[file.name]
        if len(slices) == 1:
            tasks.append(_slice_task(slices[0], target, ftfy))
            continue
        of_file = [_slice_task(s, _piece_path(state, target, s, ftfy), ftfy) for s in slices]
        paths = {piece.name: piece.outputs[0] for piece in of_file}
        arguments = {"ledger": state / f"{PIECES}.jsonl", "pieces": paths, "target": target}
        join = Task(file.name, join_pieces, arguments, (file.path,), (target,), file.size)
        tasks.append(join)
        if not is_done(join, entries, join.fingerprint()):
            pieces += of_file
    return tasks, pieces


def _slice_task(corpus_slice: Slice, target: Path, ftfy: bool) -> Task:
    arguments = {"corpus_slice": corpus_slice, "target": target, "ftfy": ftfy}
    return Task(
        corpus_slice.label, normalize_slice, arguments, (Path(corpus_slice.path),), (target,), corpus_slice.size
    )


def _piece_path(state: Path, target: Path, corpus_slice: Slice, ftfy: bool) -> Path:
    """Path of a piece, with the target's suffix and so its compression.

    The fingerprint of the join task covers its pieces by their paths alone. So a path names everything that
    its piece depends on: the slice and --ftfy.
    """
    suffix = target.name.removeprefix(stem(target.name))
    return _pieces_dir(state, corpus_slice.name, ftfy) / f"{corpus_slice.start}{suffix}"


def _pieces_dir(state: Path, name: str, ftfy: bool) -> Path:
    return state / PIECES / ("ftfy" if ftfy else "nfc") / name


def normalize_slice(corpus_slice: Slice, target: Path, ftfy: bool) -> Counts:
    """Normalise one slice of a corpus file into `target`."""
    counts = Counts({}, [])
    fix = _ftfy() if ftfy else _nfc
    with open_jsonl_writer(target) as sink:
        for document in read_documents(corpus_slice, counts, Rejects(target)):
            size = utf8_size(document.text)
            document.replace_text(fix(document.text))
            written = utf8_size(document.text)
            sink.write(document.to_json())
            counts.add(corpus_slice.source, WRITTEN, written)
            if written != size:
                counts.add(corpus_slice.source, CHANGED, size - written, documents=0)
    return counts


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _ftfy() -> Callable[[str], str]:
    try:
        import ftfy
    except ImportError as error:
        raise UsageError("--ftfy needs the package ftfy: pip install 'gristmill[ftfy]'") from error
    return lambda text: ftfy.fix_text(text, normalization="NFC")


def join_pieces(ledger: Path, pieces: dict[str, Path], target: Path) -> Counts:
    """Concatenate the pieces of one file and their rejects, and add up their counts from the ledger."""
    entries, counts = Ledger(ledger).read(), Counts({}, [])
    for name in pieces:
        counts.merge(entries[name].counts)
    _concatenate(list(pieces.values()), target)
    rejects = [path for path in map(rejects_path, pieces.values()) if path.exists()]
    rejects_path(target).unlink(missing_ok=True)
    if rejects:
        _concatenate(rejects, rejects_path(target))
    return counts


def _concatenate(pieces: list[Path], target: Path) -> None:
    """Concatenate files of the same compression; the formats .jsonl, .gz and .zst allow it."""
    with atomic_write(target) as temporary, temporary.open("wb") as whole:
        for piece in pieces:
            with piece.open("rb") as file:
                shutil.copyfileobj(file, whole, 1 << 20)


if __name__ == "__main__":
    command(normalize_text)
