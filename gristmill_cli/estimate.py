"""Command: what `gristmill run` will cost on a corpus, from the real pipeline on a sample of it, scaled linearly."""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, inf
from pathlib import Path
from typing import NamedTuple

import psutil

from gristmill.command import given_words, run_with_exit_code
from gristmill.config import load_config
from gristmill.console import wide_console
from gristmill.counts import Counts
from gristmill.engine.execution.context import open_execution_context
from gristmill.engine.options import RunOptions, parse_size
from gristmill.errors import UsageError, require
from gristmill.io.readers import SLICE_BYTES
from gristmill.processes import processor_seconds
from gristmill_cli.estimates.costs import Estimate, Extent, StageCost, cost_table, explanation
from gristmill_cli.estimates.sample import RawCost, disk_bytes, write_samples
from gristmill_cli.harvest import harvest_corpus
from gristmill_cli.run_check import check_config
from gristmill_cli.run_config import RunConfig
from gristmill_cli.run_records import stage_positions
from gristmill_cli.stages.pipeline import FIRST_STAGE, context_of, plan_stages
from gristmill_cli.stages.spec import StageSpec
from preprocessing.mixing.drops import DUPLICATE

MAX_CORES = 1_000_000


@dataclass(frozen=True)
class EstimateConfig(RunConfig):
    """Estimate core hours, wall time, disk and storage requests of `gristmill run`, stage by stage.

    `gristmill estimate CORPUS`, or --config pipeline.toml. Give CORPUS --bytes 4.5TB for a larger corpus of similar
    documents, or --documents 931_000_000 --bytes 4.5TB without a corpus. It runs all stages on a sample in a temporary
    folder, which takes some seconds, and scales the results. Takes the options of `gristmill run`; --from and --until
    choose the stages.
    """

    corpus: Path | None = None  # type: ignore[assignment]  # None: --documents and --bytes say how large it is
    """Folder of the corpus: CORPUS/<source>/**."""
    out: Path = Path("out")
    """The folder of the run, which is not written to."""
    documents: int | None = None
    """Number of documents of a corpus that is not here."""
    bytes: str | None = None
    """Size of the corpus' text, such as 4.5TB; units are powers of 1000, or of 1024 as in 4.5TiB."""
    cores: int = 64
    """Total number of cores of all machines, for the wall time."""
    core_price: float = 0.0
    """Price of a core for an hour, in dollars or any currency: that of a machine divided by its cores."""
    storage_price: float = 0.0
    """Price of a TB of storage for a month."""
    duplicates: float | None = None
    """Fraction of the documents that are duplicates; by default that of the sample, which has only some of them."""
    sample: str = "16MB"
    """Size of the sample to measure."""
    json: bool = False
    """Print JSON instead of a table."""

    @property
    def run_options(self) -> RunOptions:
        """Return the options of the sample's run: one process, this one, without messages."""
        options = replace(super().run_options, workers=1, quiet=True)
        return replace(options, executor="local", address="", shard="", scratch_size="")


def estimate(config: EstimateConfig) -> Estimate:
    """Run all stages on a sample of the corpus, or of text of this machine, and scale to the whole corpus.

    Raises UsageError for an option out of range, and any GristmillError of a stage.
    """
    size = parse_bytes(config.sample, "--sample")
    first, end = _check(config)
    names = ("workers", "scratch_size", "shard", "executor", "address")
    unused = list[str]()
    for name in names:
        if getattr(config, name) != getattr(EstimateConfig, name):
            unused.append(f"--{name}")
    if unused:
        print(f"note: {', '.join(unused)} do not change an estimate: they only say where a run works", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="gristmill-estimate-") as name:
        folder = Path(name)
        corpus = config.corpus
        if corpus is None:
            corpus = folder / "machine"
            harvest_corpus(corpus, size / 1e6)
        extent, raw = write_samples(corpus, config, size, folder)
        small_config = _sample_config(config, folder / "small", folder / "small-out")
        large_config = _sample_config(config, folder / "large", folder / "large-out")
        check_config(small_config)
        with open_execution_context(config.run_options, folder / "estimate.lock") as context:
            options = replace(config.run_options, of_run=context)  # functions of the user have one worker for all runs
            _run(replace(small_config, out=folder / "warm-out"), options)  # loads and compiles what runs use
            small = _run(small_config, options)
            large = _run(large_config, options)
    text = large[0].counts.total("read").bytes
    sampled = Extent(large[0].counts.total("read").documents, text, 0, 1)
    removed = 0
    for run in large:
        if run.stage.is_in_funnel:
            removed += run.counts.total(DUPLICATE).documents
    duplicates = removed / max(1, sampled.documents)
    if config.bytes:
        given = parse_bytes(config.bytes, "--bytes")
        raw = raw.times(given / max(1, extent.text_bytes))
        documents = config.documents or ceil(given * extent.documents / max(1, extent.text_bytes))
        extent = Extent(documents, given, ceil(given / SLICE_BYTES), ceil(given / SLICE_BYTES))
    costs = _scale(small, large, extent, raw, config, duplicates)
    notes = list[str]()
    for run in large[first:end]:
        a_document = run.stage.seconds_a_document(config, extent.documents)
        if a_document.note:
            notes.append(a_document.note)
    return Estimate(extent, config.cores, sampled, duplicates, costs[first:end], notes)


