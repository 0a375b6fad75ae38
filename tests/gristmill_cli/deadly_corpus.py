"""A corpus with documents, and a file, on which processes die, and functions that do so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gristmill_cli import in_process
from tests.gristmill_cli.corpus import ROOT

DEADLY = {("book", 1, 30), ("book", 1, 33), ("web", 0, 59)}  # source, file, row; two are in one batch
STEPS = """
import os, signal

def keep(texts):
    if any(text.startswith("deadly") for text in texts):
        os.kill(os.getpid(), signal.SIGSEGV)
    return [not text.startswith("bad") for text in texts]

keep.version = 1

def always(texts):
    os.abort()

def one_by_one(documents):
    for document in documents:
        if document.text.startswith("deadly"):
            os.kill(os.getpid(), signal.SIGKILL)
        yield document

def in_batches(documents):
    batch = []
    for document in documents:
        batch.append(document)
        if len(batch) == 7:
            yield from checked(batch)
            batch = []
    yield from checked(batch)

def checked(batch):
    if any(document.text.startswith("deadly") for document in batch):
        os._exit(5)
    return batch

def length(texts):
    if any(text.startswith("deadly 1 30") for text in texts):
        os._exit(7)
    if any(text.startswith("deadly") for text in texts):
        raise ValueError("no length")
    return [len(text) for text in texts]

def only_together(documents):
    texts = [document.text for document in documents]
    if len(texts) > 1:
        os._exit(6)
    yield from ()
"""

POISON = """
import os, signal
from gristmill.io import readers

records_of = readers._records_of

def records_of_all_but_one(part):
    if part.name == "web/1.jsonl" and "corpus" in part.path.parts:
        os.kill(os.getpid(), signal.SIGSEGV)
    return records_of(part)

readers._records_of = records_of_all_but_one
readers.SLICE_BYTES = {slice_bytes}
"""


def write_deadly_corpus(folder: Path) -> Path:
    """Write a corpus of 240 documents, functions that end their process, and the file of a run; return the folder."""
    for source in ("book", "web"):
        for number in range(2):
            path = folder / "corpus" / source / f"{number}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                for row in range(60):
                    begins = "deadly" if (source, number, row) in DEADLY else f"text of {source}"
                    record = {"text": f"{begins} {number} {row} " + "word " * 60, "id": f"{source}-{number}-{row}"}
                    file.write(json.dumps(record) + "\n")
    (folder / "deadly.py").write_text(STEPS)
    (folder / "run.toml").write_text("corpus = 'corpus'\nout = 'out'\n[[steps]]\nkeep = 'deadly:keep'\n")
    return folder


def gristmill(folder: Path, *words: str, own_process: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command in the folder, on whose functions it may call.

    In a process of its own where there is a sitecustomize, which Python imports as it starts.
    """
    if own_process or (folder / "sitecustomize.py").exists():
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "gristmill_cli", *words]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        sys.modules.pop("deadly", None)  # of another test's folder
        return in_process.gristmill(*words)


def run_until_filter(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the first stages of `run.toml`."""
    return gristmill(folder, "run", "run.toml", "--until", "filter", "--alarms.source_loss", "0", *words)
