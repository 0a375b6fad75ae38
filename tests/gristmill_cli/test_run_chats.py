"""[chats] in a run: a stage of its own, which the plan, the records, the status and the estimate have as any other."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from gristmill.errors import UsageError
from gristmill.io.token_masks import TokenMasks
from gristmill.io.token_shards import open_shards
from gristmill_cli.run import run
from gristmill_cli.run_check import check_config
from gristmill_cli.run_config import Chats, Filter, Mix, RunConfig, Tokenizer
from gristmill_cli.run_records import plan_table
from gristmill_cli.stages.pipeline import find_stage, plan_stages
from gristmill_cli.status.command import stages_of_run
from preprocessing.tokenize_chats import tokenize_chats
from tests.gristmill_cli.corpus import make_corpus, tree
from tests.preprocessing.chats import MARKING, make_chats, make_tokenizer, write_chats
from tests.preprocessing.test_tokenize_chats import read_chats


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    chats = write_chats(tmp_path / "talk/a.jsonl", make_chats(40)).parent
    tokenizer = Tokenizer(make_tokenizer(tmp_path / "model"))
    corpus = make_corpus(tmp_path / "corpus")
    return RunConfig(
        corpus, tmp_path / "out", filter=Filter(100), mix=Mix(holdout=0.05), tokenizer=tokenizer,
        chats=Chats(chats), workers=1,
    )  # fmt: skip


def test_a_run_encodes_chats_next_to_its_text(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_stages(config)[-1].name == "tokenize_chats"
    assert "tokenize_chats" not in [stage.name for stage in plan_stages(replace(config, chats=Chats()))]
    run(config)
    assert "tokenize_chats: 40 read = 40 written" in capsys.readouterr().err
    folder = config.out / "tokens/chats"
    manifest, _ = open_shards(folder)
    masks = TokenMasks.load(folder, manifest)
    assert (
        manifest.documents == 40 and masks is not None and 0 < masks.targets < sum(it.tokens for it in manifest.shards)
    )
    assert config.chats.path is not None and config.tokenizer.file is not None
    tokenize_chats(config.chats.path, config.out.parent / "alone", config.tokenizer.file, config.run_options)
    assert tree(folder) == tree(config.out.parent / "alone")
    capsys.readouterr()
    run(config)
    assert "tokenize_chats: 40 read = 40 written | done already" in capsys.readouterr().err

    assert stages_of_run(config.out, "")["tokenize_chats"] == "finished"
    console = Console(width=200)
    with console.capture() as plan:
        console.print(plan_table(config, plan_stages(config)))
    assert f"writes tokens/chats by path={config.chats.path}" in " ".join(plan.get().split())
    size = find_stage("tokenize_chats").max_text_bytes(config)  # of the estimate: it does not grow with the corpus
    assert size == (config.chats.path / "a.jsonl").stat().st_size


def test_chats_without_a_template_are_refused_before_the_run(config: RunConfig) -> None:
    with pytest.raises(
        UsageError, match=r"--chats.path .* needs a chat template; try --chats.template FILE, or --tokenizer.file"
    ):
        check_config(replace(config, tokenizer=Tokenizer()))
    with pytest.raises(UsageError, match=r"--chats.messages has no effect without --chats.path; try --chats.path"):
        check_config(replace(config, chats=Chats(messages="turns")))


@pytest.mark.parametrize("model_type", ["bpe", "byte-bpe"])
def test_chats_may_be_encoded_with_the_tokenizer_that_the_run_trains(
    config: RunConfig, tmp_path: Path, model_type: Literal["bpe", "byte-bpe"]
) -> None:
    (tmp_path / "chat.jinja").write_text(MARKING["plain"])
    own = replace(
        config,
        tokenizer=Tokenizer(vocab_size=600, model_type=model_type),
        chats=replace(config.chats, template=tmp_path / "none"),
    )
    with pytest.raises(UsageError, match="none: there is no such file; expected a chat template"):
        check_config(own)
    run(replace(own, chats=replace(config.chats, template=tmp_path / "chat.jinja")))
    chats = open_shards(config.out / "tokens/chats")[0]
    assert chats.documents == 40
    assert chats.tokenizer.sha256 == open_shards(config.out / "tokens/train")[0].tokenizer.sha256
    for ids, mask in read_chats(config.out / "tokens/chats"):
        assert ids[-1] == chats.tokenizer.end_of_document and mask[-1]  # so the model learns to end
