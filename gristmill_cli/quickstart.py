"""Command: the quick start, from documents on this machine to a trained language model."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from gristmill.arguments import check_words, option_name
from gristmill.command import given_words, run_with_exit_code
from gristmill.config import load_config, take_option
from gristmill.console import wide_console
from gristmill.errors import UsageError
from gristmill.storage.files import reject_remote, reject_unknown_scheme
from gristmill_cli.benchmarks.make_tasks import make_tasks
from gristmill_cli.harvest import harvest_corpus
from gristmill_cli.run import run
from gristmill_cli.run_config import RunConfig

PIPELINE = Path(__file__).with_name("quickstart_pipeline.toml")
TRAINING = Path(__file__).with_name("quickstart_training.toml")

# options of the pipeline by section, and options without a section; all others are the trainer's
_PROCESSES = 2  # that train
_SECTIONS = ("normalize", "apply", "filter", "lines", "decontaminate", "dedup", "mix", "tokenizer")
_SINGLE = ("text_column", "max_malformed", "memory", "workers", "recipe")

_ITEMS = 50  # of each task

HELP = """\
usage: gristmill quickstart [CORPUS] [--out PATH] [options, such as --optim.steps 100]

Gather a corpus from this machine, run the data pipeline on it, and train a small
Llama with two processes, which then writes a text. Make tasks of the held-out text,
to score the model in. Give CORPUS, a folder of <source>/*.jsonl or other formats, to
use your own documents instead. Run the same command again after an interruption: it
resumes.

options:
  -h, --help              Show this help and exit.
  --out PATH              Folder for all output. (default: quickstart)
  --text_column, --max_malformed, --memory, --normalize.read_also and so on
                          As in `gristmill run`, for the pipeline.
  --model.width, --optim.steps and so on
                          As in `gristmill train`, for the trainer."""


def main(argv: Sequence[str] | None = None) -> None:
    """`gristmill quickstart [CORPUS] [--out DIR] [options …]`: exits with 0, or the failed step's code."""
    words = given_words(argv)
    sys.exit(run_with_exit_code(lambda: _start(words)))


def _start(words: list[str]) -> None:
    if {"-h", "--help"} & {*words}:
        print(HELP, flush=True)
        return
    check_words(words, {})
    out, others = take_option(words, "--out")
    # The corpus comes before all other options: after one, it would look like its value.
    corpus: Path | None = None
    if others and not option_name(others[0]):
        corpus = Path(others.pop(0))
    quickstart(corpus, Path(out or "quickstart"), others)


def quickstart(corpus: Path | None, out: Path, options: Sequence[str] = ()) -> None:
    """Run the quick start into `out`, with `options` of the pipeline and the trainer; print the paths of its results.

    Without `corpus`, gathers one from this machine into `out`/corpus. Raises UsageError for a wrong option or if
    torch or matplotlib is not installed, any GristmillError of a step, and SystemExit with the trainer's exit code
    if it fails.
    """
    reject_remote(out)
    reject_unknown_scheme(corpus or out)
    out = out.resolve()
    pipeline, training = divide_options(options)
    folders = {"data.train": "data/tokens/train", "data.holdout": "data/tokens/holdout", "out_dir": "model"}
    written = list[str]()
    for key, name in folders.items():
        written += [f"--{key}", str(out / name)]
    training = ["--config", str(TRAINING), *written, *training]
    check_training(training, _PROCESSES)
    pipeline = ["--corpus", str((corpus or out / "corpus").resolve()), "--out", str(out / "data"), *pipeline]
    config = load_config(RunConfig, ["--config", str(PIPELINE), *pipeline], prog="gristmill quickstart")
    console = wide_console()
    if corpus is None:
        _heading("1. gather a corpus from this machine")
        console.print(harvest_corpus(config.corpus))
    else:
        _heading(f"1. use the corpus {config.corpus}")

    _heading("2. run the data pipeline")
    funnel = run(config)

    _heading("3. train a model with two processes")
    train_with_torchrun(training, _PROCESSES)

    _heading("4. the funnel: documents kept and removed")
    console.print(funnel)

    _heading("5. what the model writes, so early")
    _write_text(out / "model")

    _heading("6. tasks made of the holdout")
    tasks = out / "tasks"
    try:
        console.print(make_tasks(out / "data/tokens/holdout", tasks, _ITEMS))
    except UsageError as error:  # a holdout of short documents, or of a language without spaces
        console.print(f"none: {error}")

    _heading("7. the loss curve")
    from training.reporting.plot import plot  # torch takes seconds to import

    picture = plot(out / "model")
    needed = ""
    if not find_spec("lm_eval"):
        needed = "\n            (once before: pip install 'gristmill[eval]')"
    print(f"""
corpus      {config.corpus}
data        {out / "data"}  (funnel.json, tokens/, tokenizer/, and the output of each stage)
model       {out / "model"}  (checkpoints/, metrics.jsonl, summary.json)
more text   gristmill generate {out / "model"} "The"
scores      gristmill evaluate {out / "model"} --tasks {tasks}/*.yaml --out {out / "model"}/scores.json{needed}
report      gristmill report {out / "model"}
loss curve  {picture}
TensorBoard tensorboard --logdir {out / "model"}""")


def _write_text(model: Path) -> None:
    """Let the model continue a word, in a process of its own, as a reader would."""
    words = [sys.executable, "-m", "gristmill_cli.generate", str(model), "The", "--tokens", "60", "--device", "cpu"]
    subprocess.run(words, check=False)


def divide_options(options: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of options of the pipeline, and all others, which are the trainer's."""
    pipeline = list[str]()
    training = list[str]()
    chosen = training
    for word in options:
        name = option_name(word).removeprefix("--")
        if name in _SINGLE or name.partition(".")[0] in _SECTIONS:
            chosen = pipeline
        elif name:
            chosen = training
        chosen.append(word)
    return pipeline, training


def _heading(text: str) -> None:
    print(f"\n== {text}", flush=True)  # flushed, to precede the output of the trainer's processes


def check_training(trainer_options: Sequence[str], processes: int) -> None:
    """Raise UsageError for what would stop training after the whole data half: a missing package, a wrong option."""
    for package in ("torch", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"training needs {package}, which is not installed: pip install 'gristmill[train]'")
    from training.config import TrainConfig  # torch takes seconds to import
    from training.run_plan import check_sizes

    config = load_config(TrainConfig, trainer_options, prog="gristmill quickstart")
    config.check()
    check_sizes(config, processes)


def train_with_torchrun(options: Sequence[str], processes: int) -> None:
    """Train with torchrun, under this Python interpreter. Raises SystemExit with its exit code if it fails."""
    # -P, as the current folder may have a package `training` of the user
    launcher = ["-P", "-m", "gristmill_cli", "torchrun", "--standalone", f"--nproc_per_node={processes}"]
    launcher += ["-m", "gristmill_cli.train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *launcher, *options], env=environment)
    # The trainer saves a checkpoint at a signal: pass it on and wait. After Ctrl-C it arrives twice, and once counts.
    previous = {
        number: signal.signal(number, lambda sent, _: process.send_signal(sent))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        code = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if code < 0:  # minus the signal that ended it
        code = 128 - code
    if code:
        sys.exit(code)
