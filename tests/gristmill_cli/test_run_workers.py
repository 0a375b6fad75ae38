"""Worker processes are started once a run, with every stage's modules imported: later stages find them warm."""

import os
import subprocess
import sys
from pathlib import Path

from tests.gristmill_cli.corpus import ROOT, write_records

FUNCTION = """
import os
import sys
import time


def note(documents):
    time.sleep(0.1)
    with open(os.environ["NOTES"], "a") as notes:
        print(os.getpid(), "dedup.clustering.lsh" in sys.modules, "preprocessing.tokenizer.encoder" in sys.modules,
              sep=" ", file=notes)
    yield from documents
"""
SCRIPT = """
import multiprocessing
import sys
from multiprocessing import forkserver

from gristmill_cli import run as module

if __name__ == "__main__":
    real = module.save_record

    def save_record(config, stage, *rest):
        print(stage.name, *sorted(child.pid for child in multiprocessing.active_children()))
        real(config, stage, *rest)

    module.save_record = save_record
    try:
        module.main(sys.argv[1:])
    finally:
        print("server", forkserver._forkserver._forkserver_pid)
"""


def test_workers_are_started_once_and_have_the_modules_of_all_stages(tmp_path: Path) -> None:
    for name, text in (("noting.py", FUNCTION), ("driver.py", SCRIPT)):
        (tmp_path / name).write_text(text)
    for source in "abcd":  # a task each
        (tmp_path / "corpus" / source).mkdir(parents=True)
        write_records(tmp_path / "corpus" / source / "a.jsonl", [{"text": f"of {source}"}])
    arguments = ["--corpus", "corpus", "--out", "out", "--workers", "2", "--filter.threshold", "1"]
    done, again = (
        subprocess.run(
            [sys.executable, "driver.py", *arguments, "--apply.function", "noting:note", "--until", "filter"],
            cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "NOTES": str(tmp_path / "notes")},
        )
        for _ in range(2)
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "server None" in again.stdout and "server None" not in done.stdout  # there was nothing to do
    stages = {name: pids for name, *pids in (line.split() for line in done.stdout.splitlines()[:3])}
    assert list(stages) == ["normalize_text", "apply", "note_facts"]
    assert len(stages["note_facts"]) == 2 and set(stages["normalize_text"]) <= set(stages["apply"]) <= set(
        stages["note_facts"]
    )
    assert stages["apply"] == stages["note_facts"]
    noted = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    assert len(noted) == 4 and {pid for pid, *_ in noted} <= set(stages["apply"])
    assert {word for _, *words in noted for word in words} == {"True"}
