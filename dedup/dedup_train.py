"""Stage: decontamination, no document of the train set is one of the holdout (SHA-256 of the text)."""

import hashlib
import sys
from functools import cache
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

from tyro.conf import Positional

from gristmill.command import command
from gristmill.counts import WRITTEN, Counts
from gristmill.engine.stage import STATE_DIR, RunOptions, Task, outputs_of, reject_unknown_files, run_stage
from gristmill.errors import UsageError
from gristmill.io.documents import SUFFIXES, list_corpus
from gristmill.io.files import atomic_write, locked
from gristmill.io.readers import Slice, plan_slices, read_documents
from gristmill.io.writers import Rejects, open_jsonl_writer
from gristmill.text import utf8_size

NAME = "dedup_train"
CONTAMINATED = "contaminated"
_DIGEST = hashlib.sha256().digest_size


def dedup_train(
    chunk: Positional[int], src_dir: Path, tgt_dir: Path, out_dir: Path, options: RunOptions = RunOptions()
) -> Counts:
    """Write a chunk of the train set without the documents whose text is also in the holdout.

    Args:
        chunk: Number of the chunk, the folder chunk<chunk> of src_dir.
        src_dir: OUT/train.
        tgt_dir: OUT/holdout; all of its chunks count.
        out_dir: OUT/train_deduped.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read, written and contaminated, per source.
    """
    folder = src_dir / f"chunk{chunk}"
    if not folder.is_dir():
        found = ", ".join(sorted(path.name for path in src_dir.glob("chunk*"))) or "no chunk"
        raise UsageError(f"{folder}: wanted a chunk that pass2 wrote; {src_dir} has {found}")
    held = list_corpus(tgt_dir)
    state = out_dir / STATE_DIR
    digests = state / "holdout.sha256"
    holdout = tuple(file.path for file in held)
    slices = [part for file in held for part in plan_slices(file)]
    gather = Task("digests", gather_digests, {"slices": slices, "output": digests}, holdout, (digests,))
    with locked(state / f"{NAME}-digests.lock"):  # SlimPajama's users run one chunk beside another
        run_stage(f"{NAME}-digests", [gather], state, options, summary=False)
    tasks = [
        Task(part.label, clean_slice, {"part": part, "digests": digests, "output": out_dir / part.name},
             (Path(part.path), digests), (out_dir / part.name,), part.size)
        for file in list_corpus(folder, f"chunk{chunk}/")
        for part in [Slice(str(file.path), file.name, size=file.size)]
    ]  # fmt: skip
    reject_unknown_files(out_dir, outputs_of(tasks), SUFFIXES, state / f"{NAME}.jsonl")
    return run_stage(NAME, tasks, state, options, stale_prefix=f"chunk{chunk}/")


def gather_digests(slices: list[Slice], output: Path) -> Counts:
    """Write the SHA-256 digests of all held-out texts, sorted, 32 bytes each."""
    digests: set[bytes] = set()
    for part in slices:
        digests.update(
            digest_of(document.text)
            for document in read_documents(part, Counts({}, []), Rejects(output), by_original_source=True)
        )
    with atomic_write(output) as temporary:
        temporary.write_bytes(b"".join(sorted(digests)))
    return Counts({}, [])


def clean_slice(part: Slice, digests: Path, output: Path) -> Counts:
    """Write the documents of one file that are not held out."""
    counts, held = Counts({}, []), load_digests(digests, digests.stat().st_mtime_ns)
    with open_jsonl_writer(output) as sink:
        for document in read_documents(part, counts, Rejects(output), by_original_source=True):
            is_held = digest_of(document.text) in held
            if not is_held:
                sink.write(document.to_json())
            counts.add(document.original_key.source, CONTAMINATED if is_held else WRITTEN, utf8_size(document.text))
    return counts


def digest_of(text: str) -> bytes:
    """SHA-256 of a text's UTF-8."""
    return hashlib.sha256(text.encode()).digest()


@cache
def load_digests(path: Path, version: int) -> frozenset[bytes]:  # noqa: ARG001
    """The digests in a file, read once a process for each `version` of it."""
    data = path.read_bytes()
    return frozenset(data[i : i + _DIGEST] for i in range(0, len(data), _DIGEST))


if __name__ == "__main__":
    command(dedup_train)
