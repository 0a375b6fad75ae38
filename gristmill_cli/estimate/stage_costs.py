"""What a run costs on a whole corpus, stage by stage: core hours, wall time, disk and storage requests."""

from dataclasses import dataclass, replace
from math import ceil

from gristmill_cli.estimate.corpus_sample import Extent
from gristmill_cli.estimate.stage_rates import TRAINING, Rates, StageRates
from preprocessing.shuffle_holdout import MAX_PART_BYTES, MIN_PARTS

# S3 Standard, us-east-1, as listed on https://aws.amazon.com/s3/pricing in November 2026.
DOLLARS_PER_1000_PUTS = 0.005  # and lists
DOLLARS_PER_1000_GETS = 0.0004
_KEYS_PER_LIST = 1000  # of one answer of S3

SERIAL = ("generate_connected_components", "generate_duplicates_dict", TRAINING)  # end in a task that cannot be divided
AFTER_MIX = ("pass2", "dedup_train", TRAINING, "tokenize_corpus", "tokenize_holdout")  # read parts, without duplicates

LOADS_TOKENIZER = ("tokenize_corpus", "tokenize_holdout")  # every process does, which takes longer than all else
_STARTS = 2  # of the command: itself, and the server of its worker processes


@dataclass(frozen=True)
class StageCost:
    """What a stage takes; `peak_bytes` is on disk while it runs, with what earlier stages have left there."""

    name: str
    core_seconds: float
    wall_seconds: float
    serial_seconds: float
    read_bytes: float
    written_bytes: float
    peak_bytes: float
    gets: int
    puts: int
    lists: int

    @property
    def dollars(self) -> float:
        """The price of the requests."""
        return ((self.puts + self.lists) * DOLLARS_PER_1000_PUTS + self.gets * DOLLARS_PER_1000_GETS) / 1000


@dataclass(frozen=True)
class Volume:
    """The work to do: the corpus, cores, bytes of the tokenizer's sample at most, and the share of duplicates.

    `duplicates` is a share of the documents; None: as many as in the sample.
    """

    extent: Extent
    cores: int
    tokenizer_bytes: int
    duplicates: float | None = None


def stage_costs(rates: Rates, volume: Volume) -> list[StageCost]:
    """The cost of each stage, in order.

    Work and disk grow with the text; tasks and requests with the slices of the corpus or, after the mix, with the
    parts that it writes. Every process starts up once a stage; the command's own start is added to the first stage.
    """
    costs, kept = list[StageCost](), 0.0
    for stage in rates.stages:
        costs.append(_stage_cost(stage, rates, volume, kept))
        kept += stage.kept.at(_text_bytes(stage, rates, volume))
    first, start = costs[0], _STARTS * rates.command_cpu
    return [
        replace(first, core_seconds=first.core_seconds + start, wall_seconds=first.wall_seconds + start,
                serial_seconds=first.serial_seconds + start),
        *costs[1:],
    ]  # fmt: skip


def _stage_cost(stage: StageRates, rates: Rates, volume: Volume, kept_before: float) -> StageCost:
    extent, text = volume.extent, _text_bytes(stage, rates, volume)
    of_groups, of_files = _growth(stage, rates, volume)
    tasks = ceil(stage.tasks * of_groups)
    processes = min(volume.cores, tasks)
    trained = stage.per_trained_byte * min(volume.tokenizer_bytes, rates.trained_share * text)
    once = stage.name == TRAINING
    fixed = stage.cpu.fixed * (1 if once else processes if stage.name in LOADS_TOKENIZER else of_groups)
    work = fixed + stage.cpu.per_byte * text
    serial = trained + (fixed if once else work if stage.name in SERIAL else 0)
    files = _parts(extent) if stage.name in AFTER_MIX else extent.files
    return StageCost(
        stage.name,
        core_seconds=work + trained + stage.startup * processes,
        wall_seconds=stage.startup + serial + (work + trained - serial) / processes,
        serial_seconds=stage.startup + serial,
        read_bytes=stage.reads.at(text),
        written_bytes=stage.writes.at(text),
        peak_bytes=kept_before + stage.kept.at(text) + stage.temporary.at(text),
        gets=round(stage.gets * of_files),
        puts=round(stage.puts * of_files),
        lists=ceil(files / _KEYS_PER_LIST),
    )


def _text_bytes(stage: StageRates, rates: Rates, volume: Volume) -> float:
    """Bytes of text in the corpus; after the mix fewer, if it has more duplicates than the sample."""
    text = volume.extent.text_bytes
    if volume.duplicates is None or stage.name not in AFTER_MIX:
        return text
    return text * (1 - volume.duplicates) / (1 - rates.duplicates / rates.documents)


def _growth(stage: StageRates, rates: Rates, volume: Volume) -> tuple[float, float]:
    """How many times as many tasks, and slices or files, the stage has as in the sample."""
    if stage.name in AFTER_MIX:
        parts = _parts(volume.extent) / MIN_PARTS
        return parts, parts
    return volume.extent.groups / rates.groups, volume.extent.slices / rates.slices


def _parts(extent: Extent) -> int:
    """Files of the shuffled train set."""
    return max(MIN_PARTS, ceil(extent.text_bytes / MAX_PART_BYTES))
