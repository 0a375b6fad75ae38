"""The command `gristmill`: every stage, the whole pipeline, and the trainer, by name."""

import importlib
import sys

from rich.table import Table

from gristmill.command import command, wide_console

COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "run": ("gristmill_cli.run", ("main",), "all stages below, in order, from pipeline.toml; goes on where it stopped"),
    "normalize_text": ("preprocessing.normalize_text", ("normalize_text",), "Unicode NFC"),
    "filter": ("preprocessing.filter", ("filter",), "find the documents that are too short"),
    "generate_exact_pairs": ("dedup.generate_exact_pairs", ("generate_exact_pairs",), "exact copies, before MinHash"),
    "bands": ("dedup.bands", ("choose_bands",), "what a choice of bands and rows detects, as a curve"),
    "to_hash": ("dedup.to_hash", ("to_hash",), "a MinHash signature for every document"),
    "generate_duplicate_pairs": ("dedup.generate_duplicate_pairs", ("generate_duplicate_pairs",), "candidate pairs"),
    "generate_connected_components": (
        "dedup.generate_connected_components", ("generate_connected_components",), "clusters of near-duplicates",
    ),
    "generate_duplicates_dict": ("dedup.generate_duplicates_dict", ("generate_duplicates_dict",), "what to remove"),
    "cluster_graph": ("dedup.cluster_graph", ("show_cluster",), "one cluster with its similarities, to look at"),
    "shuffle_holdout": ("preprocessing.shuffle_holdout", ("pass1", "pass2"), "mix, shuffle, hold out"),
    "dedup_train": ("dedup.dedup_train", ("dedup_train",), "no held-out text in the train set"),
    "train_tokenizer": ("preprocessing.train_tokenizer", ("train_tokenizer",), "a SentencePiece tokenizer"),
    "tokenize_corpus": ("preprocessing.tokenize_corpus", ("tokenize_corpus",), "documents to Megatron token shards"),
    "funnel": ("gristmill_cli.funnel", ("show_funnel",), "what became of every document of a run"),
    "train": ("training.train", ("main",), "pre-train a decoder on token shards (with torchrun: training/train.py)"),
    "plot": ("training.reporting.plot", ("plot",), "a run's loss curve, in the terminal and as loss.svg"),
    "parity": ("training.parity.parity", ("parity",), "the certificate: every layout trains as one process does"),
    "export_hf": ("training.hugging_face.export_hf", ("export_hf",), "a checkpoint as a Hugging Face model"),
    "import_hf": ("training.hugging_face.import_hf", ("import_hf",), "a Hugging Face model, to train on from"),
}  # fmt: skip


def main() -> None:
    """Hand the command line to the command it names."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        wide_console().print(overview())
        sys.exit(0 if len(sys.argv) > 1 else 2)
    name, arguments = sys.argv[1], sys.argv[2:]
    if name not in COMMANDS:
        print(f"error: there is no command {name!r}: wanted one of {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    module, functions, _ = COMMANDS[name]
    loaded = importlib.import_module(module)
    if functions == ("main",):  # it reads a configuration file, too
        loaded.main(arguments)
        return
    command(*(getattr(loaded, function) for function in functions), arguments=arguments, prog=f"gristmill {name}")


def overview() -> Table:
    """The commands, in the order in which text flows through them."""
    table = Table("command", "what it does", title="gristmill COMMAND --help tells more", box=None, pad_edge=False)
    for name, (_, _, help_text) in COMMANDS.items():
        table.add_row(name, help_text)
    return table


if __name__ == "__main__":
    main()
