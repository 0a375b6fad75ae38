"""Fault injection in a bucket: runs whose requests fail and whose processes are killed write the bytes of a local run.

    python benchmarks/chaos_storage.py CORPUS --folder /tmp/chaos --seeds 20 --options="--tokenizer.vocab_size 500"

Each seed starts runs on a store that is moto's, in this process: a share of all requests meets a busy store, a dropped
connection, a lost answer, one that is cut off or a slow one, each verb about as often. Meanwhile a driver is killed, or
one of two drivers, a worker, shards; or a driver is stopped until another has taken over, and comes back late. The last
run of a seed is left to end; then every published object must be as in a local run, the scratch folder empty, and a
run without faults must find nothing to do.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

ROOT = Path(__file__).resolve().parents[1]
if not __package__: sys.path[0] = str(ROOT)  # fmt: skip

import tyro
from rich.table import Table

from benchmarks.process_memory import descendants
from gristmill.console import wide_console
from tests.gristmill_cli.corpus import tree
from tests.object_faults import FAULTS, Evenly
from tests.object_store import Store, object_store

LEASE_SECONDS = 2.0
SHARDS = 3
_TAKEN_OVER = "another process has taken over the work"  # in the error of a driver that comes back late
_WORKER_DIED = "a worker process died"


def chaos_storage(
    corpus: Annotated[Path, tyro.conf.Positional],
    folder: Path,
    seeds: int = 20,
    options: str = "",
    share: float = 0.02,
    events: int = 3,
    first_seed: int = 0,
    minutes: float = 60.0,
) -> Table:
    """Run the pipeline in a bucket, with faults and kills; raises AssertionError with the seed if a byte differs.

    Args:
        corpus: CORPUS/<source>/**.
        folder: Folder for the local run and for scratch; it is removed first.
        seeds: Number of rounds.
        options: More options of `gristmill run`.
        share: Share of the requests that fail.
        events: Most events in a round; each has one at least.
        first_seed: Seed of the first round.
        minutes: No round begins after so many.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "scratch").mkdir(parents=True)
    done, made, ends = Counter[str](), Counter[tuple[str, str]](), time.monotonic() + 60 * minutes
    with object_store() as store:
        store.upload_tree(corpus, "corpus")
        runs = Runs(store, folder, corpus, folder / "local", options, done)
        began = time.monotonic()
        runs.finish()
        runs.seconds, expected = time.monotonic() - began, tree(folder / "local")
        runs.corpus = Path("s3://bucket/corpus")
        for seed in range(first_seed, first_seed + seeds):
            if time.monotonic() > ends:
                break
            chance, runs.out = random.Random(seed), Path(f"s3://bucket/run{seed}")
            store.fault = faults = Evenly(seed, share)
            for i in range(chance.randint(1, events)):
                event = EVENTS[seed % len(EVENTS)] if i == 0 else chance.choice(EVENTS)
                done[event.__name__.replace("_", " ")] += 1
                event(runs, chance)
            runs.finish()
            store.fault, left = None, list((folder / "scratch").iterdir())
            found = {name: data for name, data in store.tree(runs.out.name).items() if _is_published(name)}
            differing = sorted(name for name in found | expected if found.get(name) != expected.get(name))
            assert not differing, f"seed {seed}: {differing} of {runs.out} differ from {folder / 'local'}"
            assert not left, f"seed {seed}: {left}"
            again = [line for line in runs.finish().splitlines() if " read = " in line]
            assert again and all("done already" in line for line in again), f"seed {seed}: {again}"
            made += faults.made
            done["seeds"] += 1
            print(f"seed {seed}: {dict(done)}, {made.total():,} faults", file=sys.stderr, flush=True)
    return _table(done, made)


@dataclass
class Runs:
    """Starts runs that write to `out`, and counts in `done` what became of them; a whole one takes `seconds`."""

    store: Store
    folder: Path
    corpus: Path
    out: Path
    options: str
    done: Counter[str]
    seconds: float = 0.0
    _started: list[int] = field(default_factory=list)

    def start(self, *more: str) -> "Run":
        """Start a run, with more options, in a process group of its own."""
        command = [sys.executable, "-m", "gristmill_cli", "run", "--corpus", str(self.corpus), "--out", str(self.out)]
        environment = {**os.environ, **self.store.environment, "GRISTMILL_LEASE_SECONDS": str(LEASE_SECONDS)}
        self._started.append(1)
        said = self.folder / f"said{len(self._started)}"
        with said.open("w") as file:
            process = subprocess.Popen(
                [*command, *self.options.split(), "--scratch", str(self.folder / "scratch"), *more], cwd=ROOT,
                env=environment, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True,
            )  # fmt: skip
        self.done["runs"] += 1
        return Run(process, said)

    def finish(self) -> str:
        """Run to the end, which must be a good one; return what was printed."""
        run = self.start()
        run.end()
        return run.said.read_text()

    def wait(self, chance: random.Random, *runs: "Run") -> None:
        """Wait for a random moment of a run, or until one has ended."""
        ends = time.monotonic() + chance.uniform(0.1, 1.0) * self.seconds
        while time.monotonic() < ends and all(run.process.poll() is None for run in runs):
            time.sleep(0.02)


@dataclass
class Run:
    """A process of a run, and the file with what it says."""

    process: subprocess.Popen[bytes]
    said: Path

    def end(self, *allowed: str) -> None:
        """Wait for the end: a good one, or with one of the `allowed` errors; never with a traceback."""
        code, said = self.process.wait(), self.said.read_text()
        is_good = code == 0 or (code == 1 and any(error in said for error in allowed))
        assert is_good and "Traceback" not in said, f"{self.said} ended with {code}: {said}"

    def kill(self) -> bool:
        """Kill the process, and check what it said; return whether it still ran."""
        was_running = self.process.poll() is None
        self.process.kill()
        code, said = self.process.wait(), self.said.read_text()
        assert code in (0, -signal.SIGKILL) and "Traceback" not in said, f"{self.said} ended with {code}: {said}"
        return was_running

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for another one that has the lock, or has waited."""
        return "waiting for process" in self.said.read_text()


def driver(runs: Runs, chance: random.Random) -> None:
    """Event: the driver is killed."""
    run = runs.start()
    runs.wait(chance, run)
    runs.done["killed"] += run.kill()


def one_of_two_drivers(runs: Runs, chance: random.Random) -> None:
    """Event: of two drivers one is refused the lock; that which has it is killed, and the other takes over."""
    first, second = _two_drivers(runs, chance)
    runs.done["killed"] += first.kill()
    second.end()
    runs.done["took over"] += second.is_waiting


def late_driver(runs: Runs, chance: random.Random) -> None:
    """Event: the driver and its workers are stopped, another one takes over, and they come back in the middle."""
    first, second = _two_drivers(runs, chance)
    with suppress(ProcessLookupError):
        os.killpg(first.process.pid, signal.SIGSTOP)
    time.sleep(2 * LEASE_SECONDS)
    runs.wait(chance, second)
    with suppress(ProcessLookupError):
        os.killpg(first.process.pid, signal.SIGCONT)
    for run in (first, second):
        run.end(_TAKEN_OVER)
    assert 0 in (first.process.returncode, second.process.returncode)
    runs.done["came back too late"] += first.process.returncode == 1


def worker(runs: Runs, chance: random.Random) -> None:
    """Event: a worker process, or the server that forks them, is killed; the driver ends with one line."""
    run = runs.start("--workers", "2")
    runs.wait(chance, run)
    below = [pid for pid in descendants(run.process.pid) if _is_worker(pid)]
    if below and run.process.poll() is None:
        with suppress(ProcessLookupError):
            os.kill(chance.choice(below), signal.SIGKILL)
            runs.done["killed"] += 1
    run.end(_WORKER_DIED)


def _is_worker(pid: int) -> bool:
    """Whether a process is none of Python's own, which says much when it is killed."""
    with suppress(OSError):
        return b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def shards(runs: Runs, chance: random.Random) -> None:
    """Event: of the processes that share a run all but one or two are killed; these end it."""
    team = [runs.start("--workers", "1", "--shard", f"{i}/{SHARDS}") for i in range(SHARDS)]
    runs.wait(chance, *team)
    chance.shuffle(team)
    for run in [team.pop() for _ in range(chance.randint(1, SHARDS - 1))]:
        runs.done["killed"] += run.kill()
    for run in team:
        run.end()


EVENTS = (driver, one_of_two_drivers, late_driver, worker, shards)


def _two_drivers(runs: Runs, chance: random.Random) -> tuple[Run, Run]:
    """Two drivers of one run at a random moment: that which has the lock first."""
    one, other = runs.start("--workers", "2"), runs.start("--workers", "2")
    runs.wait(chance, one, other)
    return (other, one) if one.is_waiting else (one, other)


def _is_published(name: str) -> bool:
    return ".gristmill/" not in name and name != "run.json"


def _table(done: Counter[str], made: Counter[tuple[str, str]]) -> Table:
    """What happened, and the faults of each verb."""
    table = Table("event", *(fault.__name__ for fault in FAULTS), title="every byte as in a local run", box=None)
    for event, times in sorted(done.items()):
        table.add_row(event, f"{times:,}")
    for verb in sorted({verb for verb, _ in made}):
        table.add_row(f"faults of a {verb}", *(f"{made[verb, fault.__name__]:,}" for fault in FAULTS))
    return table


if __name__ == "__main__":
    wide_console().print(tyro.cli(chaos_storage))
