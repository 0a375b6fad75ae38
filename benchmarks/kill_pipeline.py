"""Fault injection: kills, starts twice, moves and touches a pipeline run at random, and compares it with a fresh run.

    python benchmarks/kill_pipeline.py CORPUS --folder /tmp/kills --kills 200 --options="--tokenizer.vocab_size 500"
    GRISTMILL_LEASE_SECONDS=3 python benchmarks/kill_pipeline.py CORPUS --folder /tmp/kills --kills 40 --shards 3

Between two kills the run's folder may be moved, its input touched, its number of workers changed, an output damaged or
removed; a second process may be started beside the first. At the end of each round every published byte must equal
those of a run that nothing happened to, and a last start must find nothing to do.
"""

import hashlib
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

from gristmill.console import wide_console
from gristmill.storage.files import walk

NOT_COMPARED = ("run.json",)  # holds the number of workers
KILLS_A_ROUND = 10


def kill_pipeline(
    corpus: Annotated[Path, tyro.conf.Positional], folder: Path, kills: int = 200, options: str = "", seed: int = 0,
    shards: int = 0,
) -> Table:  # fmt: skip
    """Kill runs of the pipeline `kills` times; raises AssertionError with the seed if a byte differs.

    Args:
        corpus: CORPUS/<source>/**; it is copied.
        folder: Folder for the copy and the runs.
        kills: Number of kills, in rounds of ten.
        options: More options of `gristmill run`.
        seed: Seed of the kills; 0 draws one.
        shards: Processes that share each run (--shard i/n), of which all but one may be killed; 0: no --shard.
    """
    chance = random.Random(seed := seed or random.randrange(1 << 30))
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(corpus, folder / "corpus")
    start = time.monotonic()
    assert _start(folder / "corpus", folder / "fresh", options).wait() == 0
    seconds, expected, done = time.monotonic() - start, hash_tree(folder / "fresh"), Counter[str]()
    while done["kill"] < kills:
        out = folder / f"round{done['round']}"
        for _ in range(KILLS_A_ROUND):
            out = disturb(chance, folder / "corpus", out, done)
            _kill(chance, folder / "corpus", out, options, seconds, done, shards)
        process = _start(folder / "corpus", out, f"{options} --workers 2")
        assert process.wait() == 0, f"seed {seed}, {out}"
        assert hash_tree(out) == expected, f"seed {seed}: {out} differs from {folder / 'fresh'}"
        again = _start(folder / "corpus", out, options, stderr=subprocess.PIPE).communicate()[1]
        stages = [line for line in again.splitlines() if " read = " in line]
        assert stages and all("done already" in line for line in stages), f"seed {seed}, {out}: {again}"
        shutil.rmtree(out)
        done["round"] += 1
        print(f"seed {seed}: {done['kill']:,} kills in {done['round']:,} rounds", file=sys.stderr, flush=True)
    table = Table("event", "times", title=f"seed {seed}: every byte as in a fresh run", box=None)
    for event, times in sorted(done.items()):
        table.add_row(event, f"{times:,}")
    return table


def disturb(chance: random.Random, corpus: Path, out: Path, done: Counter[str]) -> Path:
    """Do something to a run's folder or input that must change no result; return the folder, which may have moved."""
    event = chance.choice(["nothing", "nothing", "move", "touch", "damage", "remove", "copy"])
    files = list(walk(out)) if out.exists() else []
    if event == "move" and out.exists():
        out = out.rename(out.with_name(f"moved{done['move']}"))
    elif event == "copy" and out.exists():
        copied = out.with_name(f"copied{done['copy']}")
        shutil.copytree(out, copied, copy_function=shutil.copyfile)
        shutil.rmtree(out)
        out = copied
    elif event == "touch":
        chance.choice(list(walk(corpus))).touch()
    elif event == "damage" and files:
        chance.choice(files).write_bytes(b"damaged")
    elif event == "remove" and files:
        chance.choice(files).unlink()
    done[event] += 1
    return out


def _kill(
    chance: random.Random, corpus: Path, out: Path, options: str, seconds: float, done: Counter[str], shards: int
) -> None:
    """Start a run, or two at once, or its shards, and kill it at a random moment: the process, or all of its own.

    Of shards one may live: it takes over and ends the run.
    """
    workers = chance.choices([1, 2, 3], k=shards or chance.choice([1, 1, 2]))
    each = [f" --shard {i}/{shards}" if shards else "" for i in range(len(workers))]
    words = [f"{options} --workers {number}{shard}" for number, shard in zip(workers, each, strict=True)]
    starts = [_start(corpus, out, word, stderr=subprocess.PIPE) for word in words]
    done["two at once"] += len(starts) > 1 and not shards
    if shards and chance.random() < 0.5:
        survivor = starts.pop(chance.randrange(shards))
        done["one lives"] += 1
        _kill_each(chance, starts, out, seconds, done)
        errors = survivor.communicate()[1]
        assert survivor.returncode == 0, f"{out} ended with {survivor.returncode}: {errors}"
        scratch = list((out / ".gristmill").glob("*.scratch"))
        assert not scratch, f"{scratch} is left"
        return
    _kill_each(chance, starts, out, seconds, done)


def _kill_each(
    chance: random.Random, starts: list[subprocess.Popen[str]], out: Path, seconds: float, done: Counter[str]
) -> None:
    ends = time.monotonic() + 1.2 * seconds * chance.random() ** 2  # most of a run that was killed before is done
    while time.monotonic() < ends and any(process.poll() is None for process in starts):
        time.sleep(0.01)
    for process in starts:
        if process.poll() is None:
            done["kill"] += 1
        if chance.random() < 0.5:
            process.kill()
        elif process.poll() is None:
            os.killpg(process.pid, chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
        errors, killed = process.communicate()[1], (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, 130, 143)
        is_begun = "init_import_site" not in errors  # else Python itself was interrupted, before a line of ours
        assert process.returncode in (0, *killed) or not is_begun, f"{out} ended with {process.returncode}: {errors}"


def hash_tree(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that a run wrote for others to read, by relative name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in walk(folder)
        if path.name not in NOT_COMPARED
    }


def _start(corpus: Path, out: Path, options: str, stderr: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gristmill_cli", "run", "--corpus", corpus, "--out", out, *options.split()]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=stderr, text=True, start_new_session=True
    )


if __name__ == "__main__":
    wide_console().print(tyro.cli(kill_pipeline))
