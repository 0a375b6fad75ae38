"""Stages of a run: encode the train set and the holdout into token shards."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gristmill.counts import Counts
from gristmill.engine.options import parse_size
from gristmill.io.token_shards import Manifest
from gristmill.io.tokenizer_file import find_ends, find_tokenizer_file
from gristmill_cli.funnel import HELD_OUT, TRAIN
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.amounts import differing_amount
from gristmill_cli.stages.odd_files import odd_token_sizes
from gristmill_cli.stages.spec import RunContext, StageSpec
from gristmill_cli.stages.train_tokenizer import TrainTokenizer
from preprocessing.tokenize_corpus import tokenize_corpus


class TokenizeCorpus(StageSpec):
    """Encode the train set."""

    name = "tokenize_corpus"
    output = f"tokens/{TRAIN}"
    section = "tokenizer"
    reads = "dedup_train"
    requests = 9.2
    is_after_mix = True

    def call(self, run: RunContext) -> Counts:
        """Write the token shards of the train set."""
        return _encode(run, run.out / "train_deduped", TRAIN)

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return the tokenizer, the ends of documents, and the size of a shard."""
        return _settings(run)

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise UsageError for a tokenizer or a size that the stage would refuse."""
        spec = config.tokenizer
        if spec.file is not None:
            find_ends(find_tokenizer_file(spec.file), spec.bos, spec.eos)
        parse_size(spec.shard_size, "--shard_size")

    def alarms(self, run: RunContext, counts: Counts) -> Iterator[str]:
        """Yield files whose tokens are far longer, or shorter, than in others of their source."""
        yield from odd_token_sizes(run.config, run.corpus, _model(run.config))


class TokenizeHoldout(StageSpec):
    """Encode the holdout."""

    name = "tokenize_holdout"
    engine_name = "tokenize_corpus"
    output = f"tokens/{HELD_OUT}"
    section = "tokenizer"
    reads = "pass2"
    reads_reason = HELD_OUT
    requests = 9.2
    is_after_mix = True

    def call(self, run: RunContext) -> Counts:
        """Write the token shards of the holdout."""
        return _encode(run, run.out / HELD_OUT, HELD_OUT)

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return the tokenizer, the ends of documents, and the size of a shard."""
        return _settings(run)

    def alarms(self, run: RunContext, counts: Counts) -> Iterator[str]:
        """Yield sources of which the tokens are not as many as were asked for."""
        asked_of_source = run.config.mix.tokens
        if not asked_of_source:
            return
        manifests = [Manifest.load(run.tokens(name)) for name in (TRAIN, HELD_OUT)]
        for source, asked in sorted(asked_of_source.items()):
            records = [manifest.sources[source] for manifest in manifests if source in manifest.sources]
            tokens = sum(record.tokens - record.documents for record in records)
            yield from differing_amount(run.config, source, asked, tokens, "tokens")

    def share(self, config: RunConfig) -> float:
        """Return the share that is held out."""
        return config.mix.holdout


def _encode(run: RunContext, documents: Path, name: str) -> Counts:
    spec = run.config.tokenizer
    return tokenize_corpus(
        documents,
        _model(run.config),
        run.tokens(name),
        run.options,
        shard_size=spec.shard_size,
        bos=spec.bos,
        eos=spec.eos,
        text_column=run.config.text_column,
    )


def _model(config: RunConfig) -> Path:
    """Return the tokenizer that is given, or that the run trains."""
    return config.tokenizer.file or TrainTokenizer().path(config)


def _settings(run: RunContext) -> dict[str, Any]:
    spec = run.config.tokenizer
    settings = {name: getattr(spec, name) for name in ("shard_size", "bos", "eos")}
    if spec.file:
        settings["tokenizer"] = str(spec.file)
    return settings