def _check(config: EstimateConfig) -> tuple[int, int]:
    """Return the positions of the first stage and after the last one. Raises UsageError for an option out of range."""
    replace(super(EstimateConfig, config).run_options, shard="").check()
    for option in ("dry_run", "explain", "explain_tasks", "accept_versions", "retry_failed"):
        require(
            not getattr(config, option), f"--{option} has no effect on an estimate, which resumes no run: leave it out"
        )
    for option in ("bytes", "tokens"):
        require(
            not getattr(config.mix, option),
            f"--mix.{option}: expected --mix.weights, as the epochs for an amount are known only after a whole run",
        )
    if config.corpus is None:
        require(
            bool(config.documents and config.bytes),
            "expected the folder of a corpus, or --documents and --bytes; try gristmill estimate CORPUS, or "
            "gristmill estimate --documents 931_000_000 --bytes 4.5TB",
        )
        named = config.weights or config.dedup.keep.startswith("source:")
        require(not named, "--mix.weights and --dedup.keep source: name sources of a corpus; try with its folder")
        size = parse_bytes(config.bytes or "", "--bytes")
        require(
            1 <= (config.documents or 0) <= size,
            f"--documents: expected 1 to {size:,}, one for each byte, got {config.documents}",
        )
    elif config.documents is not None:
        raise UsageError(
            f"expected --bytes alone with a corpus, got --documents {config.documents}: the corpus says how long "
            "documents are"
        )
    require(1 <= config.cores <= MAX_CORES, f"--cores: expected 1 to {MAX_CORES:,}, got {config.cores}; try 64")
    for option in ("core_price", "storage_price"):
        value = getattr(config, option)
        require(0 <= value < inf, f"--{option}: expected a price of 0 or more, got {value}")
    if config.duplicates is not None and not 0 <= config.duplicates < 1:
        raise UsageError(f"--duplicates: expected a fraction below 1, got {config.duplicates}; try 0.4")
    return stage_positions(config, [stage.name for stage in plan_stages(config)])


def _sample_config(config: EstimateConfig, corpus: Path, out: Path) -> EstimateConfig:
    tokenizer = config.tokenizer
    if tokenizer.file is None:
        tokenizer = replace(tokenizer, exact=False)  # a sample may have fewer pieces than are asked for
    return replace(
        config, corpus=corpus, out=out, tokenizer=tokenizer, max_malformed=RunOptions.max_malformed, sources={},
        mix=replace(config.mix, weights=config.weights), normalize=replace(config.normalize, read_also=()),
    )  # fmt: skip


@dataclass(frozen=True)
class _StageRun:
    """A stage on a sample: its counts, CPU seconds, bytes through the operating system and left on disk."""

    stage: StageSpec
    counts: Counts
    cpu: float
    read: int
    written: int
    kept: int


def _run(config: EstimateConfig, options: RunOptions) -> list[_StageRun]:
    runs = list[_StageRun]()
    for stage in plan_stages(config):
        disk = disk_bytes(config.out)
        before = _used()
        counts = stage.call(context_of(config, stage, options))
        after = _used()
        stage.reject_empty(config, counts)
        kept = disk_bytes(config.out) - disk
        runs.append(
            _StageRun(
                stage, counts, after.cpu - before.cpu, after.read - before.read, after.written - before.written, kept
            )
        )
    return runs


class _Used(NamedTuple):
    """CPU seconds, and bytes through the operating system."""

    cpu: float
    read: int
    written: int


def _used() -> _Used:
    """Return what this process has used so far, with the worker that runs functions of the user, if there is one."""
    own = psutil.Process()
    cpu = processor_seconds()
    read = own.io_counters().read_chars
    written = own.io_counters().write_chars
    for process in own.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            counters = process.io_counters()
            cpu += times.user + times.system
            read += counters.read_chars
            written += counters.write_chars
    return _Used(cpu, read, written)


