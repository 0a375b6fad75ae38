"""Command: what `gristmill run` will cost on a corpus, from a sample of it that is run now on this machine."""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from gristmill.command import run_with_exit_code, wide_console
from gristmill.config import load_config
from gristmill.engine.options import parse_size
from gristmill.errors import UsageError
from gristmill.io.readers import SLICE_BYTES
from gristmill_cli.estimate.corpus_sample import Extent, sample_corpus
from gristmill_cli.estimate.cost_table import cost_table, explanation
from gristmill_cli.estimate.made_corpus import machine_texts, write_made_corpus
from gristmill_cli.estimate.stage_costs import StageCost, Volume, stage_costs
from gristmill_cli.estimate.stage_rates import Rates, measure_rates
from gristmill_cli.run_config import RunConfig
from gristmill_cli.run_stages import plan_stages

MAX_CORES = 1_000_000


@dataclass(frozen=True)
class EstimateConfig(RunConfig):
    """Estimate core hours, wall time, disk and storage requests of `gristmill run`, stage by stage.

    `gristmill estimate CORPUS`, or --config pipeline.toml; CORPUS --bytes 4.5TB for a larger corpus of such documents;
    --documents 931_000_000 --bytes 4.5TB where there is none. Runs all stages on a sample in a temporary folder, which
    takes some seconds, and scales: work with the bytes of text, requests with the files. Takes the options of
    `gristmill run`; --from and --until choose the stages.
    """

    corpus: Path | None = None  # type: ignore[assignment]  # None: --documents and --bytes say how large it is
    """Folder of the corpus: CORPUS/<source>/**."""
    out: Path = Path("out")
    """Not written to: the folder of the run."""
    documents: int | None = None
    """Number of documents of a corpus that is not here."""
    bytes: str | None = None
    """Size of its text, such as 4.5TB; units are powers of 1000, or of 1024 in 4.5TiB."""
    cores: int = 64
    """Cores of the machines together, for the wall time."""
    duplicates: float | None = None
    """Fraction of the documents that are duplicates; by default that of the sample, which sees only some of them."""
    sample: str = "16MB"
    """Size of the sample to measure."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class Estimate:
    """The costs of the stages of a run on a corpus, and what they were measured on."""

    volume: Volume
    rates: Rates
    stages: list[StageCost]

    def to_json(self) -> str:
        """JSON: the corpus, the sample, the stages, and their total."""
        sample = {"text_bytes": self.rates.text_bytes, "documents": self.rates.documents, "files": self.rates.files,
                  "duplicates": self.rates.duplicates, "seconds": self.rates.seconds}  # fmt: skip
        stages = [dataclasses.asdict(stage) | {"dollars": stage.dollars} for stage in self.stages]
        total = {name: sum(stage[name] for stage in stages) for name in stages[0] if name != "name"}
        total["peak_bytes"] = max(stage["peak_bytes"] for stage in stages)
        corpus = dataclasses.asdict(self.volume.extent)
        found = {"corpus": corpus, "cores": self.volume.cores, "sample": sample, "stages": stages, "total": total}
        return json.dumps(found, indent=2)


def estimate(config: EstimateConfig) -> Estimate:
    """Measure a sample of the corpus, or of text of this machine, and scale the result to the whole corpus.

    Raises UsageError for an option out of range, and any GristmillError of a stage.
    """
    sample_bytes = parse_bytes(config.sample, "--sample")
    _check(config)
    with tempfile.TemporaryDirectory(prefix="gristmill-estimate-") as name:
        folder = Path(name)
        corpus, given = config.corpus, None
        if corpus is None:
            given = given_extent(config, config.documents)
            mean = given.text_bytes // given.documents
            corpus = write_made_corpus(folder / "made", machine_texts(sample_bytes), sample_bytes, mean)
        samples = sample_corpus(
            corpus,
            folder / "samples",
            sample_bytes,
            config.text_column,
            config.normalize.read_also,
            config.max_malformed,
        )
        if config.corpus and config.bytes:
            size = parse_bytes(config.bytes, "--bytes")
            given = given_extent(config, ceil(size * samples.extent.documents / samples.extent.text_bytes))
        rates = measure_rates(config, samples, folder)
    volume = Volume(given or samples.extent, config.cores, parse_size(config.tokenizer.sample), config.duplicates)
    names = [stage.name for stage in plan_stages(config)]
    first = names.index(config.from_) if config.from_ else 0
    last = names.index(config.until) if config.until else len(names) - 1
    return Estimate(volume, rates, stage_costs(rates, volume)[first : last + 1])


def _check(config: EstimateConfig) -> None:
    config.run_options.check()
    if config.corpus is None and (config.mix.weights or config.dedup.keep.startswith("source:")):
        raise UsageError("--mix.weights and --dedup.keep source: name sources of a corpus: give its folder, or neither")
    if config.corpus is not None and config.documents is not None:
        raise UsageError(
            f"a corpus and --documents {config.documents}: the corpus says how long documents are; give --bytes alone "
            "for a larger corpus of such documents"
        )
    if config.bytes is not None:
        parse_bytes(config.bytes, "--bytes")
    if not 1 <= config.cores <= MAX_CORES:
        raise UsageError(f"--cores {config.cores}: wanted 1 to {MAX_CORES:,}")
    if config.duplicates is not None and not 0 <= config.duplicates < 1:
        raise UsageError(
            f"--duplicates {config.duplicates}: wanted a fraction of 0 or more and less than 1, such as 0.4"
        )
    names = [stage.name for stage in plan_stages(config)]
    for option, name in (("--from", config.from_), ("--until", config.until)):
        if name is not None and name not in names:
            raise UsageError(f"{option} {name}: this run has the stages {', '.join(names)}")
    if config.from_ and config.until and names.index(config.from_) > names.index(config.until):
        raise UsageError(f"--from {config.from_} --until {config.until}: wanted stages in the order of the run")


def given_extent(config: EstimateConfig, documents: int | None) -> Extent:
    """The extent of so many documents of --bytes, if their files are as large as slices.

    Raises UsageError if --documents and --bytes are not given, or cannot be.
    """
    if documents is None or config.bytes is None:
        raise UsageError(
            "wanted the folder of a corpus, or --documents and --bytes: gristmill estimate CORPUS, or "
            "gristmill estimate --documents 931_000_000 --bytes 4.5TB"
        )
    size = parse_bytes(config.bytes, "--bytes")
    if not 1 <= documents <= size:
        raise UsageError(f"--documents {documents}: wanted 1 or more, and at most one for each of {size:,} bytes")
    if size / documents < config.filter.threshold:
        raise UsageError(
            f"--documents {documents} --bytes {config.bytes}: all documents would be shorter than "
            f"--filter.threshold {config.filter.threshold}, and none would be left: check the numbers"
        )
    files = ceil(size / SLICE_BYTES)
    return Extent(documents, size, size, files, files, files)


def parse_bytes(text: str, option: str) -> int:
    """Parse a size whose units are powers of 1000, such as 4.5TB or 100GB; of 1024 with an i, such as 4.5TiB.

    >>> parse_bytes("4.5TB", "--bytes"), parse_bytes("1_000", "--bytes"), parse_bytes("2 KiB", "--bytes")
    (4500000000000, 1000, 2048)
    """
    number = text.strip().upper().removesuffix("B").replace("_", "")
    if number.endswith("I"):
        return parse_size(text.replace("_", ""), option)
    power = "KMGTP".find(number[-1:]) + 1 if number[-1:].isalpha() else 0
    try:
        size = float(number[:-1] if power else number) * 1000**power
        if not 1 <= size < 1e21:
            raise ValueError(text)
    except ValueError:
        raise UsageError(
            f"{option} {text!r} is not a size: wanted a number with a unit, such as 4.5TB or 512MiB"
        ) from None
    return round(size)


def main(argv: Sequence[str] | None = None) -> None:
    """`gristmill estimate [CORPUS | pipeline.toml] [options]`: prints a table, or JSON."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and not arguments[0].startswith("-"):
        arguments.insert(0, "--config" if arguments[0].endswith(".toml") else "--corpus")
    sys.exit(run_with_exit_code(lambda: _estimate_and_print(arguments)))


def _estimate_and_print(arguments: list[str]) -> None:
    config = load_config(EstimateConfig, arguments, prog="gristmill estimate")
    found, console = estimate(config), wide_console()
    if config.json:
        console.print(found.to_json(), highlight=False, markup=False)
        return
    console.print(cost_table(found.stages, found.volume))
    console.print(explanation(found.stages, found.volume, found.rates), highlight=False, markup=False)


if __name__ == "__main__":
    main()
