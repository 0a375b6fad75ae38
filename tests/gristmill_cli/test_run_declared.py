"""Runs of all stages in the sandbox: no task opens what it did not declare, and planning opens nothing."""

from dataclasses import replace
from pathlib import Path

import pytest

from gristmill_cli.run import run
from gristmill_cli.run_config import Dedup, Filter, Mix, RunConfig, Tokenizer
from tests.gristmill.engine.sandbox import sandboxed
from tests.gristmill_cli.corpus import tree

PLANS = ("mix.json", "pass1.json", "manifest.json", "run.json", "funnel.json")  # that the driver may read


def config_of(finished: tuple[Path, Path, str], out: Path, **more: object) -> RunConfig:
    """The configuration of the finished run, but for the folder and the number of workers."""
    shared = {"filter": Filter(100), "mix": Mix(holdout=0.05), "tokenizer": Tokenizer(vocab_size=420)}
    return RunConfig(finished[0], out, workers=1, **(shared | more))


def test_of_the_default_options(finished: tuple[Path, Path, str], tmp_path: Path) -> None:
    with sandboxed(finished[0], tmp_path, plans=PLANS) as sandbox:
        run(config_of(finished, tmp_path / "out", keep=("train_text",)))
    assert sandbox.tasks > 30
    assert tree(tmp_path / "out") == tree(finished[1])


def test_of_other_options(finished: tuple[Path, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", 50_000)
    index = (f"old={finished[1]}/minhash/web",)
    dedup = Dedup(exact=True, verify="jaccard", threshold=0.3, keep="longest", index=index, scope="per-source")
    mix = Mix({"book": 0.5, "tiny": 0, "code": 1.5})
    config = config_of(finished, tmp_path / "plain", dedup=dedup, mix=mix, until="mix", memory="1MiB")
    run(config)
    with sandboxed(finished[0], tmp_path / "boxed", plans=PLANS) as sandbox:  # the check of the options reads the index
        run(replace(config, out=tmp_path / "boxed"))
    assert sandbox.tasks > 30
    assert tree(tmp_path / "boxed") == tree(tmp_path / "plain")
