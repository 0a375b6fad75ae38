"""Benchmark: text to shuffled tokens without near-duplicates, ours beside datatrove, of one corpus or several sizes.

    python benchmarks/bench_pipeline.py CORPUS … --peer PYTHON --picture scale.svg

PYTHON is an interpreter with datatrove, tokenizers, nltk, spacy, orjson, zstandard and xxhash below 4, of its own
environment. Both sides read the same files with as many workers, and encode with the same tokenizer.json, trained
before on a sample of the first corpus. Ours also removes exact copies and short documents, compares near-copies, mixes
and holds out.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not __package__: sys.path[0] = str(ROOT)  # fmt: skip

import numpy as np
import psutil
import tyro
from matplotlib.figure import Figure
from rich.table import Table
from tyro.conf import Positional

from benchmarks.process_memory import descendants, resident_memory
from gristmill.console import wide_console
from gristmill.io.readers import read_corpus

_INTERVAL = 0.2  # seconds between two looks at the processes: what one computes after the last is missed
_SAMPLE_DOCUMENTS = 2_000


@dataclass(frozen=True)
class Measurement:
    """A run of one side: MB of text, seconds, seconds of all cores, GB of memory at the peak, GB left on disk."""

    side: str
    megabytes: float
    seconds: float
    core_seconds: float
    memory: float
    disk: float


def main(
    corpora: Positional[tuple[Path, ...]],
    peer: Path | None = None,
    workers: int = 2,
    memory: str = "auto",
    vocab_size: int = 4096,
    picture: Path | None = None,
    folder: Path | None = None,
) -> None:
    """Print seconds, seconds of all cores, memory and disk of each run, and the exponents of ours.

    Args:
        corpora: Corpus folders, from small to large.
        peer: Interpreter with datatrove; without it only ours runs. It runs on the first corpus alone.
        workers: Processes of each side.
        memory: Our --memory.
        vocab_size: Size of the tokenizer that is trained.
        picture: Where to draw the seconds of all cores over the size, .svg or .png.
        folder: Where to write; a temporary folder by default.
    """
    rows = list[Measurement]()
    with tempfile.TemporaryDirectory(dir=folder) as name:
        work = Path(name)
        tokenizer = train(corpora[0], work / "tokenizer.json", vocab_size)
        for corpus in corpora:
            command = [
                sys.executable, "-m", "gristmill_cli", "run", "--corpus", corpus, "--out", work / "ours", "--workers",
                workers, "--memory", memory, "--tokenizer.file", tokenizer,
            ]  # fmt: skip
            ours = measure("ours", command, work / "ours")
            rows.append(ours)
            if peer and corpus == corpora[0]:
                script = Path(__file__).with_name("pipeline_peer.py")
                command = [peer, script, corpus, tokenizer, work / "peer", workers]
                rows.append(measure("datatrove", command, work / "peer", ours.megabytes))
    print_table(rows)
    if picture:
        draw(rows, picture)


def train(corpus: Path, output: Path, vocab_size: int) -> Path:
    """Train a byte-level BPE tokenizer on some documents; return its file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = list[str]()
    for number, document in enumerate(read_corpus(corpus)):
        if number == _SAMPLE_DOCUMENTS:
            break
        texts.append(document.text)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(output))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<s>"}
    output.with_name("tokenizer_config.json").write_text(json.dumps(config))
    return output


def measure(side: str, command: Sequence[object], out: Path, megabytes: float = 0.0) -> Measurement:
    """Run a command that writes to `out`, on a corpus of so many MB of text; ours says itself how many it read."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    core_seconds = dict[int, float]()  # by process
    memory = 0
    started = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        with subprocess.Popen(list(map(str, command)), env=environment, stdout=log, stderr=log) as child:
            while child.poll() is None:
                processes = [child.pid, *descendants(child.pid)]
                for process in processes:
                    core_seconds[process] = seconds_of(process, core_seconds.get(process, 0.0))
                memory = max(memory, sum(resident_memory(process)[0] for process in processes))
                time.sleep(_INTERVAL)
        seconds = time.perf_counter() - started
        if child.returncode:
            log.seek(0)
            sys.exit(log.read().decode(errors="replace")[-3000:])
    disk = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    if not megabytes:
        megabytes = text_read(out) / 1e6
    shutil.rmtree(out)
    row = Measurement(side, megabytes, seconds, sum(core_seconds.values()), memory / 1e9, disk / 1e9)
    print(row, flush=True)
    return row


def seconds_of(process: int, before: float) -> float:
    """Return the seconds that a process has computed; `before` if it has ended."""
    with suppress(psutil.Error):
        times = psutil.Process(process).cpu_times()
        return times.user + times.system
    return before


def text_read(out: Path) -> int:
    """Return the bytes of text that our run read, as its funnel says."""
    went = json.loads((out / "funnel.json").read_text())["went"]
    return sum(by_reason["read"]["bytes"] for by_reason in went.values())


def print_table(rows: Sequence[Measurement]) -> None:
    """Print a row for each run, and how ours grows: the exponent between its smallest and its largest corpus."""
    table = Table("", "MB of text", "seconds", "seconds of cores", "MB/s a core", "GB memory", "GB left on disk")
    for row in rows:
        speed = row.megabytes / row.core_seconds
        numbers = (row.seconds, row.core_seconds, speed, row.memory, row.disk)
        table.add_row(row.side, f"{row.megabytes:,.0f}", *(f"{number:,.2f}" for number in numbers))
    wide_console().print(table)
    ours = [row for row in rows if row.side == "ours"]
    if len(ours) > 1:
        growth = np.log(ours[-1].megabytes / ours[0].megabytes)
        exponent = np.log(ours[-1].core_seconds / ours[0].core_seconds) / growth
        print(f"seconds of cores grow as MB to the power of {exponent:.3f}")


def draw(rows: Sequence[Measurement], picture: Path) -> None:
    """Draw the seconds of all cores over the size, both in logarithms."""
    figure = Figure((6, 4), layout="constrained")
    axes = figure.subplots()
    for side in dict.fromkeys(row.side for row in rows):
        of_side = [row for row in rows if row.side == side]
        axes.loglog([row.megabytes for row in of_side], [row.core_seconds for row in of_side], "o-", label=side)
    axes.set_xlabel("MB of text")
    axes.set_ylabel("seconds of all cores")
    axes.grid(which="both", alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(picture)


if __name__ == "__main__":
    tyro.cli(main)
