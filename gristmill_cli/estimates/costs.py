"""Costs of a run, stage by stage, as a table and in sentences."""

import json
from dataclasses import asdict, dataclass

from rich.filesize import decimal
from rich.table import Table

from gristmill.wording import count_of, duration
from gristmill_cli.stages.pipeline import STAGES

DOLLARS_A_REQUEST = (0.6 * 0.0004 + 0.4 * 0.005) / 1000  # S3 Standard, us-east-1: of five about two write


@dataclass(frozen=True)
class Extent:
    """How large a corpus is."""

    documents: int
    text_bytes: int
    files: int
    slices: int  # of 64 MiB at most


@dataclass(frozen=True)
class StageCost:
    """Cost of a stage; `disk_bytes` is what lies on disk after it, without the corpus."""

    name: str
    core_seconds: float
    wall_seconds: float
    read_bytes: float
    written_bytes: float
    disk_bytes: float
    requests: int


@dataclass(frozen=True)
class Estimate:
    """The costs of a run on a corpus, the sample that they were measured on, and notes on what would change them."""

    extent: Extent
    cores: int
    sample: Extent
    duplicates: float
    stages: list[StageCost]
    notes: list[str]

    def to_json(self) -> str:
        """Return JSON: the corpus, the sample, the stages, and their total."""
        total = asdict(self.total)
        del total["name"]
        total["dollars"] = self.dollars
        return json.dumps({**asdict(self), "total": total}, indent=2)

    @property
    def total(self) -> StageCost:
        """Return the sum of all stages; on disk is what the last one leaves."""
        stages = self.stages
        return StageCost(
            "total",
            core_seconds=sum(stage.core_seconds for stage in stages),
            wall_seconds=sum(stage.wall_seconds for stage in stages),
            read_bytes=sum(stage.read_bytes for stage in stages),
            written_bytes=sum(stage.written_bytes for stage in stages),
            disk_bytes=stages[-1].disk_bytes,
            requests=sum(stage.requests for stage in stages),
        )

    @property
    def dollars(self) -> float:
        """Return the price of the requests, if all is in a bucket."""
        return self.total.requests * DOLLARS_A_REQUEST

    @property
    def core_hours_paid(self) -> float:
        """Return the hours of all cores from the first stage to the last, idle ones included."""
        return self.cores * self.total.wall_seconds / 3600

    @property
    def largest_disk(self) -> float:
        """Return the most bytes on disk after a stage, without the corpus."""
        return max(stage.disk_bytes for stage in self.stages)


def cost_table(estimate: Estimate) -> Table:
    """Return a table with a row for each stage, and their total."""
    extent = estimate.extent
    title = (
        f"{count_of(extent.documents, 'document')}, {decimal(extent.text_bytes)} of text in "
        f"{count_of(extent.files, 'file')}"
    )
    names = ("core time", "share", f"on {estimate.cores:,}", "read", "written", "on disk", "requests")
    table = Table("stage", title=title, box=None, title_justify="left", pad_edge=False)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    total = estimate.total
    for stage in [*estimate.stages, total]:
        share = ""
        if total.core_seconds:
            share = f"{stage.core_seconds / total.core_seconds:.0%}"
        sizes = [decimal(int(size)) for size in (stage.read_bytes, stage.written_bytes, stage.disk_bytes)]
        table.add_row(
            _SHORT_NAMES.get(stage.name, stage.name), duration(stage.core_seconds), share, duration(stage.wall_seconds),
            *sizes, f"{stage.requests:,}", style="bold" if stage is total else "",
        )  # fmt: skip
    return table


_SHORT_NAMES = {stage.name: stage.command for stage in STAGES if stage.command}


def explanation(estimate: Estimate, given: float | None, core_price: float, storage_price: float) -> str:
    """Return the sentences: the sum, what isn't linear, the prices, and what the sample was.

    `given` is the fraction of duplicates, if one was; prices are of a core for an hour and of a TB for a month.
    """
    total = estimate.total
    duplicates = f"{estimate.duplicates:.1%} of the sample's documents"
    if given is not None:
        duplicates = f"{given:.1%} of the documents, as given; {duplicates}"
    else:
        duplicates += ". A whole corpus has more: then `remove` reads more texts, and\nless is encoded; try "
        duplicates += "--duplicates 0.4"
    notes = "".join(f"{note}\n" for note in estimate.notes)
    prices = ""
    if core_price:
        hours = estimate.core_hours_paid
        price = hours * core_price
        prices += f"Machines: {estimate.cores:,} cores for {duration(total.wall_seconds)} are {hours:,.1f} core hours"
        prices += f" at {core_price:g}: {price:,.2f}.\n"
    if storage_price:
        size = estimate.largest_disk
        price = size / 1e12 * storage_price
        prices += f"Storage: {decimal(int(size))} at {storage_price:g} a TB and month: {price:,.2f} a month.\n"
    core_hours_a_tb = total.core_seconds / 3600 / (estimate.extent.text_bytes / 1e12)
    return (
        f"\n{core_hours_a_tb:,.0f} core hours per TB of text; "
        f"{count_of(total.requests, 'request')} if everything is in a bucket, about ${estimate.dollars:,.2f}.\nScaled "
        "linearly with the text, from two runs; train_tokenizer grows with --tokenizer.sample instead.\nIt is one "
        f"process, and so is the end of cluster and remove, whatever the number of cores.\n"
        f"{notes}{prices}Duplicates: {duplicates}.\n"
        f"Measured on this machine with {decimal(estimate.sample.text_bytes)} of text, "
        f"{count_of(estimate.sample.documents, 'document')}."
    )
