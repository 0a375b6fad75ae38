"""Stage: Unicode NFC, so that the same text is the same bytes. Reads any corpus, writes .jsonl[.gz|.zst]."""

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
from gristmill.io.documents import JSONL, SUFFIXES, CorpusFile, list_corpus, stem
from gristmill.io.files import atomic_write, rejects_path
from gristmill.io.readers import Slice, plan_slices, read_documents
from gristmill.io.writers import Rejects, open_jsonl_writer
from gristmill.text import utf8_size

NAME = "normalize_text"
PIECES = "normalize_text_pieces"
FILES_PER_INDEX = 64  # SlimPajama's


def normalize_text(
    data_dir: Annotated[Path, tyro.conf.arg(aliases=["-d"])],
    target_dir: Annotated[Path, tyro.conf.arg(aliases=["-t"])],
    zst: bool = False,
    idx: int = -1,
    ftfy: bool = False,
    options: RunOptions = RunOptions(),
) -> Counts:
    """Bring every text of a corpus to Unicode NFC; leave every other field as it stands.

    Formats are known by their names. An output has its input's name and compression; a .parquet
    or .arrow file becomes .jsonl.zst.

    Args:
        data_dir: Folder with .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .arrow files, nested or not.
        target_dir: Folder to write to, in the same layout.
        zst: Compress every output with zstd, whatever its input.
        idx: Work on the idx-th 64 files only, to share a folder among machines; -1 works on all.
        ftfy: Repair mojibake with ftfy first, as SlimPajama did. It rewrites Chinese punctuation and code.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read, written and malformed per source.
    """
    files = list_corpus(data_dir)
    reject_overlapping_folders(data_dir, target_dir)
    targets = {file.name: target_dir / output_name(file.name, zst) for file in files}
    _refuse_collisions(targets)
    chosen = files if idx < 0 else files[idx * FILES_PER_INDEX : (idx + 1) * FILES_PER_INDEX]
    if not chosen:
        raise UsageError(f"--idx {idx}: {data_dir} has {len(files)} files, so wanted 0 to {(len(files) - 1) // 64}")
    state = target_dir / STATE_DIR
    tasks, pieces = _plan(chosen, targets, state, ftfy)
    reject_unknown_files(target_dir, targets.values(), SUFFIXES, state / f"{NAME}.jsonl")
    if pieces:  # whether too much is malformed is asked of the whole, below
        run_stage(PIECES, pieces, state, replace(options, max_malformed=1.0), stale_prefix=None)
    counts = run_stage(NAME, tasks, state, options, stale_prefix=None if idx >= 0 else "")
    for file in chosen:  # no others: another --idx may be at work beside this one
        shutil.rmtree(_pieces_of(state, file.name, ftfy), ignore_errors=True)
    return counts


def output_name(name: str, zst: bool) -> str:
    """The name of the normalised file.

    >>> output_name("book/a.parquet", False), output_name("a.jsonl", True), output_name("a.jsonl.gz", False)
    ('book/a.jsonl.zst', 'a.jsonl.zst', 'a.jsonl.gz')
    """
    return f"{stem(name)}.jsonl.zst" if zst or not name.endswith(JSONL) else name


def normalize_slice(part: Slice, target: Path, ftfy: bool) -> Counts:
    """Normalise one slice into one file."""
    counts = Counts({}, [])
    fix = _ftfy() if ftfy else _nfc
    with open_jsonl_writer(target) as sink:
        for document in read_documents(part, counts, Rejects(target)):
            size = utf8_size(document.text)
            document.replace_text(fix(document.text))
            written = utf8_size(document.text)
            sink.write(document.to_json())
            counts.add(part.source, WRITTEN, written)
            if written != size:
                counts.add(part.source, CHANGED, size - written, documents=0)
    return counts


def join_pieces(ledger: Path, pieces: dict[str, Path], target: Path) -> Counts:
    """Put the pieces of one file together, and their counts."""
    entries, counts = Ledger(ledger).read(), Counts({}, [])
    for name in pieces:
        counts.merge(entries[name].counts)
    _concatenate(list(pieces.values()), target)
    rejects = [path for path in map(rejects_path, pieces.values()) if path.exists()]
    rejects_path(target).unlink(missing_ok=True)
    if rejects:
        _concatenate(rejects, rejects_path(target))
    return counts


def _plan(files: list[CorpusFile], targets: dict[str, Path], state: Path, ftfy: bool) -> tuple[list[Task], list[Task]]:
    """A task a file; for a large file a task that joins its pieces, and (unless that is done) the pieces."""
    tasks, pieces = [], []
    entries = Ledger(state / f"{NAME}.jsonl").read()
    for file in files:
        slices, target = plan_slices(file), targets[file.name]
        if len(slices) == 1:
            tasks.append(_slice_task(slices[0], target, ftfy))
            continue
        parts = [_slice_task(part, _piece_path(state, target, part, ftfy), ftfy) for part in slices]
        paths = {part.name: part.outputs[0] for part in parts}
        arguments = {"ledger": state / f"{PIECES}.jsonl", "pieces": paths, "target": target}
        join = Task(file.name, join_pieces, arguments, (file.path,), (target,), file.size)
        tasks.append(join)
        if not is_done(join, entries, join.fingerprint()):
            pieces += parts
    return tasks, pieces


def _slice_task(part: Slice, target: Path, ftfy: bool) -> Task:
    arguments = {"part": part, "target": target, "ftfy": ftfy}
    return Task(part.label, normalize_slice, arguments, (Path(part.path),), (target,), part.size)


def _piece_path(state: Path, target: Path, part: Slice, ftfy: bool) -> Path:
    """Unlike for each piece, with the suffix of the target, which says how it is compressed.

    The task that joins pieces knows them by their paths: what they depend on must show in these.
    """
    return _pieces_of(state, part.name, ftfy) / f"{part.start}{target.name.removeprefix(stem(target.name))}"


def _pieces_of(state: Path, name: str, ftfy: bool) -> Path:
    return state / PIECES / ("ftfy" if ftfy else "nfc") / name


def _refuse_collisions(targets: dict[str, Path]) -> None:
    by_target = defaultdict(list)
    for name, path in targets.items():
        by_target[path].append(name)
    for path, names in by_target.items():
        if len(names) > 1:
            raise UsageError(f"{' and '.join(names)} would both be written to {path}: rename one of them")


def _concatenate(pieces: list[Path], target: Path) -> None:
    """Members of .gz and frames of .zst follow one another in a file, as lines do."""
    with atomic_write(target) as temporary, temporary.open("wb") as whole:
        for piece in pieces:
            with piece.open("rb") as file:
                shutil.copyfileobj(file, whole, 1 << 20)


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _ftfy() -> Callable[[str], str]:
    try:
        import ftfy
    except ImportError as error:
        raise UsageError("--ftfy needs the package ftfy: pip install 'gristmill[ftfy]'") from error
    return lambda text: ftfy.fix_text(text, normalization="NFC")


if __name__ == "__main__":
    command(normalize_text)
