"""Stage of a run: train a tokenizer on the train set, where none is given."""

from pathlib import Path
from typing import Any

from gristmill.counts import Counts
from gristmill.engine.options import parse_size
from gristmill.errors import UsageError
from gristmill_cli.run_config import RunConfig, Tokenizer
from gristmill_cli.stages.mix import DecideMix
from gristmill_cli.stages.spec import RunContext, StageSpec, given_options, settings_of
from preprocessing.train_tokenizer import STAGE, check_options, model_name, special_tokens, train_tokenizer

_TRAINING_OPTIONS = ("vocab_size", "model_type", "sample", "exact", "seed")


class TrainTokenizer(StageSpec):
    """Train a tokenizer on a sample of the train set."""

    name = "train_tokenizer"
    engine = STAGE
    output = "tokenizer"
    section = "tokenizer"
    left_out_by = "tokenizer.file"
    reads = DecideMix.name
    requests = 5.0
    reads_documents = True
    is_serial = True
    is_done_once = True
    is_after_mix = True

    def call(self, run: RunContext) -> Counts:
        """Write the model."""
        config = run.config
        spec = config.tokenizer
        return train_tokenizer(
            run.corpus,
            self.path(config).parent,
            spec.vocab_size,
            spec.model_type,
            spec.sample,
            spec.exact,
            config.tokenizer_seed,
            text_column=config.text_column,
            options=run.options,
            mix_dir=DecideMix().path(config),
        )

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return the kind and size of the tokenizer, and its sample."""
        spec = run.config.tokenizer
        settings = settings_of(spec, "vocab_size", "model_type", "sample", "exact")
        return settings | {"seed": run.config.tokenizer_seed}

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise UsageError for options of a training that would fail, or that is not asked for."""
        spec = config.tokenizer
        if spec.file is None:
            check_options(spec.vocab_size, spec.model_type, spec.sample, spec.exact, config.tokenizer_seed)
            _check_ends(spec)
            return
        given = [name for name in given_options(spec) if name in _TRAINING_OPTIONS]
        if given:
            raise UsageError(
                f"--tokenizer.{given[0]} has no effect with --tokenizer.file {spec.file}, as no tokenizer is trained: "
                "leave out one of them"
            )

    def path(self, config: RunConfig) -> Path:
        """Return the model's file."""
        return config.out / self.output / model_name(config.tokenizer.model_type)

    def max_text_bytes(self, config: RunConfig) -> int | None:
        """Return the size of the sample."""
        return parse_size(config.tokenizer.sample)


def _check_ends(spec: Tokenizer) -> None:
    """Raise UsageError for a token that the tokenizer which is trained will not have, or does not name."""
    known = special_tokens(spec.model_type)
    for name, asked in (("bos", spec.bos), ("eos", spec.eos)):
        is_named = asked == "model" and name in known
        if asked in ("none", *known.values()) or is_named:
            continue
        model = ""
        if name in known:
            model = ", or model"
        raise UsageError(
            f"--{name} {asked}: a tokenizer of --model_type {spec.model_type} has the special tokens "
            f"{', '.join(known.values())}: expected one of them, none{model}"
        )
