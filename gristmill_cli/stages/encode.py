"""Stages of a run that write token shards: a train set and a holdout of the mix, and chats with masks."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gristmill.counts import HELD_OUT, WRITTEN, Counts
from gristmill.engine.options import parse_size
from gristmill.errors import UsageError
from gristmill.io.documents import total_size
from gristmill.io.token_shards import Manifest
from gristmill.io.tokenizer_file import find_ends, find_tokenizer_file
from gristmill.storage.files import is_file
from gristmill_cli.funnel import TRAIN, of_folders
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.mix import DecideMix, differing_amount
from gristmill_cli.stages.odd_files import odd_token_sizes
from gristmill_cli.stages.spec import RunContext, StageSpec, given_options, reject_options_without_effect, settings_of
from gristmill_cli.stages.train_tokenizer import TrainTokenizer
from preprocessing.encode import STAGE, encode
from preprocessing.tokenize_chats import STAGE as TOKENIZE_CHATS
from preprocessing.tokenize_chats import list_chats, tokenize_chats
from preprocessing.tokenizer.chat_template import TemplateSource


class Encode(StageSpec):
    """Encode each document of the mix once, and shuffle its tokens."""

    name = "encode"
    engine = STAGE
    output = "tokens"
    section = "tokenizer"
    is_in_funnel = True
    reads = DecideMix.name
    reads_reasons = (WRITTEN, HELD_OUT)
    requests = 12.3
    reads_documents = True
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
            max_failed=config.max_failed,
        )

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return the tokenizer, the ends of documents, and the size of a shard."""
        spec = run.config.tokenizer
        settings = settings_of(spec, "shard_size", "bos", "eos")
        if spec.file:
            settings["tokenizer"] = str(spec.file)
        return settings

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise UsageError for a tokenizer or a size that the stage would refuse."""
        spec = config.tokenizer
        if spec.file is not None:
            find_ends(find_tokenizer_file(spec.file), spec.bos, spec.eos)
        parse_size(spec.shard_size, "--shard_size")

    def outside_files(self, config: RunConfig) -> list[Path]:
        """Return the file of the tokenizer, if it is given."""
        return [find_tokenizer_file(config.tokenizer.file)] if config.tokenizer.file else []

    def alarms(self, run: RunContext, counts: Counts) -> Iterator[str]:
        """Yield files whose tokens are far longer than others of their source, or shorter, and missed amounts."""
        yield from odd_token_sizes(run.config, run.corpus, _model(run.config))
        asked_of_source = run.config.mix.tokens
        if not asked_of_source:
            return
        tokens_of = Counter[str]()  # by source, without those that end documents
        for name in (TRAIN, HELD_OUT):
            for source, record in of_folders(Manifest.load(run.tokens(name))).items():
                tokens_of[source] += record.tokens - record.documents
        for source, asked in sorted(asked_of_source.items()):
            tokens = tokens_of[source]
            yield from differing_amount(run.config, source, asked, tokens, "tokens")


class TokenizeChats(StageSpec):
    """Encode chats by the template of the tokenizer's model, with masks of what the assistant says."""

    name = "tokenize_chats"
    engine = TOKENIZE_CHATS
    output = "tokens/chats"
    section = "chats"
    added_by = "chats.path"
    keeps = WRITTEN
    is_done_once = True
    is_after_mix = True

    def call(self, run: RunContext) -> Counts:
        """Write the token shards and masks of the chats."""
        config = run.config
        spec = config.chats
        assert spec.path is not None, "see check"
        return tokenize_chats(
            spec.path,
            self.path(config),
            _model(config),
            run.options,
            template=spec.template,
            messages=spec.messages,
            eos=config.tokenizer.eos,
            shard_size=config.tokenizer.shard_size,
            max_failed=config.max_failed,
        )

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return the chats, their template and their field, and the tokenizer."""
        spec = run.config.chats
        settings = {name: str(getattr(spec, name)) for name in ("path", *given_options(spec))}
        return settings | {"tokenizer": str(_model(run.config)), "eos": run.config.tokenizer.eos}

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise UsageError without a chat template, or for options of chats that are not given."""
        spec = config.chats
        if spec.path is None:
            reject_options_without_effect(spec, "without --path", "--path CHATS, a file or folder of chats")
            return
        if config.tokenizer.file is None and spec.template is None:
            raise UsageError(
                f"--path {spec.path} needs a chat template; try --chats.template FILE, or --tokenizer.file with the "
                "folder of a model that has one"
            )
        list_chats(spec.path)
        if config.tokenizer.file is not None:
            TemplateSource.find(find_tokenizer_file(config.tokenizer.file), spec.template)
        elif spec.template is not None and not is_file(spec.template):
            raise UsageError(f"{spec.template}: there is no such file; expected a chat template")

    def stage_read(self, run: RunContext) -> str | None:
        """Return nothing: it reads no documents of the run."""
        return None

    def max_text_bytes(self, config: RunConfig) -> int | None:
        """Return the size of the chats, which does not grow with the corpus."""
        path = config.chats.path
        return None if path is None else total_size(list_chats(path))

    def hint(self, config: RunConfig) -> str:
        """Return what to try if it kept no chat."""
        return f"give another --chats.messages than {config.chats.messages}, or other chats"


def _model(config: RunConfig) -> Path:
    """Return the tokenizer that is given, or that the run trains."""
    return config.tokenizer.file or TrainTokenizer().path(config)
