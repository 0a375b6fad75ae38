"""The stages of a run in order: what each calls, where it writes, and whose documents it reads."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from dedup.dedup_train import dedup_train
from dedup.generate_connected_components import CLUSTERED, generate_connected_components
from dedup.generate_duplicates_dict import generate_duplicates_dict
from dedup.generate_exact_pairs import generate_exact_pairs, remove_exact_pairs
from dedup.remove_lines import remove_lines
from dedup.to_hash import SIGNED, to_hash
from gristmill.counts import READ, WRITTEN, Counts
from gristmill.engine.options import RunOptions
from gristmill.errors import InputError
from gristmill.storage.files import read_file
from gristmill_cli.funnel import HELD_OUT, TRAIN
from gristmill_cli.run_config import RunConfig
from preprocessing.apply import apply, version_of
from preprocessing.decontaminate import decontaminate
from preprocessing.filter import KEPT
from preprocessing.filter import filter as find_short
from preprocessing.filter_quality import filter_quality
from preprocessing.normalize_text import normalize_text
from preprocessing.quality.recipe import read_recipe
from preprocessing.shuffle_holdout import pass1, pass2
from preprocessing.tokenize_corpus import tokenize_corpus
from preprocessing.train_tokenizer import model_name, train_tokenizer

ALL_FILES = sys.maxsize  # an end index beyond any number of files
UNKNOWN_COUNT = 0  # value of SlimPajama's argument n_docs; 0: not checked
CHUNK = 1  # number of the only train chunk


@dataclass(frozen=True)
class PipelineStage:
    """A stage of a run.

    It reads exactly the documents that the stage `reads` counted under `reason` (and as many bytes, if `sizes`). Of the
    documents that it counts under `keeps` there must be one; `hint` says what to try if there is none.
    """

    name: str
    call: Callable[[], Counts]
    output: Path
    settings: dict[str, Any] = field(default_factory=dict)  # its own options that decide what it writes
    reads: str | None = None
    reason: str = WRITTEN
    sizes: bool = True
    keeps: str | None = None
    hint: str = ""

    def reject_empty(self, counts: Counts) -> None:
        """Raise InputError if the stage must keep a document, and kept none."""
        if self.keeps and not counts.total(self.keeps).documents:
            read = counts.total(READ).documents
            others = (reason for reason in counts.reasons if reason != READ)
            lost = ", ".join(f"{counts.total(reason).documents:,} {reason}" for reason in others)
            raise InputError(f"{self.name}: no document is left of {read:,}{lost and f' ({lost})'}: {self.hint}")


def plan_stages(config: RunConfig, options: RunOptions | None = None) -> list[PipelineStage]:
    """All stages of a run with this configuration, in order; `options` instead of the configuration's own."""
    options = options or config.run_options
    rewriting = _rewrite(config, options)
    clean = rewriting[-1].name  # whose documents are filtered, compared and mixed
    compared, mixed = _find_duplicates(config, options, clean), _mix(config, options, clean)
    return [*rewriting, _filter(config, options, clean), *compared, *mixed, *_tokenize(config, options)]


def _rewrite(config: RunConfig, options: RunOptions) -> list[PipelineStage]:
    """The stages that write the corpus anew, each from what the one before it wrote."""
    normalized, spec, column = config.out / "normalized", config.normalize, config.text_column

    def normalize() -> Counts:
        return normalize_text(
            config.corpus, normalized, text_column=column, sources=config.sources, options=options, **vars(spec)
        )

    settings = {**vars(spec), "text_column": column}
    if config.sources:
        settings["sources"] = msgspec.to_builtins(config.sources)
    stages = list[PipelineStage]()

    def add(name: str, call: Callable[[], Counts], output: Path, settings: dict[str, Any], hint: str) -> None:
        before = stages[-1].name if stages else None
        stages.append(PipelineStage(name, call, output, settings, before, keeps=WRITTEN, hint=hint))

    add("normalize_text", normalize, normalized, settings, "give a corpus with documents")
    if function := config.apply.function:
        add(
            "apply", lambda: apply(normalized, config.applied, function, text_column=column, options=options),
            config.applied, {"function": function, "code": _code_of(function)}, f"look at what {function} yields",
        )  # fmt: skip
    if recipe := config.recipe:
        add(
            "filter_quality",
            lambda: filter_quality(config.applied, config.judged, recipe, options, text_column=column),
            config.judged, {"rules": rules_version(read_recipe(recipe))},
            f"see what each rule removes: gristmill preview {recipe} {config.applied}",
        )  # fmt: skip
    if (lines := config.lines).unit != "none":
        add(
            "remove_lines",
            lambda: remove_lines(config.judged, config.unrepeated, options=options, text_column=column, **vars(lines)),
            config.unrepeated, {**vars(lines)}, "try a larger --lines.least",
        )  # fmt: skip
    if (benchmarks := config.decontaminate).against:
        add(
            "decontaminate",
            lambda: decontaminate(
                config.unrepeated, config.clean, options=options, text_column=column, **vars(benchmarks)
            ),
            config.clean, msgspec.to_builtins(vars(benchmarks), enc_hook=str),
            "look at the benchmarks, or try --decontaminate.policy cut",
        )  # fmt: skip
    return stages


