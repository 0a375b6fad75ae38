"""The command `gristmill`: runs a stage, the whole pipeline or the trainer by name."""

import importlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {  # name: module, functions, one line of help
    "quickstart": ("gristmill_cli.quickstart", ("main",), "gather a corpus and train a small model on it"),
    "harvest_corpus": (
        "gristmill_cli.harvest.harvest_corpus", ("harvest_corpus",), "gather a corpus from this machine",
    ),
    "run": ("gristmill_cli.run", ("main",), "run the whole data pipeline, configured by a TOML file; resumable"),
    "estimate": ("gristmill_cli.estimate.estimate", ("main",), "estimate core hours, disk and requests of a run"),
    "status": ("gristmill_cli.status.status", ("status",), "tell how far a run is that goes on, here or elsewhere"),
    "normalize_text": ("preprocessing.normalize_text", ("normalize_text",), "normalise text to Unicode NFC"),
    "apply": ("preprocessing.apply", ("apply",), "run a function of yours over every document"),
    "filter": ("preprocessing.filter", ("filter",), "list documents that are too short"),
    "sign": ("gristmill_cli.dedup_commands", ("sign",), "compute a MinHash signature per document of a corpus"),
    "cluster": ("gristmill_cli.dedup_commands", ("cluster",), "find clusters of near-duplicates by their signatures"),
    "remove": ("gristmill_cli.dedup_commands", ("remove",), "list the duplicates of clusters to remove"),
    "generate_exact_pairs": ("dedup.generate_exact_pairs", ("generate_exact_pairs",), "find exact copies"),
    "bands": ("dedup.bands", ("choose_bands",), "choose LSH bands and rows for a similarity threshold"),
    "to_hash": ("dedup.to_hash", ("to_hash",), "compute a MinHash signature per document"),
    "generate_duplicate_pairs": (
        "dedup.generate_duplicate_pairs", ("generate_duplicate_pairs",), "find candidate pairs by LSH",
    ),
    "generate_connected_components": (
        "dedup.generate_connected_components", ("generate_connected_components",), "cluster the candidate pairs",
    ),
    "generate_duplicates_dict": (
        "dedup.generate_duplicates_dict", ("generate_duplicates_dict",), "list the duplicates to remove",
    ),
    "cluster_graph": ("dedup.cluster_graph", ("show_cluster",), "show one cluster with its similarities"),
    "shuffle_holdout": ("preprocessing.shuffle_holdout", ("pass1", "pass2"), "mix, shuffle and split off a holdout"),
    "dedup_train": ("dedup.dedup_train", ("dedup_train",), "remove holdout documents from the train set"),
    "train_tokenizer": ("preprocessing.train_tokenizer", ("train_tokenizer",), "train a SentencePiece tokenizer"),
    "tokenize_corpus": ("preprocessing.tokenize_corpus", ("tokenize_corpus",), "encode documents into token shards"),
    "compile": (
        "gristmill_cli.compile_kernels", ("compile_kernels",), "compile all kernels now, once per installation",
    ),
    "funnel": ("gristmill_cli.funnel", ("show_funnel",), "print the documents kept and removed by each stage of a run"),
    "train": ("training.train", ("main",), "pre-train a decoder on token shards (or: torchrun -m training.train)"),
    "train_async": ("training.train_async", ("main",), "pre-train with a server and workers that may come and go"),
    "evaluate": ("training.evaluate", ("main",), "measure the losses of a checkpoint on token shards or text files"),
    "plan": ("gristmill_planner.plan", ("plan",), "choose the parallel layout of a run for a cluster"),
    "plot": ("training.reporting.plot", ("plot",), "plot the loss curve of a training run"),
    "parity": ("gristmill_parity.parity", ("parity",), "check that parallel layouts train exactly as one process"),
    "export_hf": ("training.hugging_face.export_hf", ("export_hf",), "export a checkpoint as a Hugging Face model"),
    "import_hf": ("training.hugging_face.import_hf", ("import_hf",), "import a Hugging Face model as a checkpoint"),
}  # fmt: skip

PACKAGES = ("gristmill", "gristmill_cli", "gristmill_parity", "gristmill_planner", "preprocessing", "dedup", "training")


def main() -> None:
    """Run the command named by the first command-line argument."""
    with _ends_at_ctrl_c():  # while modules are imported, in a second or two
        from gristmill.command import command, wide_console

        if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
            wide_console().print(overview())
            sys.exit(0 if len(sys.argv) > 1 else 2)
        name, arguments = sys.argv[1], sys.argv[2:]
        if name not in COMMANDS:
            print(f"error: unknown command {name!r}: give one of {', '.join(COMMANDS)}", file=sys.stderr)
            sys.exit(2)
        module, functions, _ = COMMANDS[name]
        try:
            loaded = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] in PACKAGES:
                raise
            needs = f"error: {name} needs {error.name}, which is not installed: pip install 'gristmill[train]'"
            print(needs, file=sys.stderr)
            sys.exit(2)
    if functions == ("main",):  # parses its own arguments
        loaded.main(arguments)
        return
    command(*(getattr(loaded, function) for function in functions), arguments=arguments, prog=f"gristmill {name}")


@contextmanager
def _ends_at_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process at once, without a traceback of half-imported modules, until the block ends."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before)


def overview() -> "Table":
    """Table of the commands, in the order of the pipeline."""
    from rich.table import Table

    table = Table(
        "command",
        "what it does",
        title="usage: gristmill COMMAND [OPTIONS]; see gristmill COMMAND --help",
        box=None,
        pad_edge=False,
    )
    for name, (_, _, help_text) in COMMANDS.items():
        table.add_row(name, help_text)
    return table


if __name__ == "__main__":
    main()
