"""Markdown tables of bench_dedup's measurements."""

import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.dedup_rounds import Measurement, Report
from benchmarks.peers_minhash import BENCH_EXTRA, Contender

REFERENCE = "SlimPajama"
_SIGNATURES = ("contender", "MB/s, 1 core", "min..max", "docs/s", "× SlimPajama's", "MB/s, 2 cores", "memory +MB",
               "peak MB", "RMSE", "bias")  # fmt: skip
_GRAPHS = ("contender", "n", "seconds", "min..max", "M/s", "memory +MB", "peak MB", "components")


def markdown(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str]) -> str:
    """A Markdown table, padded for reading as text: the first column left-aligned, the others right-aligned."""
    table = [head, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    lines = [" | ".join(_pad(cell, widths[i], i) for i, cell in enumerate(row)) for row in table]
    rule = " | ".join("-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths))
    body = [f"| {line} |" for line in (lines[0], rule, *lines[1:])]
    return "\n".join([f"### {title}", "", *body, "", *(f"- {note}" for note in notes), ""])


def _pad(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if column else cell.ljust(width)


def signature_table(
    title: str, results: Sequence[Measurement], reference: Measurement | None, megabytes: dict[int, list[float]],
    documents: int, notes: Sequence[str],
) -> str:  # fmt: skip
    """Signature table. `megabytes[cores]` lists MB per process; ratios are medians over the rounds."""
    rows = [_signature_row(result, reference, megabytes, documents) for result in results if result.is_measured]
    return markdown(title, _SIGNATURES, rows, [*notes, *_not_measured(results)])


def graph_table(title: str, results: Sequence[tuple[int, Measurement]], notes: Sequence[str]) -> str:
    """LSH or components table, of pairs (number of signatures or edges, measurement)."""
    rows = [_graph_row(result, size) for size, result in results if result.is_measured]
    return markdown(title, _GRAPHS, rows, [*notes, *_not_measured([result for _, result in results])])


def calibration_range(results: Iterable[Measurement]) -> str:
    """Range of the calibration loop's times: the variation of the machine's speed between processes."""
    times = [
        report["calibration"] for result in results for cores in result.reports for report in result.all_reports(cores)
    ]
    return f"calibration loop: {min(times) * 1e3:.0f} to {max(times) * 1e3:.0f} ms" if times else "no measurement"


def _signature_row(
    result: Measurement, reference: Measurement | None, megabytes: dict[int, list[float]], documents: int
) -> list[str]:
    rates, of_two = (_rates(result, sizes) for sizes in megabytes.values())
    median, compared = statistics.median(rates), _rates(reference, megabytes[1]) if reference else []
    ratio = statistics.median(one / other for one, other in zip(rates, compared, strict=True)) if compared else None
    per_second = median * documents / megabytes[1][0]
    return [
        _name_cell(result),
        three_digits(median),
        _range_cell(rates),
        f"{per_second:,.0f}",
        three_digits(ratio) if ratio else "",
        three_digits(statistics.median(of_two)),
        *_memory_cells(result),
        *_error_cells(result.reports[1][0][0]),
    ]


def _graph_row(result: Measurement, size: int) -> list[str]:
    times = [time for report in result.all_reports() for time in report["times"]]
    median, components = statistics.median(times), result.all_reports()[0]["components"][0]
    return [
        _name_cell(result),
        f"{size:,}",
        three_digits(median),
        _range_cell(times),
        three_digits(size / median / 1e6),
        *_memory_cells(result),
        f"{components:,}",
    ]


def _rates(result: Measurement, megabytes: Sequence[float]) -> list[float]:
    """MB/s per round: the sum over processes, each by the median time of its repetitions."""
    return [
        sum(size / statistics.median(report["times"]) for size, report in zip(megabytes, reports, strict=True))
        for reports in result.reports[len(megabytes)]
    ]


def _memory_cells(result: Measurement) -> tuple[str, str]:
    """Growth of resident memory during the measurement, and its peak, in MB."""
    reports = result.all_reports()
    return f"{max(report['growth'] for report in reports):,.0f}", f"{max(report['peak'] for report in reports):,.0f}"


def _error_cells(report: Report) -> tuple[str, str]:
    if "exact" not in report:
        return "", ""
    errors = np.array(report["estimated"]) - np.array(report["exact"])
    return f"{np.sqrt(np.mean(errors**2)):.4f}", f"{np.mean(errors):+.4f}"


def _name_cell(result: Measurement) -> str:
    is_ours = result.contender.name.startswith("ours")
    return f"**{result.contender.name}**" if is_ours else f"{result.contender.name} ({result.version})"


def _not_measured(results: Sequence[Measurement]) -> Iterable[str]:
    missing = {result.contender.name: result for result in results if not result.is_measured}
    for name, result in missing.items():
        hint = result.contender.hint if isinstance(result.contender, Contender) else BENCH_EXTRA
        yield f"{name}: failed, {result.failure}" if result.failure else f"{name}: not installed ({hint})"


def _range_cell(numbers: Sequence[float]) -> str:
    return f"{three_digits(min(numbers))}..{three_digits(max(numbers))}"


def three_digits(number: float) -> str:
    """Format with three significant digits.

    >>> three_digits(1234.5), three_digits(12.345), three_digits(0.012345)
    ('1,234', '12.3', '0.0123')
    """
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