def _scale(
    small: Sequence[_StageRun], large: Sequence[_StageRun], extent: Extent, raw: RawCost, config: EstimateConfig,
    duplicates: float,
) -> list[StageCost]:  # fmt: skip
    """Return the costs on the whole corpus: work grows with the text, what is needed without text with the slices.

    A tokenizer is trained on a sample of a fixed size, and after the mix there are no duplicates.
    """
    texts = [runs[0].counts.total("read").bytes for runs in (small, large)]
    costs = list[StageCost]()
    on_disk = 0.0
    for less, more in zip(small, large, strict=True):
        text = float(extent.text_bytes)
        stage = more.stage
        if stage.is_after_mix and config.duplicates is not None:
            text *= (1 - config.duplicates) / (1 - duplicates)
        max_bytes = stage.max_text_bytes(config)
        if max_bytes is not None:
            text = min(text, max_bytes * texts[1] / max(1, more.counts.total("read").bytes))
        tasks = extent.slices / len(large[0].counts.tallies)  # for each of the sample
        repeats = 1 if stage.is_done_once else tasks
        cores = _grown(less.cpu, more.cpu, texts, text, repeats)
        a_document = stage.seconds_a_document(config, extent.documents)
        if a_document.cores:
            cores = a_document.cores * extent.documents
        read = _grown(less.read, more.read, texts, text, repeats)
        if stage.name == FIRST_STAGE:
            cores += raw.core_seconds
            read += raw.read
        if config.duplicates is not None:
            members = min(1.0, 2 * config.duplicates)  # each duplicate, and what is kept in its place
            cores = max(cores, stage.seconds_a_compared_byte(config) * members * text)
        serial = cores
        if not stage.is_serial:
            serial = min(cores, a_document.serial * extent.documents)
        wall = serial + (cores - serial) / min(config.cores, extent.slices)
        on_disk += _grown(less.kept, more.kept, texts, text)
        requests = stage.requests * extent.slices
        costs.append(
            StageCost(
                stage.name, cores, wall, read, _grown(less.written, more.written, texts, text), on_disk, ceil(requests),
            )
        )  # fmt: skip
    return costs


def _grown(less: float, more: float, texts: Sequence[int], text: float, repeats: float = 1.0) -> float:
    """Return a cost on the whole corpus, from the costs of two samples: a part grows with the text, the rest does not.

    The rest, such as a file of the tokenizer that is read, is `repeats` times what it is in the sample. Two times that
    differ by chance alone have no part that grows: no difference is made larger than the whole.
    """
    difference = max(0.0, more - less) / max(1, texts[1] - texts[0])
    slope = min(difference, more / texts[1])
    return slope * text + (more - slope * texts[1]) * repeats


_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def parse_bytes(text: str, option: str) -> int:
    """Parse a size whose units are powers of 1000, such as 4.5TB or 100GB; of 1024 with an i, such as 4.5TiB.

    >>> parse_bytes("4.5TB", "--bytes"), parse_bytes("1_000", "--bytes"), parse_bytes("2 KiB", "--bytes")
    (4500000000000, 1000, 2048)
    """
    number = text.strip().upper().removesuffix("B").replace("_", "")
    if number.endswith("I"):
        return parse_size(text.replace("_", ""), option)
    unit = number[-1:]
    power = _POWERS.get(unit, 0)  # of 1000
    if power:
        number = number.removesuffix(unit)
    try:
        size = float(number) * 1000**power
        if not 1 <= size < 1e21:
            raise ValueError(text)
    except ValueError:
        raise UsageError(f"{option}: expected a size with a unit, got {text!r}; try 4.5TB or 512MiB") from None
    return round(size)


def main(argv: Sequence[str] | None = None) -> None:
    """`gristmill estimate [CORPUS | pipeline.toml] [options]`: prints a table, or JSON."""
    arguments = given_words(argv)
    if arguments and not arguments[0].startswith("-"):
        option = "--config" if arguments[0].endswith(".toml") else "--corpus"
        arguments.insert(0, option)
    sys.exit(run_with_exit_code(lambda: _estimate_and_print(arguments), resumes=False))


def _estimate_and_print(arguments: list[str]) -> None:
    config = load_config(EstimateConfig, arguments, prog="gristmill estimate")
    estimated = estimate(config)
    console = wide_console()
    if config.json:
        console.print(estimated.to_json(), highlight=False, markup=False)
        return
    console.print(cost_table(estimated))
    console.print(
        explanation(estimated, config.duplicates, config.core_price, config.storage_price),
        highlight=False,
        markup=False,
    )


if __name__ == "__main__":
    main()
