"""Command: the whole data pipeline, from a corpus to token shards, resumable at any point."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from dedup.dedup_train import dedup_train
from dedup.generate_connected_components import generate_connected_components
from dedup.generate_duplicates_dict import generate_duplicates_dict
from dedup.generate_exact_pairs import generate_exact_pairs
from dedup.to_hash import SIGNED, to_hash
from gristmill.command import run_with_exit_code, wide_console
from gristmill.config import load_config
from gristmill.counts import WRITTEN, Counts
from gristmill.errors import OutputError
from gristmill.io.files import atomic_write_bytes
from gristmill.io.token_shards import Manifest
from gristmill_cli.funnel import FUNNEL_FILE, HELD_OUT, TRAIN, Funnel, build_funnel, check_counts_between
from gristmill_cli.run_check import check_config
from gristmill_cli.run_config import RunConfig
from preprocessing.filter import filter as find_short
from preprocessing.normalize_text import normalize_text
from preprocessing.shuffle_holdout import pass1, pass2
from preprocessing.tokenize_corpus import tokenize_corpus
from preprocessing.train_tokenizer import MODEL, train_tokenizer

ALL_FILES = sys.maxsize  # an end index beyond any number of files
UNKNOWN_COUNT = 0  # value of SlimPajama's argument n_docs; 0: not checked
CHUNK = 1  # number of the only train chunk
CONFIG_FILE = "run.json"  # the run's configuration
DUPLICATES = "duplicates.parquet"


def run(config: RunConfig) -> Funnel:
    """Run every stage that is not done, check the counts between stages, and write funnel.json.

    The whole configuration is checked first. Raises ConservationError if documents were lost between two
    stages, OutputError if `config.out` holds a run of another corpus, and any GristmillError of a stage.
    """
    out, options = config.out, config.run_options
    check_config(config)
    _record_config(config)
    clean, dup = out / "normalized", out / "dup"
    normalized = normalize_text(config.corpus, clean, ftfy=config.normalize.ftfy, options=options)

    filtered = find_short(clean, out / "filtered.pickle", UNKNOWN_COUNT, "all", config.filter.threshold, options)
    hashed, compared = _find_duplicates(config, clean, dup)

    mixed = pass1(
        clean, out / "pass1", dup / DUPLICATES, out / "filtered.pickle", config.mix.weights, config.mix_seed, options
    )
    split = pass2(0, ALL_FILES, CHUNK, out / "pass1", out / "train", out / "holdout", config.mix.holdout, options)
    cleaned = dedup_train(CHUNK, out / "train", out / "holdout", out / "train_deduped", options)

    spec = config.tokenizer
    train_tokenizer(
        out / "train_deduped", out / "tokenizer", spec.vocab_size, spec.model_type, spec.sample, spec.exact,
        config.tokenizer_seed, options,
    )  # fmt: skip
    model = out / "tokenizer" / MODEL
    encoded = tokenize_corpus(out / "train_deduped", model, out / "tokens" / TRAIN, options)
    encoded_holdout = tokenize_corpus(out / "holdout", model, out / "tokens" / HELD_OUT, options)

    check_counts_between("normalize_text", normalized, WRITTEN, "filter", filtered)
    check_counts_between("normalize_text", normalized, WRITTEN, "to_hash", hashed)
    if not config.dedup.exact:  # with `exact`, copies are compared without a signature
        check_counts_between("to_hash", hashed, SIGNED, "generate_connected_components", compared, sizes=False)
    check_counts_between("normalize_text", normalized, WRITTEN, "pass1", mixed)
    check_counts_between("pass1", mixed, WRITTEN, "pass2", split)
    check_counts_between("pass2", split, WRITTEN, "dedup_train", cleaned)
    check_counts_between("dedup_train", cleaned, WRITTEN, "tokenize_corpus (train)", encoded)
    check_counts_between("pass2", split, HELD_OUT, "tokenize_corpus (holdout)", encoded_holdout)
    manifests = {name: Manifest.load(out / "tokens" / name) for name in (TRAIN, HELD_OUT)}
    funnel = build_funnel(normalized, mixed, split, cleaned, manifests)
    funnel.save(out)
    return funnel


def _find_duplicates(config: RunConfig, clean: Path, dup: Path) -> tuple[Counts, Counts]:
    """Run the dedup stages up to dup/duplicates.parquet; return the counts of to_hash and of clustering."""
    options, spec, minhash = config.run_options, config.dedup, config.out / "minhash"
    pairs = dup / "duplicate_pairs_exact.txt"
    if spec.exact:
        generate_exact_pairs(clean, pairs, scope=spec.scope, options=options)
    else:
        pairs.unlink(missing_ok=True)  # left by a run with `exact`: the next stage reads all pair files
    hashed = to_hash(
        "all", clean, minhash, UNKNOWN_COUNT, "0", 0, ALL_FILES, spec.width, unit=spec.unit, hash=spec.hash,
        permutations=spec.permutations, seed=spec.seed, skip=pairs.with_suffix(".parquet") if spec.exact else None,
        options=options,
    )  # fmt: skip
    clusters = dup / "connected_components.parquet"
    compared = generate_connected_components(
        dup, clusters, minhash, spec.range, spec.bands, spec.index, spec.scope, options=options
    )
    generate_duplicates_dict(
        clusters, dup / DUPLICATES, options=options, keep=spec.keep, dropped=(config.out / "filtered.pickle",),
        verify=spec.verify, threshold=spec.threshold, corpus=clean, width=spec.width, unit=spec.unit, index=spec.index,
    )  # fmt: skip
    return hashed, compared


def main(argv: Sequence[str] | None = None) -> None:
    """`gristmill run [pipeline.toml] [--section.key value …]`: runs the pipeline, prints the funnel and paths."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and not arguments[0].startswith("-"):
        arguments.insert(0, "--config")
    sys.exit(run_with_exit_code(lambda: _run_and_print(arguments)))


def _run_and_print(arguments: list[str]) -> None:
    config = load_config(RunConfig, arguments, prog="gristmill run")
    funnel = run(config)
    console = wide_console()
    console.print(funnel)
    tokens = config.out / "tokens"
    console.print(
        f"\nfunnel: {config.out / FUNNEL_FILE}\ntokens: {tokens / TRAIN}, {tokens / HELD_OUT}\n"
        f"to train: torchrun --nproc_per_node=2 training/train.py --data.train {tokens / TRAIN} "
        f"--data.holdout {tokens / HELD_OUT} --out_dir {config.out / 'model'}",
        highlight=False,
        markup=False,
    )


def _record_config(config: RunConfig) -> None:
    """Write the configuration to the output folder. Raises OutputError if it holds the run of another corpus."""
    path = config.out / CONFIG_FILE
    corpus = str(config.corpus.resolve())
    if path.is_file():
        before = msgspec.json.decode(path.read_bytes()).get("corpus")
        if before != corpus:
            raise OutputError(
                f"{config.out} holds a run of the corpus {before}, not of {corpus}: give another --out, "
                "or remove the folder"
            )
    record = {**asdict(config), "corpus": corpus}
    atomic_write_bytes(path, msgspec.json.format(msgspec.json.encode(record, enc_hook=str), indent=2) + b"\n")


if __name__ == "__main__":
    main()
