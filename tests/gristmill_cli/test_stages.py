"""A stage is described once: one that is added to the list appears wherever stages are shown, checked or estimated."""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from markupsafe import Markup
from rich.console import Console

from gristmill.counts import READ, WRITTEN, Counts
from gristmill.engine.rewriting import open_rewriting, rewrite_corpus
from gristmill.engine.slices import SliceGroup, leaves_out_damaged
from gristmill.engine.task import Stage
from gristmill.errors import UsageError
from gristmill.io.artefacts import write_rows
from gristmill.io.readers import read_documents
from gristmill.io.writers import Rejects, open_jsonl_writer
from gristmill.storage.files import is_file
from gristmill.text import utf8_size
from gristmill_cli.cards.data_card import card
from gristmill_cli.documents.trace import trace
from gristmill_cli.estimate import EstimateConfig, estimate
from gristmill_cli.report.records import DataRun
from gristmill_cli.report.write import report
from gristmill_cli.run import run
from gristmill_cli.run_check import check_config
from gristmill_cli.run_config import Filter, Mix, RunConfig, Tokenizer
from gristmill_cli.run_records import plan_table
from gristmill_cli.stages import pipeline
from gristmill_cli.stages.pipeline import clean_corpus, plan_stages
from gristmill_cli.stages.spec import RunContext, StageSpec
from gristmill_cli.status.command import stages_of_run
from tests.gristmill_cli.corpus import write_records

SHOUTING = "in capitals"
TABLE = pa.schema({"file": pa.string(), "row": pa.int64(), "removed": pa.bool_()})


@leaves_out_damaged
def drop_capitals(group: SliceGroup, outputs: tuple[Path, ...], rows: Path) -> Counts:
    """Task: write the documents that are not in capitals, and a table of the others."""
    counts = Counts({}, [])
    dropped = list[tuple[str, int, bool]]()
    for part, output in zip(group, outputs, strict=True):
        with open_jsonl_writer(output) as sink:
            for document in read_documents(part, counts, Rejects(output)):
                size = utf8_size(document.text)
                if document.text.isupper():
                    counts.add(part.source, SHOUTING, size)
                    dropped.append((*document.key, True))
                else:
                    sink.write(document.to_json())
                    counts.add_written(part.source, size, size)
    write_rows(rows, TABLE, dropped)
    return counts


class Shouters:
    """The section of the report."""

    def show(self, run: DataRun) -> Markup:
        return Markup("<h2>Who shouted</h2>")


def read_shouters(run: DataRun, stage: StageSpec) -> Shouters:
    assert stage.losses and is_file(run.out / stage.losses)
    return Shouters()


class DropCapitals(StageSpec):
    """Drop documents in capitals."""

    name = "drop_capitals"
    engine = Stage("drop_capitals", libraries=("pyarrow",))
    output = "calm"
    rewrites = True
    is_in_funnel = True
    keeps = WRITTEN
    look_at = "who wrote OUT/calm"
    requests = 3.0
    losses = Path("calm.dropped.parquet")
    report_section = f"{__name__}:read_shouters"

    def call(self, run: RunContext) -> Counts:
        table = run.out / self.losses
        with open_rewriting(self.engine, run.corpus, self.path(run.config), run.options, "text", "jsonl", [table]) as (
            stage_run, files, targets,
        ):  # fmt: skip
            done = rewrite_corpus(stage_run, "drop", files, targets, drop_capitals, {}, table=table)
            return stage_run.finish(done.counts)

    def card(self, out: Path, options: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
        yield f"The tone is {settings['tone']}."

    def describe_loss(self, rows: list[dict[str, Any]]) -> str:
        return "it shouts"

    def settings(self, run: RunContext) -> dict[str, object]:
        return {"tone": "calm"}

    def check(self, config: RunConfig, sources: set[str]) -> None:
        if "shouting" in sources:
            raise UsageError("expected no source named shouting, got one")

    def alarms(self, run: RunContext, counts: Counts) -> Iterator[str]:
        yield f"{counts.total(SHOUTING).documents} documents shouted"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    stages = (pipeline.STAGES[0], DropCapitals(), *pipeline.STAGES[1:])
    importers = [module for module in sys.modules.values() if getattr(module, "STAGES", None) is pipeline.STAGES]
    for module in importers:
        monkeypatch.setattr(module, "STAGES", stages)
    folder = tmp_path / "corpus" / "web"
    folder.mkdir(parents=True)
    texts = [f"a text of words, number {i}, " + " ".join(f"word{i}x{j}" for j in range(60)) for i in range(40)]
    texts[:3] = [text.upper() for text in texts[:3]]
    write_records(folder / "a.jsonl", [{"text": text} for text in texts])
    tokenizer = Tokenizer(vocab_size=400, exact=False)
    return RunConfig(
        tmp_path / "corpus", tmp_path / "out", filter=Filter(10), mix=Mix(holdout=0.1), tokenizer=tokenizer, workers=1
    )


def test_a_stage_that_is_added_to_the_list_appears_everywhere(config: RunConfig, capsys) -> None:
    names = [stage.name for stage in plan_stages(config)]
    assert names[:2] == ["normalize_text", "drop_capitals"]
    console = Console(width=200)
    with console.capture() as plan:
        console.print(plan_table(config, plan_stages(config)))
    assert "by tone=calm" in plan.get()  # --dry_run

    funnel = run(config)
    assert funnel is not None and funnel.tallies["web"][SHOUTING].documents == 3  # the funnel
    assert "3 documents shouted" in funnel.warnings  # alarms
    assert "3 documents shouted" in capsys.readouterr().err
    assert clean_corpus(config) == config.out / "calm"  # what later stages read
    record = json.loads((config.out / ".gristmill" / "run" / "filter.json").read_text())
    assert record["counts"]["tallies"]["web"][READ]["documents"] == 37
    assert stages_of_run(config.out, "")["drop_capitals"] == "finished"  # status
    card(config.out)
    assert f"| {SHOUTING} | 3 |" in (config.out / "tokens" / "README.md").read_text()  # the data card
    assert "The tone is calm." in (config.out / "tokens" / "README.md").read_text()
    report((config.out,))
    page = (config.out / "report.html").read_text()
    assert SHOUTING in page and "<h2>Who shouted</h2>" in page
    capsys.readouterr()
    trace(config.out, ("web/a.jsonl@1", "web/a.jsonl@5"))
    traced = capsys.readouterr().out
    assert re.search(r"drop_capitals +removed: it shouts", traced)  # trace
    assert re.search(r"drop_capitals +unchanged", traced)


def test_a_stage_that_is_added_is_checked_and_estimated(config: RunConfig) -> None:
    estimated = estimate(EstimateConfig(config.corpus, filter=Filter(10), tokenizer=config.tokenizer))
    (cost,) = [stage for stage in estimated.stages if stage.name == "drop_capitals"]
    assert cost.requests == 3 * estimated.extent.slices
    (config.corpus / "web").rename(config.corpus / "shouting")
    with pytest.raises(UsageError, match="expected no source named shouting"):
        check_config(config)
