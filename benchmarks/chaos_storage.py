"""Fault injection in a bucket: runs whose requests fail and whose drivers are killed write the bytes of a local run.

    python benchmarks/chaos_storage.py CORPUS --folder /tmp/chaos --seeds 20 --options="--tokenizer.vocab_size 500"

Each seed starts runs on a store that is moto's, in this process: a share of all requests meets a busy store, a dropped
connection, a lost answer or one that is cut off, and drivers are killed at random moments, sometimes two at once. The
last run of a seed is left to end; then every published object must be as in a local run, the scratch folder empty,
and a run without faults must find nothing to do.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

ROOT = Path(__file__).resolve().parents[1]
if not __package__: sys.path[0] = str(ROOT)  # fmt: skip

import tyro
from rich.table import Table

from gristmill.command import wide_console
from tests.gristmill_cli.corpus import tree
from tests.object_faults import Seldom
from tests.object_store import Store, object_store

LEASE_SECONDS = "2"


def chaos_storage(
    corpus: Annotated[Path, tyro.conf.Positional],
    folder: Path,
    seeds: int = 20,
    options: str = "",
    share: float = 0.02,
    kills: int = 3,
) -> Table:
    """Run the pipeline in a bucket, with faults and kills; raises AssertionError with the seed if a byte differs.

    Args:
        corpus: CORPUS/<source>/**.
        folder: Folder for the local run and for scratch; it is removed first.
        seeds: Number of rounds.
        options: More options of `gristmill run`.
        share: Share of the requests that fail.
        kills: Most kills in a round.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "scratch").mkdir(parents=True)
    done = Counter[str]()
    with object_store() as store:
        store.upload_tree(corpus, "corpus")
        assert _start(store, folder, corpus, folder / "local", options).wait() == 0
        for seed in range(seeds):
            out, remote = Path(f"s3://bucket/run{seed}"), Path("s3://bucket/corpus")
            store.fault = faults = Seldom(seed, share)
            for _ in range(random.Random(seed).randrange(kills + 1)):
                _kill(random.Random(f"{seed} {done['runs']}"), store, folder, remote, out, options, done)
            _finish(store, folder, remote, out, options)
            store.fault, left = None, list((folder / "scratch").iterdir())
            found = {name: data for name, data in store.tree(out.name).items() if _is_published(name)}
            assert found == tree(folder / "local"), f"seed {seed}: {out} differs from {folder / 'local'}"
            assert not left, f"seed {seed}: {left}"
            again = [line for line in _finish(store, folder, remote, out, options).splitlines() if " read = " in line]
            assert again and all("done already" in line for line in again), f"seed {seed}: {again}"
            done["faults"] += faults.made
            done["seeds"] += 1
    table = Table("event", "times", title="every byte as in a local run", box=None)
    for event, times in sorted(done.items()):
        table.add_row(event, f"{times:,}")
    return table


def _kill(
    chance: random.Random, store: Store, folder: Path, corpus: Path, out: Path, options: str, done: Counter[str]
) -> None:
    """Start a run, or two at once, and kill them at a random moment."""
    starts = [_start(store, folder, corpus, out, options) for _ in range(chance.choice([1, 1, 2]))]
    time.sleep(chance.uniform(0.5, 15))
    for process in starts:
        done["runs"] += 1
        done["kills"] += process.poll() is None
        process.send_signal(signal.SIGKILL)
        errors = process.communicate()[1]
        assert process.returncode in (0, -signal.SIGKILL) and "Traceback" not in errors, f"{out}: {errors}"


def _finish(store: Store, folder: Path, corpus: Path, out: Path, options: str) -> str:
    process = _start(store, folder, corpus, out, options)
    errors = process.communicate()[1]
    assert process.returncode == 0, f"{out}: {errors}"
    return errors


def _is_published(name: str) -> bool:
    return ".gristmill/" not in name and name != "run.json"


def _start(store: Store, folder: Path, corpus: Path, out: Path, options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gristmill_cli", "run", "--corpus", corpus, "--out", out, *options.split()]
    environment = {**os.environ, **store.environment, "GRISTMILL_LEASE_SECONDS": LEASE_SECONDS}
    return subprocess.Popen(
        [*command, "--scratch", folder / "scratch"], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


if __name__ == "__main__":
    wide_console().print(tyro.cli(chaos_storage))
