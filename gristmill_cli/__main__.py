"""The command `gristmill`: runs the pipeline, one of its stages or the trainer by name."""

import difflib
import importlib
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Command(NamedTuple):
    """A command: what it runs, a line of help, and its other names; SlimPajama's names take its arguments, too."""

    target: str  # module:function, or several functions, which are subcommands; main parses its own arguments
    help: str
    aliases: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def functions(self) -> list[str]:
        return self.target.partition(":")[2].split(",")


GROUPS: dict[str, dict[str, Command]] = {
    "data: from raw text to token shards": {
        "quickstart": Command("gristmill_cli.quickstart:main", "gather a corpus and train a small model on it"),
        "recipe": Command("gristmill_cli.recipes.command:main", "list and run complete runs, from a corpus to a model"),
        "run": Command("gristmill_cli.run:main", "run the whole data pipeline; resumable"),
        "normalize": Command(
            "preprocessing.normalize_text:normalize_text", "normalise text to Unicode NFC", ("normalize_text",)
        ),
        "apply": Command("preprocessing.apply:apply", "run your own function over every document"),
        "filter-quality": Command(
            "preprocessing.filter_quality:filter_quality", "keep the documents that a recipe's rules allow"
        ),
        "preview": Command("gristmill_cli.preview:preview", "show what each rule of a recipe would remove"),
        "preview-scores": Command(
            "gristmill_cli.preview:preview_scores", "show how scores are distributed, and documents around a limit"
        ),
        "preview-chats": Command(
            "gristmill_cli.benchmarks.preview_chats:preview_chats", "show chats with the assistant's tokens marked"
        ),
        "remove-lines": Command("dedup.remove_lines:remove_lines", "remove lines or paragraphs that a corpus repeats"),
        "remove-spans": Command("dedup.remove_spans:remove_spans", "cut spans of text that a corpus repeats"),
        "decontaminate": Command(
            "preprocessing.decontaminate:decontaminate", "remove benchmark items from a corpus"
        ),
        "filter": Command("preprocessing.filter:filter", "list documents that are too short"),
        "mix": Command("preprocessing.shuffle_holdout:pass1", "drop listed documents, weight the sources", ("pass1",)),
        "shuffle": Command("preprocessing.shuffle_holdout:pass2", "shuffle, and split off a holdout", ("pass2",)),
        "drop-holdout": Command(
            "dedup.dedup_train:dedup_train", "remove holdout documents from the train set", ("dedup_train",)
        ),
        "decide": Command("preprocessing.mix:mix", "decide on a mix and its holdout, without writing text"),
        "encode": Command("preprocessing.encode:encode", "encode a mix once, and shuffle its tokens into shards"),
        "train-tokenizer": Command(
            "preprocessing.train_tokenizer:train_tokenizer", "train a tokenizer: SentencePiece, or byte-level BPE"
        ),
        "tokenize": Command(
            "preprocessing.tokenize_corpus:tokenize_corpus", "encode documents into token shards", ("tokenize_corpus",)
        ),
        "tokenize-chats": Command(
            "preprocessing.tokenize_chats:tokenize_chats", "encode chats, with masks of the assistant's tokens",
            ("tokenize_chats",),
        ),
        "train-scorer": Command(
            "preprocessing.train_scorer:train_scorer", "train a fastText model that scores documents",
            ("train_scorer",),
        ),
        "import-tokens": Command(
            "preprocessing.import_tokens:import_tokens", "import tokens that other programs wrote, to train on",
            ("import_tokens",),
        ),
        "harvest": Command(
            "gristmill_cli.harvest:harvest_corpus", "gather a corpus from this machine",
            ("harvest_corpus",),
        ),
        "doctor": Command("gristmill_cli.doctor:doctor", "show what is installed and what this machine can do"),
        "compile": Command("gristmill_cli.compile_kernels:compile_kernels", "compile all kernels, once"),
    },
    "dedup: which documents are near-duplicates": {
        "exact-pairs": Command(
            "dedup.generate_exact_pairs:generate_exact_pairs", "find exact copies", ("generate_exact_pairs",)
        ),
        "sign": Command("gristmill_cli.dedup_commands:sign", "compute a MinHash signature per document"),
        "cluster": Command("gristmill_cli.dedup_commands:cluster", "find clusters of near-duplicates"),
        "remove": Command("gristmill_cli.dedup_commands:remove", "list the duplicates to remove"),
        "pairs": Command(
            "dedup.generate_duplicate_pairs:generate_duplicate_pairs", "write candidate pairs, as SlimPajama does",
            ("generate_duplicate_pairs",),
        ),
        "bands": Command("dedup.bands:choose_bands", "choose LSH bands and rows for a similarity"),
        "show-cluster": Command(
            "dedup.cluster_graph:show_cluster", "show one cluster with its similarities", ("cluster_graph",)
        ),
    },
    "train: from token shards to a model": {
        "train": Command("gristmill_cli.train:main", "pre-train a decoder; also torchrun -m gristmill_cli.train"),
        "torchrun": Command("training.distributed.torchrun:main", "torchrun, with exit codes that tell a stop"),
        "train-async": Command("training.train_async:main", "pre-train with a server and workers"),
        "evaluate": Command("training.evaluate:main", "measure losses of a checkpoint on tokens or text"),
        "lm-eval": Command("training.tasks.harness:main", "lm_eval's own command line, for benchmarks of a checkpoint"),
        "make-tasks": Command(
            "gristmill_cli.benchmarks.make_tasks:make_tasks", "make cloze tasks of held-out text", ("make_tasks",)
        ),
        "contamination": Command(
            "gristmill_cli.benchmarks.contamination:contamination", "find a benchmark's items in the training text"
        ),
        "generate": Command("gristmill_cli.generate:main", "write text with a trained model"),
        "export-hf": Command("training.hugging_face.export_hf:export_hf", "export a checkpoint to Hugging Face"),
        "import-hf": Command("training.hugging_face.import_hf:import_hf", "import a Hugging Face model"),
    },
    "look: before, during and after a run": {
        "estimate": Command("gristmill_cli.estimate:main", "estimate core hours, disk and requests of a run"),
        "plan": Command("gristmill_planner.plan:plan", "choose the parallel layout of a run for a cluster"),
        "status": Command("gristmill_cli.status.command:status", "show how far a run is, on all machines"),
        "duplicates": Command("gristmill_cli.documents.duplicates:show_duplicates", "show removed and kept copies"),
        "card": Command("gristmill_cli.cards.data_card:card", "write a dataset card next to the tokens"),
        "push": Command("gristmill_cli.cards.data_card:push", "upload tokens or a model, with a card, to the Hub"),
        "funnel": Command("gristmill_cli.funnel:show_funnel", "print the documents that each stage kept and removed"),
        "report": Command("gristmill_cli.report.write:report", "write one HTML page of a run, for a browser"),
        "trace": Command("gristmill_cli.documents.trace:trace", "tell what became of documents, to their tokens"),
        "rewind": Command("gristmill_cli.documents.rewind:rewind", "show the documents that a training step read"),
        "browse": Command("gristmill_cli.browse.serve:browse", "look at clusters and removed documents in a browser"),
        "plot": Command("training.reporting.plot:plot", "plot the loss curve of a training run"),
        "parity": Command("gristmill_parity.parity:parity", "check that layouts train exactly as one process"),
        "check": Command("gristmill_parity.gates.check:check", "say where two runs of one training first differ"),
    },
    "SlimPajama: the same stages with its arguments": {
        "to_hash": Command("dedup.to_hash:to_hash", "as sign"),
        "generate_connected_components": Command(
            "dedup.generate_connected_components:generate_connected_components", "as cluster"
        ),
        "generate_duplicates_dict": Command("dedup.generate_duplicates_dict:generate_duplicates_dict", "as remove"),
        "shuffle_holdout": Command("preprocessing.shuffle_holdout:pass1,pass2", "as mix (pass1) and shuffle (pass2)"),
    },
}  # fmt: skip