def _filter(config: RunConfig, options: RunOptions, clean: str) -> PipelineStage:
    short, (threshold, unit) = config.out / "filtered.pickle", (config.filter.threshold, config.filter.unit)
    return PipelineStage(
        "filter",
        lambda: find_short(config.clean, short, UNKNOWN_COUNT, "all", threshold, options, config.text_column, unit),
        short, {"threshold": threshold, "unit": unit}, clean, keeps=KEPT,
        hint=f"give longer documents, or a smaller --filter.threshold than {threshold}",
    )  # fmt: skip


def rules_version(recipe: str) -> str:
    """The beginning of the SHA-256 of a recipe's TOML."""
    return sha256(recipe.encode()).hexdigest()[:12]


def _code_of(function: str) -> str:
    """The version of a user's function, or the beginning of its source's SHA-256."""
    version = version_of(function)
    return version if version.startswith("version ") else version[:12]


def _find_duplicates(config: RunConfig, options: RunOptions, read: str) -> list[PipelineStage]:
    spec, sketch = config.dedup, config.sketch
    clean, minhash, dup = config.clean, config.signatures, config.out / "dup"
    pairs, clusters = dup / "duplicate_pairs_exact.txt", dup / "connected_components.parquet"
    copies = pairs.with_suffix(".parquet") if spec.exact else None

    def sign() -> Counts:
        return to_hash(
            "all", clean, minhash, UNKNOWN_COUNT, "0", 0, ALL_FILES, sketch.width, unit=sketch.unit, hash=sketch.hash,
            permutations=sketch.permutations, seed=sketch.seed, skip=copies,
            text_column=config.text_column, options=options,
        )  # fmt: skip

    def cluster() -> Counts:
        if not spec.exact:
            remove_exact_pairs(pairs)  # left by a run with `exact`: all pair files are read
        return generate_connected_components(
            dup, clusters, minhash, spec.range, spec.bands, spec.index, spec.scope, spec.threshold, options=options
        )

    def remove() -> Counts:
        is_read = spec.measure or spec.keep.startswith(("longest", "newest"))
        checked: dict[str, Any] = {"threshold": spec.threshold, "width": spec.width, "unit": spec.unit,
                                   "index": spec.index}  # fmt: skip
        return generate_duplicates_dict(
            clusters, duplicates_path(config), options=options, keep=spec.keep,
            dropped=(config.out / "filtered.pickle",), verify=spec.measure,
            corpus=clean if is_read else None, text_column=config.text_column if is_read else "text",
            **(checked if spec.measure else {}),
        )  # fmt: skip

    signed = {"hash": spec.hash, "unit": spec.unit, "width": spec.width, "permutations": spec.permutations,
              "seed": spec.seed, "exact": spec.exact}  # fmt: skip
    rows, bands = spec.chosen_bands
    compared = {"range": rows, "bands": bands, "index": spec.index, "scope": spec.scope}
    chosen = {"keep": spec.keep, "verify": spec.verify, **({"threshold": spec.threshold} if spec.measure else {})}
    exact = PipelineStage(
        "generate_exact_pairs",
        lambda: generate_exact_pairs(
            clean, pairs, scope=spec.scope, text_column=config.text_column, options=options
        ),
        pairs, {"scope": spec.scope}, read,
    )  # fmt: skip
    with_signature = None if spec.exact else "to_hash"  # with `exact`, copies are compared without a signature
    return [
        *([exact] if spec.exact else []),
        PipelineStage("to_hash", sign, minhash, signed, read),
        PipelineStage(
            "generate_connected_components", cluster, clusters, compared, with_signature, SIGNED, sizes=False
        ),
        PipelineStage(
            "generate_duplicates_dict", remove, duplicates_path(config), chosen, "generate_connected_components",
            CLUSTERED, sizes=False,
        ),
    ]  # fmt: skip


