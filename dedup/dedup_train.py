"""Stage: drop the train documents whose text is also in the holdout, by SHA-256 (decontamination).

Holdout → sorted digests → train documents whose digest is not among them.
"""

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
from gristmill.io.documents import CORPUS_SUFFIXES, list_corpus
from gristmill.io.files import atomic_write, locked
from gristmill.io.readers import Slice, plan_slices, read_documents
from gristmill.io.writers import Rejects, open_jsonl_writer
from gristmill.text import utf8_size

NAME = "dedup_train"
CONTAMINATED = "contaminated"
DIGESTED = "digested"
_DIGEST = hashlib.sha256().digest_size


def dedup_train(
    chunk: Positional[int], src_dir: Path, tgt_dir: Path, out_dir: Path, options: RunOptions = RunOptions()
) -> Counts:
    """Write a chunk of the train set without the documents whose text is in the holdout.

    Args:
        chunk: Number of the chunk: the folder chunk<number> of src_dir.
        src_dir: OUT/train, the train set that pass2 wrote.
        tgt_dir: OUT/holdout, the holdout of all chunks.
        out_dir: OUT/train_deduped, the output folder.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read, written and contaminated, per source.
    """
    folder = src_dir / f"chunk{chunk}"
    if not folder.is_dir():
        found = ", ".join(sorted(path.name for path in src_dir.glob("chunk*"))) or "no chunk"
        raise UsageError(f"{folder}: wanted a chunk that pass2 wrote; {src_dir} has {found}")
    state = out_dir / STATE_DIR
    digests = state / "holdout.sha256"
    holdout = list_corpus(tgt_dir)
    paths, slices = tuple(file.path for file in holdout), [part for file in holdout for part in plan_slices(file)]
    digest = Task("digests", write_digests, {"slices": slices, "output": digests}, paths, (digests,))
    with locked(state / f"{NAME}-digests.lock"):  # several chunks may run at the same time
        run_stage(f"{NAME}-digests", [digest], state, options, summary=False)
    tasks = [
        Task(part.label, decontaminate_file, {"part": part, "digests": digests, "output": out_dir / part.name},
             (Path(part.path), digests), (out_dir / part.name,), part.size)
        for file in list_corpus(folder, f"chunk{chunk}/")
        for part in [Slice(file.path, file.name, size=file.size)]
    ]  # fmt: skip
    reject_unknown_files(out_dir, outputs_of(tasks), CORPUS_SUFFIXES, state / f"{NAME}.jsonl")
    return run_stage(NAME, tasks, state, options, stale_prefix=f"chunk{chunk}/")


def write_digests(slices: list[Slice], output: Path) -> Counts:
    """Task: write the SHA-256 digests of all holdout texts, sorted, 32 bytes each; count the holdout per source."""
    counts = Counts({}, [])
    digests: set[bytes] = set()
    rejects = Rejects(output)  # one for all slices: a new one removes the malformed records stored before
    for part in slices:
        for document in read_documents(part, counts, rejects, by_original_source=True):
            digests.add(text_digest(document.text))
            counts.add(document.original_key.source, DIGESTED, utf8_size(document.text))
    with atomic_write(output) as temporary:
        temporary.write_bytes(b"".join(sorted(digests)))
    return counts


def decontaminate_file(part: Slice, digests: Path, output: Path) -> Counts:
    """Task: write the documents of a train file whose text is not in the holdout."""
    counts, holdout = Counts({}, []), load_digests(digests, digests.stat().st_mtime_ns)
    with open_jsonl_writer(output) as sink:
        for document in read_documents(part, counts, Rejects(output), by_original_source=True):
            is_held_out = text_digest(document.text) in holdout
            if not is_held_out:
                sink.write(document.to_json())
            counts.add(document.original_key.source, CONTAMINATED if is_held_out else WRITTEN, utf8_size(document.text))
    return counts


def text_digest(text: str) -> bytes:
    """SHA-256 of a text in UTF-8, 32 bytes."""
    return hashlib.sha256(text.encode()).digest()


@cache
def load_digests(path: Path, version: int) -> frozenset[bytes]:  # noqa: ARG001
    """Read the digests of a file; cached per process by path and `version`, the modification time."""
    data = path.read_bytes()
    return frozenset(data[i : i + _DIGEST] for i in range(0, len(data), _DIGEST))


if __name__ == "__main__":
    command(dedup_train)
