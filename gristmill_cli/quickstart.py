"""Command: the quick start, from documents on this machine to a trained language model."""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gristmill.command import run_with_exit_code, wide_console
from gristmill.config import load_config
from gristmill.errors import UsageError
from gristmill_cli.harvest_corpus import harvest_corpus
from gristmill_cli.run import run
from gristmill_cli.run_config import RunConfig

PIPELINE = Path(__file__).with_name("quickstart_pipeline.toml")
TRAINING = Path(__file__).with_name("quickstart_training.toml")

HELP = """\
Gather a corpus from this machine, run the data pipeline on it, and train a small Llama with two processes.
Give CORPUS, a folder of <source>/*.jsonl or other formats, to use your own documents instead.
Run the same command again after an interruption: it resumes.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """`gristmill quickstart [CORPUS] [--out DIR] [trainer options …]`: exits with 0, or the failed step's code."""
    parser = argparse.ArgumentParser(
        "gristmill quickstart", "%(prog)s [CORPUS] [--out DIR] [trainer options, such as --optim.steps 100]",
        description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("quickstart"), help="folder for all output (default: ./quickstart)"
    )
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The corpus can only come first: elsewhere, it would look like the value of a trainer option.
    corpus = Path(arguments.pop(0)) if arguments and not arguments[0].startswith("-") else None
    options, trainer_options = parser.parse_known_args(arguments)
    sys.exit(run_with_exit_code(lambda: quickstart(corpus, options.out, trainer_options)))


def quickstart(corpus: Path | None, out: Path, trainer_options: Sequence[str] = ()) -> None:
    """Run the quick start into `out`, and print the paths of its results.

    Without `corpus`, gathers one from this machine into `out`/corpus. Raises UsageError if torch is not
    installed, any GristmillError of a step, and SystemExit with the trainer's exit code if it fails.
    """
    if importlib.util.find_spec("torch") is None:
        raise UsageError("quickstart trains a model with torch, which is not installed: pip install 'gristmill[train]'")
    out = out.resolve()
    console = wide_console()
    if corpus is None:
        _heading("1. gather a corpus from this machine")
        corpus = out / "corpus"
        console.print(harvest_corpus(corpus))
    else:
        corpus = corpus.resolve()
        _heading(f"1. use the corpus {corpus}")

    _heading("2. run the data pipeline")
    pipeline = ["--config", str(PIPELINE), "--corpus", str(corpus), "--out", str(out / "data")]
    funnel = run(load_config(RunConfig, pipeline, prog="gristmill quickstart"))

    _heading("3. train a model with two processes")
    _train(out / "data" / "tokens", out / "model", trainer_options)

    _heading("4. the funnel: documents kept and removed")
    console.print(funnel)

    _heading("5. the loss curve")
    from training.reporting.plot import plot  # torch takes seconds to import

    picture = plot(out / "model")
    print(f"""
corpus      {corpus}
data        {out / "data"}  (funnel.json, tokens/, tokenizer/, and the output of each stage)
model       {out / "model"}  (checkpoints/, metrics.jsonl, summary.json)
loss curve  {picture}
TensorBoard tensorboard --logdir {out / "model"}""")


def _heading(text: str) -> None:
    print(f"\n== {text}", flush=True)  # flushed, to precede the output of the trainer's processes


def _train(tokens: Path, out_dir: Path, options: Sequence[str]) -> None:
    """Train with torchrun, under this Python interpreter. Raises SystemExit with its exit code if it fails."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        "-m", "training.train", "--config", str(TRAINING), "--data.train", str(tokens / "train"),
        "--data.holdout", str(tokens / "holdout"), "--out_dir", str(out_dir), *options,
    ]  # fmt: skip
    # Ctrl-C reaches the trainer as well, which saves a checkpoint: wait for it.
    previous = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        code = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, previous)
    if code:
        sys.exit(code if code > 0 else 128 - code)
