"""Stage of a run: encode the documents of the mix into token shards: a train set and a holdout."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gristmill.counts import HELD_OUT, WRITTEN, Counts
from gristmill.engine.options import parse_size
from gristmill.io.token_shards import Manifest
from gristmill.io.tokenizer_file import find_ends, find_tokenizer_file
from gristmill_cli.funnel import TRAIN
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.mix import DecideMix, differing_amount
from gristmill_cli.stages.odd_files import odd_token_sizes
from gristmill_cli.stages.spec import RunContext, StageSpec
from gristmill_cli.stages.train_tokenizer import TrainTokenizer
from preprocessing.encode import encode


class Encode(StageSpec):
    """Encode each document of the mix once, and shuffle its tokens."""

    name = "encode"
    output = "tokens"
    section = "tokenizer"
    reads = DecideMix.name
    reads_reasons = (WRITTEN, HELD_OUT)
    requests = 12.3
    is_after_mix = True

    def call(self, run: RunContext) -> Counts:
        """Write the token shards of the train set and of the holdout."""
        config = run.config
        spec = config.tokenizer
        return encode(
            run.corpus,
            DecideMix().path(config),
            _model(config),
            self.path(config),
            run.options,
            shard_size=spec.shard_size,
            bos=spec.bos,
            eos=spec.eos,
            text_column=config.text_column,
        )

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return the tokenizer, the ends of documents, and the size of a shard."""
        spec = run.config.tokenizer
        settings = {name: getattr(spec, name) for name in ("shard_size", "bos", "eos")}
        if spec.file:
            settings["tokenizer"] = str(spec.file)
        return settings

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise UsageError for a tokenizer or a size that the stage would refuse."""
        spec = config.tokenizer
        if spec.file is not None:
            find_ends(find_tokenizer_file(spec.file), spec.bos, spec.eos)
        parse_size(spec.shard_size, "--shard_size")

    def alarms(self, run: RunContext, counts: Counts) -> Iterator[str]:
        """Yield files whose tokens are far longer than others of their source, or shorter, and missed amounts."""
        yield from odd_token_sizes(run.config, run.corpus, _model(run.config))
        asked_of_source = run.config.mix.tokens
        if not asked_of_source:
            return
        manifests = [Manifest.load(run.tokens(name)) for name in (TRAIN, HELD_OUT)]
        for source, asked in sorted(asked_of_source.items()):
            records = [manifest.sources[source] for manifest in manifests if source in manifest.sources]
            tokens = sum(record.tokens - record.documents for record in records)
            yield from differing_amount(run.config, source, asked, tokens, "tokens")


def _model(config: RunConfig) -> Path:
    """Return the tokenizer that is given, or that the run trains."""
    return config.tokenizer.file or TrainTokenizer().path(config)