def duplicates_path(config: RunConfig) -> Path:
    """The table of the duplicates to remove."""
    return config.out / "dup" / "duplicates.parquet"


def _mix(config: RunConfig, options: RunOptions, read: str) -> list[PipelineStage]:
    out, spec = config.out, config.mix
    train, holdout, deduped = out / "train", out / "holdout", out / "train_deduped"
    inputs = (config.clean, out / "pass1", duplicates_path(config), out / "filtered.pickle")
    amounts: dict[str, Any] = {"bytes": spec.bytes} if spec.bytes else {}
    if spec.tokens:
        amounts |= {"tokens": spec.tokens, "tokenizer": str(config.tokenizer.file)}
    if config.keep_list:
        amounts["keep_list"] = sha256(read_file(config.keep_list)).hexdigest()[:12]
    smaller = f"give more documents, or a smaller --mix.holdout than {spec.holdout}"
    return [
        PipelineStage(
            "pass1", lambda: pass1(
                *inputs, config.weights, config.mix_seed, options, config.text_column,
                bytes=spec.bytes, tokens=spec.tokens, tokenizer=config.tokenizer.file if spec.tokens else None,
                keep_list=config.keep_list,
            ),
            out / "pass1",
            {"weights": config.weights, "seed": config.mix_seed, **amounts}, read, keeps=WRITTEN,
            hint="look at --mix.weights, --dedup.index and --filter.threshold",
        ),
        PipelineStage(
            "pass2", lambda: pass2(0, ALL_FILES, CHUNK, out / "pass1", train, holdout, spec.holdout, options), train,
            {"holdout": spec.holdout}, "pass1", keeps=WRITTEN, hint=smaller,
        ),
        PipelineStage(
            "dedup_train",
            lambda: dedup_train(CHUNK, train, holdout, deduped, text_column=config.text_column, options=options),
            deduped, {}, "pass2", keeps=WRITTEN, hint=smaller,
        ),
    ]  # fmt: skip


def _tokenize(config: RunConfig, options: RunOptions) -> list[PipelineStage]:
    out, spec = config.out, config.tokenizer
    train, holdout = out / "train_deduped", out / "holdout"
    model = spec.file or out / "tokenizer" / model_name(spec.model_type)
    settings = {"vocab_size": spec.vocab_size, "model_type": spec.model_type, "sample": spec.sample,
                "exact": spec.exact, "seed": config.tokenizer_seed}  # fmt: skip
    tokens = {name: out / "tokens" / name for name in (TRAIN, HELD_OUT)}

    def learn() -> Counts:
        return train_tokenizer(
            train, model.parent, spec.vocab_size, spec.model_type, spec.sample, spec.exact, config.tokenizer_seed,
            text_column=config.text_column, options=options,
        )  # fmt: skip

    def encode(documents: Path, name: str) -> Counts:
        return tokenize_corpus(
            documents, model, tokens[name], options, shard_size=spec.shard_size, bos=spec.bos, eos=spec.eos,
            text_column=config.text_column,
        )  # fmt: skip

    encoded = {"shard_size": spec.shard_size, "bos": spec.bos, "eos": spec.eos}
    if spec.file:
        encoded["tokenizer"] = str(spec.file)
    return [
        *([] if spec.file else [PipelineStage("train_tokenizer", learn, model, settings, "dedup_train")]),
        PipelineStage("tokenize_corpus", lambda: encode(train, TRAIN), tokens[TRAIN], encoded, "dedup_train"),
        PipelineStage(
            "tokenize_holdout", lambda: encode(holdout, HELD_OUT), tokens[HELD_OUT], encoded, "pass2", HELD_OUT
        ),
    ]
