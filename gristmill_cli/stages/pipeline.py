"""The stages of a run in order, and which of them a run has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gristmill.engine.options import RunOptions
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.apply import ApplyFunction
from gristmill_cli.stages.decontaminate import RemoveBenchmarks
from gristmill_cli.stages.encode import Encode, TokenizeChats
from gristmill_cli.stages.filter import ChooseAfterCopies, ChooseByScore, FilterShort
from gristmill_cli.stages.filter_quality import FilterQuality
from gristmill_cli.stages.generate_connected_components import GenerateConnectedComponents
from gristmill_cli.stages.generate_duplicates_dict import GenerateDuplicatesDict
from gristmill_cli.stages.generate_exact_pairs import GenerateExactPairs
from gristmill_cli.stages.mix import DecideMix
from gristmill_cli.stages.normalize_text import NormalizeText, own_facts
from gristmill_cli.stages.note_facts import NoteFacts, ScoreAfterCopies
from gristmill_cli.stages.remove_lines import RemoveLines
from gristmill_cli.stages.remove_spans import RemoveSpans
from gristmill_cli.stages.spec import RunContext, StageSpec
from gristmill_cli.stages.to_hash import ToHash
from gristmill_cli.stages.train_text import DedupTrain, Pass1, Pass2
from gristmill_cli.stages.train_tokenizer import TrainTokenizer
from preprocessing.mixing.first_texts import FirstTexts

STAGES: tuple[StageSpec, ...] = (
    NormalizeText(),
    ApplyFunction(),
    FilterQuality(),
    RemoveLines(),
    RemoveSpans(),
    RemoveBenchmarks(),
    NoteFacts(),
    FilterShort(),
    ChooseByScore(),
    GenerateExactPairs(),
    ToHash(),
    GenerateConnectedComponents(),
    GenerateDuplicatesDict(),
    ScoreAfterCopies(),
    ChooseAfterCopies(),
    DecideMix(),
    Pass1(),
    Pass2(),
    DedupTrain(),
    TrainTokenizer(),
    Encode(),
    TokenizeChats(),
)
FIRST_STAGE = STAGES[0].name


def plan_stages(config: RunConfig) -> list[StageSpec]:
    """Return the stages of a run with this configuration, in order."""
    options = msgspec.to_builtins(config, enc_hook=str)
    return stages_in_run(options)


def stages_in_run(options: Mapping[str, Any]) -> list[StageSpec]:
    """Return the stages of a run with these options, as its run.json has them, in order."""
    stages = [stage for stage in STAGES if stage.is_in_run(options)]
    writers = [stage for stage in stages if stage.rewrites]
    if writers[-1].notes_facts:
        return [stage for stage in stages if stage.name != NoteFacts.name]
    return stages


def find_stage(name: str) -> StageSpec:
    """Return the stage of a name."""
    return next(stage for stage in STAGES if stage.name == name)


def facts_of_raw_corpus(config: RunConfig) -> Path:
    """Return the facts that the first stage notes of the records of the raw corpus."""
    first = STAGES[0]
    if clean_corpus(config) == first.path(config):
        return config.out / "facts"
    return own_facts(config)


def judging_stage(config: RunConfig) -> StageSpec:
    """Return the stage that removes documents by the rules of a recipe: the first, unless a user's function is before.

    The steps of the user are in the first, too.
    """
    for stage in plan_stages(config):
        if stage.name == FilterQuality.name:
            return stage
    return STAGES[0]


def context_of(config: RunConfig, stage: StageSpec, options: RunOptions | None = None) -> RunContext:
    """Return what a stage of a run is called with; `options` instead of the configuration's own."""
    corpus = config.corpus
    writer_name: str | None = None
    counted_by: str | None = None
    for earlier in plan_stages(config):
        if earlier.name == stage.name:
            break
        if earlier.rewrites:
            corpus = earlier.path(config)
            writer_name = earlier.name
        if earlier.rewrites or earlier.name == NoteFacts.name:
            counted_by = earlier.name
    is_last_writer = stage.rewrites and stage.path(config) == clean_corpus(config)
    return RunContext(
        config, options or config.run_options, corpus, writer_name, counted_by, is_last_writer, first_texts(config)
    )


def first_texts(config: RunConfig) -> FirstTexts | None:
    """Return the texts that the first stage wrote, if later ones cut them; None after a function of the user."""
    first = STAGES[0]
    if config.apply.function or clean_corpus(config) == first.path(config):
        return None
    losses = [config.out / stage.losses for stage in plan_stages(config) if stage.losses]
    return FirstTexts(own_facts(config), tuple(losses))


def clean_corpus(config: RunConfig) -> Path:
    """Return the folder of the documents that are filtered, compared and mixed."""
    writers = [stage for stage in plan_stages(config) if stage.rewrites]
    return writers[-1].path(config)


def corpus_folders() -> list[str]:
    """Return the names in OUT of the folders of documents that a run may have, the last written first."""
    return [stage.output for stage in reversed(STAGES) if stage.rewrites]
