"""Stage of a run: keep the items of benchmarks out of the corpus."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gristmill.counts import WRITTEN, Counts
from gristmill.io.documents import paths_of
from gristmill.wording import count_of, markdown_table
from gristmill_cli.run_config import Decontaminate, RunConfig, corpus_folders
from gristmill_cli.stages.spec import RunContext, StageSpec, reject_options_without_effect
from preprocessing.contamination.benchmarks import check_items
from preprocessing.contamination.report import read_report, report_paths
from preprocessing.decontaminate import STAGE, check_limits, decontaminate, list_benchmarks, reject_own_corpus


class RemoveBenchmarks(StageSpec):
    """Keep the items of benchmarks out of the corpus."""

    name = "decontaminate"
    engine = STAGE
    output = "decontaminated"
    section = "decontaminate"
    added_by = "decontaminate.against"
    rewrites = True
    is_in_funnel = True
    keeps = WRITTEN
    losses = Path("decontaminated.contamination.parquet")  # places of documents with an item of a benchmark
    look_at = f"OUT/{losses}"
    browsed_as = "spans"
    report_section = "gristmill_cli.report.benchmarks:read_section"
    requests = 7.0
    reads_documents = True
    is_done_once = True  # an index of all items

    def call(self, run: RunContext) -> Counts:
        """Look for the items in every document."""
        benchmarks = vars(run.config.decontaminate)
        text_column = run.config.text_column
        output = self.path(run.config)
        return decontaminate(run.corpus, output, options=run.options, text_column=text_column, **benchmarks)

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return the benchmarks, and how they are looked for."""
        settings: dict[str, Any] = msgspec.to_builtins(vars(run.config.decontaminate), enc_hook=str)
        return settings

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise UsageError or InputError for benchmarks or limits that the stage would refuse."""
        spec = config.decontaminate
        if not spec.against:
            reject_options_without_effect(spec, "without --against", "--decontaminate.against BENCHMARKS")
            return
        benchmarks = list_benchmarks(spec.against, spec.template)
        check_limits(spec.margin, spec.min_ngrams, spec.common, spec.near)
        reject_own_corpus([*spec.against, *paths_of(benchmarks)], corpus_folders(config))
        check_items(benchmarks)

    def outside_files(self, config: RunConfig) -> list[Path]:
        """Return the files of the benchmarks."""
        return paths_of(list_benchmarks(config.decontaminate.against, config.decontaminate.template))

    def alarms(self, run: RunContext, counts: Counts) -> Iterator[str]:
        """Yield a sentence if items are in so many documents that they are not looked for."""
        report = read_report(report_paths(self.path(run.config))[1])
        if report.common_items:
            yield (
                f"near-duplicates of {count_of(report.common_items, 'benchmark item')} are in so many "
                "documents that they "
                "count as boilerplate and are not looked for: try --decontaminate.common 0"
            )

    def card(self, out: Path, options: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
        """Yield how many items of each benchmark were found."""
        yield f"\n## Benchmarks\n\nPolicy: {options[self.section]['policy']}.\n"
        _, report = report_paths(out / self.output)
        rows = list[tuple[str, ...]]()
        for name, benchmark in read_report(report).benchmarks.items():
            documents = sum(benchmark.documents.values())
            near_documents = sum(benchmark.near_documents.values())
            numbers = (benchmark.items, benchmark.found, documents, benchmark.near, near_documents)
            rows.append((name, *(f"{number:,}" for number in numbers)))
        head = ("benchmark", "items", "found", "in documents", "near-duplicates of others", "in documents")
        yield from markdown_table(head, rows)

    def kernel_options(self, corpus: Path) -> dict[str, Any]:
        """Return options with the corpus as a benchmark."""
        return {self.section: Decontaminate((corpus,), policy="report")}

    def hint(self, config: RunConfig) -> str:
        """Return what to try if no document is left."""
        return "look at the benchmarks, or try --decontaminate.policy cut"

    def describe_loss(self, rows: list[dict[str, Any]]) -> str:
        """Return the items that a document has."""
        items = {f"{row['benchmark']} {row['item']}" for row in rows}
        return f"has {', '.join(sorted(items))}"
