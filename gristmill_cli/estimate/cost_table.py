"""The costs of a run as a table, and in sentences what decides them."""

import math
from collections.abc import Sequence

from rich.table import Table

from gristmill_cli.estimate.stage_costs import StageCost, Volume
from gristmill_cli.estimate.stage_rates import Rates

_MANY_SERIAL = 0.1  # of the wall time: worth a sentence
_NAMED = 3  # stages that decide
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def cost_table(stages: Sequence[StageCost], volume: Volume) -> Table:
    """A row for each stage, and their total."""
    extent = volume.extent
    table = Table(
        "stage", "core time", "share", f"wall, {volume.cores} cores", "read", "written", "peak on disk", "GET", "PUT",
        "LIST", "requests",
        title=f"{extent.documents:,} documents, {size(extent.text_bytes)} of text in {extent.files:,} files",
        box=None, title_justify="left",
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    total = sum(stage.core_seconds for stage in stages)
    for stage in stages:
        table.add_row(*_cells(stage.name, [stage], total))
    table.add_row(*_cells("total", stages, total), style="bold")
    return table


def _cells(name: str, stages: Sequence[StageCost], total: float) -> list[str]:
    cores = sum(stage.core_seconds for stage in stages)
    return [
        name, duration(cores), f"{cores / total:.0%}" if total else "",
        duration(sum(stage.wall_seconds for stage in stages)), size(sum(stage.read_bytes for stage in stages)),
        size(sum(stage.written_bytes for stage in stages)), size(max(stage.peak_bytes for stage in stages)),
        *(f"{sum(getattr(stage, column) for stage in stages):,}" for column in ("gets", "puts", "lists")),
        f"${sum(stage.dollars for stage in stages):,.2f}",
    ]  # fmt: skip


def explanation(stages: Sequence[StageCost], volume: Volume, rates: Rates) -> str:
    """Sentences: what decides the core hours, the wall time and the disk, and what was measured."""
    total, wall = (sum(getattr(stage, name) for stage in stages) for name in ("core_seconds", "wall_seconds"))
    text = volume.extent.text_bytes
    ranked = sorted(stages, key=lambda stage: -stage.core_seconds)[:_NAMED]
    shares = ", ".join(f"{stage.name} {stage.core_seconds / total:.0%}" for stage in ranked)
    lines = [f"Core time {duration(total)}, {total / 3600 / (text / 1e12):,.0f} core hours a TB of text: {shares}."]
    serial = sorted(stages, key=lambda stage: -stage.serial_seconds)[:_NAMED]
    seconds = sum(stage.serial_seconds for stage in stages)
    if seconds > _MANY_SERIAL * wall:
        lines.append(
            f"{seconds / wall:.0%} of the wall time is work that more cores do not speed up: "
            + ", ".join(f"{stage.name} {duration(stage.serial_seconds)}" for stage in serial)
            + "."
        )
    peak = max(stages, key=lambda stage: stage.peak_bytes)
    lines.append(f"The disk holds most in {peak.name}: {size(peak.peak_bytes)}, beside the corpus.")
    lines.append("Requests are counted as if the corpus and the output were in a bucket of S3; a disk needs none.")
    lines.append(_duplicates(volume, rates))
    lines.append(
        f"Measured in {rates.seconds:.0f} s on this machine, with {size(rates.text_bytes)} of text: "
        f"{rates.documents:,} documents of {rates.files:,} files."
    )
    if rates.startup_unknown:
        lines.append("Kernels were compiled meanwhile, so the start of processes is left out: run again for it.")
    return "\n".join(lines)


def _duplicates(volume: Volume, rates: Rates) -> str:
    share, extent = rates.duplicates / rates.documents, volume.extent
    if volume.duplicates is not None:
        return f"Duplicates: {volume.duplicates:.1%} of the documents, as was given; {share:.1%} in the sample."
    if (rates.documents, rates.text_bytes) == (extent.documents, extent.text_bytes):
        return f"Duplicates: {share:.1%} of the documents; the sample is the whole corpus."
    return (
        f"Duplicates: {share:.1%} of the sample's documents. A whole corpus has more, and then costs less after pass1: "
        "try --duplicates 0.4."
    )


def duration(seconds: float) -> str:
    """A time in seconds, minutes or hours.

    >>> duration(3.21), duration(600), duration(7_200), duration(3.6e6)
    ('3.2 s', '10.0 min', '2.0 h', '1,000 h')
    """
    if seconds < 120:
        return f"{seconds:.1f} s"
    number, unit = (seconds / 60, "min") if seconds < 7200 else (seconds / 3600, "h")
    return f"{number:,.1f} {unit}" if number < 100 else f"{number:,.0f} {unit}"


def size(count: float) -> str:
    """A number of bytes with a unit, a power of 1000.

    >>> size(999), size(4.5e12), size(12_345_678)
    ('999 B', '4.5 TB', '12.3 MB')
    """
    power = max(0, min(5, int(math.log10(max(count, 1)) // 3)))
    return f"{count / 1000**power:,.1f} {_UNITS[power]}" if power else f"{count:.0f} B"