def _commands_by_name() -> dict[str, Command]:
    """Return the commands by name and by alias, with underscores."""
    commands = dict[str, Command]()
    for group in GROUPS.values():
        for clean, command in group.items():
            for name in (clean, *command.aliases):
                commands[name.replace("-", "_")] = command
    return commands


COMMANDS: Mapping[str, Command] = MappingProxyType(_commands_by_name())

PACKAGES = ("gristmill", "gristmill_cli", "gristmill_parity", "gristmill_planner", "preprocessing", "dedup", "training")


def main() -> None:
    """Run the command named by the first command-line argument; `-` and `_` are the same in it."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        try:
            print(overview(), flush=True)
        except BrokenPipeError:  # its reader, such as `head`, has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0 if len(sys.argv) > 1 else 2)
    if sys.argv[1] in ("-V", "--version"):
        print(f"gristmill {_version()}")
        sys.exit(0)
    name = sys.argv[1]
    arguments = sys.argv[2:]
    chosen = COMMANDS.get(name.replace("-", "_"))
    if chosen is None:
        sys.exit(_fail(f"expected a command, got {name!r}; try {_nearest(name)}"))
    from gristmill.processes import ends_at_ctrl_c

    with ends_at_ctrl_c():  # while modules are imported
        from gristmill.command import command

        try:
            loaded = importlib.import_module(chosen.module)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] in PACKAGES:
                raise
            sys.exit(_fail(f"{name} needs {error.name}, which is not installed; try pip install 'gristmill[train]'"))
    if chosen.functions == ["main"]:  # parses its own arguments
        loaded.main(arguments)
        return
    functions = [getattr(loaded, function) for function in chosen.functions]
    command(*functions, arguments=arguments, prog=f"gristmill {name}")


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _nearest(name: str) -> str:
    """Return the command most like a mistyped one, and how to see all."""
    given = name.replace("-", "_").lower()
    matches = difflib.get_close_matches(given, COMMANDS, n=1)
    if not matches:
        matches = [command for command in COMMANDS if command.startswith(given)]
    if not matches:
        return "gristmill --help"
    names = [*_clean_name(matches[0]), "--help"]
    return " or ".join(f"gristmill {name}" for name in names)


def _clean_name(name: str) -> list[str]:
    """Return the name of a command in the help, of one that may be given by an alias."""
    for group in GROUPS.values():
        for clean, command in group.items():
            if command is COMMANDS[name]:
                return [clean]
    return []


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # a tenth of a second

    try:
        return version("gristmill")
    except PackageNotFoundError:  # a checkout that was not installed
        return "(not installed)"


def overview() -> str:
    """Return the commands by task, with their other names, as wide as the terminal."""
    width = min(100, shutil.get_terminal_size().columns)
    lines = ["usage: gristmill COMMAND [OPTIONS]", "       gristmill COMMAND --help | --version"]
    for title, group in GROUPS.items():
        lines += ["", title]
        gap = max(17, 2 + max(map(len, group)))
        for name, command in group.items():
            help_text = command.help
            if command.aliases:
                help_text += f" (also {', '.join(command.aliases)})"
            text = textwrap.wrap(help_text, width - 2 - gap)
            lines += [f"  {name:{gap}}{text[0]}", *(f"  {'':{gap}}{line}" for line in text[1:])]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
