"""Command: complete runs that ship with Gristmill: list them, and run one, from a corpus to a model."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from gristmill.command import given_words, run_with_exit_code
from gristmill.config import load_config, take_option
from gristmill.console import wide_console
from gristmill.errors import UsageError, require
from gristmill.storage.files import reject_unknown_scheme
from gristmill_cli.quickstart import check_training, divide_options, train_with_torchrun
from gristmill_cli.run import run_and_print
from gristmill_cli.run_config import RunConfig

FOLDER = Path(__file__).parent
DATA = "data.toml"
TRAINING = "training.toml"
PAGE = "README.md"

HELP = """\
usage: gristmill recipe list
       gristmill recipe show NAME
       gristmill recipe run NAME --corpus FOLDER --out DIR [--processes N] [options …]

Complete runs, from a corpus to a model: a file of options for the data, one for the
training, and a page with what to expect. Run the same command again after an
interruption: it resumes.

options of run:
  -h, --help              Show this help and exit.
  --corpus FOLDER         The corpus, as the recipe's page describes it.
  --out DIR               Folder for all output: DIR/data and DIR/model.
  --processes N           Processes that train. (default: one for each GPU, or 1)
  --mix.holdout, --tokenizer.file, --recipe and so on
                          As in `gristmill run`, for the data.
  --optim.steps, --init_from and so on
                          As in `gristmill train`, for the training."""


@dataclass(frozen=True)
class RunRecipe:
    """A complete run: a folder with a file for the data, one for the training, and a page."""

    name: str

    @property
    def folder(self) -> Path:
        """Return the folder of its files."""
        return FOLDER / self.name

    @property
    def page(self) -> str:
        """Return its page, as Markdown."""
        return (self.folder / PAGE).read_text(encoding="utf-8")

    @property
    def summary(self) -> str:
        """Return the first paragraph of its page, after the title, in one line."""
        _, _, text = self.page.partition("\n\n")
        return " ".join(text.partition("\n\n")[0].split())

    @classmethod
    def all(cls) -> list["RunRecipe"]:
        """Return all recipes, by name."""
        return [cls(path.parent.name) for path in sorted(FOLDER.glob(f"*/{TRAINING}"))]

    @classmethod
    def named(cls, name: str) -> "RunRecipe":
        """Return a recipe. Raises UsageError where there is none of this name."""
        names = [recipe.name for recipe in cls.all()]
        require(name in names, f"expected a recipe, got {name!r}; try {', '.join(names)}")
        return cls(name)


def main(argv: Sequence[str] | None = None) -> None:
    """`gristmill recipe list`, `show` or `run`: exits with 0, or the failed step's code."""
    words = given_words(argv)
    sys.exit(run_with_exit_code(lambda: _start(words)))


def _start(words: list[str]) -> None:
    if not words or {"-h", "--help"} & {*words}:
        print(HELP, flush=True)
        return
    kind, *rest = words
    if kind == "list":
        require(not rest, f"recipe list takes no {' '.join(rest)}; try gristmill recipe show NAME")
        wide_console().print(list_recipes())
    elif kind == "show":
        require(len(rest) == 1, "expected the name of one recipe; try gristmill recipe list")
        print(RunRecipe.named(rest[0]).page)
    elif kind == "run":
        require(bool(rest), "expected the name of a recipe; try gristmill recipe list")
        run_recipe(RunRecipe.named(rest[0]), rest[1:])
    else:
        raise UsageError(f"expected list, show or run, got {kind!r}; try gristmill recipe --help")


def list_recipes() -> Table:
    """Return a table of the recipes."""
    table = Table("recipe", "what it is", box=None, pad_edge=False)
    for recipe in RunRecipe.all():
        table.add_row(recipe.name, Text(recipe.summary))
    return table


def run_recipe(recipe: RunRecipe, words: Sequence[str]) -> None:
    """Run a recipe with options of its own, of the data and of the training.

    Raises UsageError for a wrong option, any GristmillError of the data, and SystemExit with the trainer's exit code.
    """
    corpus, others = take_option(list(words), "--corpus")
    out, others = take_option(others, "--out")
    processes, others = take_option(others, "--processes")
    if corpus is None or out is None:
        raise UsageError(f"recipe run {recipe.name} needs --corpus FOLDER and --out DIR; see gristmill recipe show")
    folder = Path(out)
    reject_unknown_scheme(folder)
    count = _count_processes(processes)
    data_options, training_options = divide_options(others)
    data = ["--config", str(recipe.folder / DATA), "--corpus", corpus, "--out", str(folder / "data"), *data_options]
    training = ["--config", str(recipe.folder / TRAINING)]
    for option, name in (("data.train", "data/tokens/train"), ("data.holdout", "data/tokens/holdout")):
        training += [f"--{option}", str(folder / name)]
    training += ["--out_dir", str(folder / "model"), *training_options]
    check_training(training, count)
    run_and_print(load_config(RunConfig, data, prog="gristmill recipe run"))
    train_with_torchrun(training, count)


def _count_processes(given: str | None) -> int:
    """Return how many processes train: as given, or one for each GPU. Raises UsageError for what is no number."""
    if given is not None:
        require(given.isdecimal() and int(given) > 0, f"--processes {given}: expected a number from 1 on")
        return int(given)
    if shutil.which("nvidia-smi") is None:
        return 1
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return max(1, listed.count("GPU "))
