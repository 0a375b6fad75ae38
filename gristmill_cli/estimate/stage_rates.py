"""Rates of each stage of a run, from runs of all stages on two samples of a corpus."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gristmill.counts import READ
from gristmill.io.documents import list_corpus
from gristmill.kernels import SUFFIX as KERNEL_SUFFIX
from gristmill.kernels import cache_folders
from gristmill_cli.estimate.compared_documents import cpu_per_document
from gristmill_cli.estimate.corpus_sample import Samples, count_slices
from gristmill_cli.estimate.stage_runs import SampleConfig, StageRun, measure_cpu, measure_start, run_stages
from gristmill_cli.run_check import check_config
from gristmill_cli.run_config import RunConfig
from gristmill_cli.run_stages import plan_stages
from preprocessing.mixing.drops import DUPLICATE
from preprocessing.train_tokenizer import SAMPLED

TRAINING = "train_tokenizer"
_MIX = "pass1"
_LESS = 4  # the tokenizer is trained once more, on this part of the text


@dataclass(frozen=True)
class Line:
    """A quantity as a function of the text that a run reads: `fixed + per_byte × bytes`, neither below 0."""

    fixed: float
    per_byte: float

    @classmethod
    def through(cls, small: tuple[float, float], large: tuple[float, float]) -> "Line":
        """The line through two points (bytes, quantity); through 0 and the second if they are as large.

        >>> Line.through((10, 7), (20, 12))
        Line(fixed=2.0, per_byte=0.5)
        """
        steps = large[0] - small[0]
        slope = max(0.0, (large[1] - small[1]) / steps) if steps > 0 else large[1] / large[0]
        return cls(max(0.0, small[1] - slope * small[0]), slope)

    def at(self, text_bytes: float) -> float:
        """The quantity for so many bytes of text."""
        return self.fixed + self.per_byte * text_bytes


@dataclass(frozen=True)
class StageRates:
    """What a stage takes, as measured.

    Attributes:
        name: Of the stage.
        cpu: CPU seconds; `fixed` is that of all tasks of the sample, or of training on no text.
        per_trained_byte: CPU seconds per byte that a tokenizer is trained on, beside those of `cpu`.
        startup: CPU seconds of each process before its first task: imports, and loading of compiled kernels.
        reads, writes: Bytes that pass through the operating system.
        kept: Bytes on disk that stay after the stage.
        temporary: Bytes on disk that the stage removes at its end.
        tasks, gets, puts: In the sample: tasks, their input files, their output files and done records.
    """

    name: str
    cpu: Line
    per_trained_byte: float
    startup: float
    reads: Line
    writes: Line
    kept: Line
    temporary: Line
    tasks: int
    gets: int
    puts: int


@dataclass(frozen=True)
class Rates:
    """The rates of all stages, and the sample they are of: bytes of text, documents, duplicates, files.

    `slices` are the parts of these files that can be read alone, `groups` the tasks that read them, as in Extent.
    `command_cpu` is the CPU seconds in which the command starts, and the server of its worker processes as well.
    `trained_share` is the share of the text that is left to train a tokenizer on. `startup_unknown`: kernels were
    compiled meanwhile, so that the startup is taken as 0. `seconds`: how long the measurement took.
    """

    stages: list[StageRates]
    text_bytes: int
    documents: int
    duplicates: int
    files: int
    slices: int
    groups: int
    command_cpu: float
    trained_share: float
    startup_unknown: bool
    seconds: float


def measure_rates(config: RunConfig, samples: Samples, folder: Path) -> Rates:
    """Run all stages with the options of `config` on both samples, below `folder`; the first time twice.

    Raises any GristmillError of a stage, such as UsageError for an option.
    """
    started, kernels = time.monotonic(), _count_kernels()
    configs = [
        SampleConfig.of(config, corpus, folder / name)
        for corpus, name in ((samples.small, "cold"), (samples.small, "warm"), (samples.large, "large"))
    ]
    check_config(configs[0])
    cold, small, large = map(run_stages, configs)
    text, documents = large[0].counts.total(READ).bytes, large[0].counts.total(READ).documents
    texts = [small[0].counts.total(READ).bytes, text]
    per_document = cpu_per_document(configs[2], folder / "compared")
    has_compiled = _count_kernels() > kernels
    stages = []
    for runs in zip(cold, small, large, strict=True):
        rates = _fit(runs[1], runs[2], texts, 0 if has_compiled else max(0.0, runs[0].cpu - runs[1].cpu))
        if rates.name == TRAINING:
            rates = _fit_training(rates, configs[1], configs[2], runs[2], texts)
        if rates.name in per_document:
            rates = replace(rates, cpu=Line(runs[1].cpu, per_document[rates.name] * documents / text))
        stages.append(rates)
    duplicates = next(run for run in large if run.name == _MIX).counts.total(DUPLICATE).documents
    trained_share = next(run for run in large if run.name == TRAINING).counts.total(READ).bytes / text
    files = list_corpus(samples.large)
    return Rates(
        stages, text, documents, duplicates, len(files), *count_slices(files), measure_start(), trained_share,
        has_compiled, time.monotonic() - started,
    )  # fmt: skip


def _count_kernels() -> int:
    return sum(1 for folder in cache_folders() for _ in folder.glob(f"*{KERNEL_SUFFIX}"))


def _fit(small: StageRun, large: StageRun, texts: Sequence[int], startup: float) -> StageRates:
    """The rates of a stage, from its runs on samples with so many bytes of text."""

    def line(of_small: float, of_large: float) -> Line:
        return Line.through((texts[0], of_small), (texts[1], of_large))

    return StageRates(
        large.name, line(small.cpu, large.cpu), 0, startup, line(small.reads, large.reads),
        line(small.writes, large.writes), line(small.kept, large.kept), line(small.temporary, large.temporary),
        len(large.records), large.gets, large.puts,
    )  # fmt: skip


def _fit_training(
    rates: StageRates, small: SampleConfig, large: SampleConfig, trained: StageRun, texts: Sequence[int]
) -> StageRates:
    """The rates of training a tokenizer: of sampling, by training on a document a slice, and of training on more."""
    amount = trained.counts.total(SAMPLED).bytes
    (_, sampling), (_, least) = (_train(config, 1) for config in (small, large))
    less, cpu = _train(large, amount // _LESS)
    per_trained = max(0.0, trained.cpu - cpu) / max(1, amount - less)
    per_byte = Line.through((texts[0], sampling), (texts[1], least)).per_byte
    fixed = max(0.0, trained.cpu - per_trained * amount - per_byte * texts[1])
    return replace(rates, cpu=Line(fixed, per_byte), per_trained_byte=per_trained)


def _train(config: SampleConfig, amount: int) -> tuple[int, float]:
    """Train the tokenizer again on `amount` bytes; return how many they were, and the CPU seconds."""
    changed = replace(config, tokenizer=replace(config.tokenizer, sample=str(max(1, amount))))
    counts, cpu = measure_cpu(next(stage for stage in plan_stages(changed) if stage.name == TRAINING))
    return counts.total(SAMPLED).bytes, cpu
