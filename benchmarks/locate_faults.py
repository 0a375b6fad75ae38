"""Locates every planted fault and says whether tensor, pattern and axis are named rightly; and twenty right layouts.

    python -m benchmarks.locate_faults --out faults.md

Each is trained once more with recorders, in float64 and in bf16. Runs from a checkout, as the faults are the tests'.
"""

import argparse
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from gristmill_parity.explain import Explainer
from gristmill_parity.recorded_case import record_case
from gristmill_parity.recording.verdict import Verdict
from tests.training.parity.located_faults import Planted, clean_cases, planted_faults
from tests.training.parity.test_explain import record_with_fault
from training.distributed.rank_pool import RankPool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the tables there, in Markdown")
    parser.add_argument("--precision", choices=("fp64", "bf16"), action="append", help="by default both")
    parser.add_argument("--only", default="", help="faults and layouts whose names have this text")
    options = parser.parse_args()
    lines = list[str]()
    for precision in options.precision or ("fp64", "bf16"):
        with RankPool(8) as ranks:
            explainer = Explainer(ranks)
            lines += locate(explainer, precision, options.only)
            lines += search_clean(explainer, precision, options.only)
            explainer.close()
        if options.out is not None:
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def locate(explainer: Explainer, precision: str, only: str) -> list[str]:
    """Return a table of the faults in a precision, with a score."""
    rows = list[str]()
    right = 0
    hidden = 0
    chosen = [fault.in_precision(precision) for fault in planted_faults()]
    chosen = [planted for planted in chosen if only in f"{planted.name} {planted.case}"]
    for planted in chosen:
        explainer.job = partial(record_with_fault, planted.fault)
        row, is_right, is_hidden = _locate_one(explainer, planted, precision)
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
        right += is_right
        hidden += is_hidden
    score = f"{precision}: {right} of {len(chosen) - hidden} faults named rightly"
    score += f"; {hidden} are smaller than rounding" if hidden else ""
    print(score, file=sys.stderr, flush=True)
    head = ["| fault | layout | found | pattern | axes | times its tolerance | |", "|---" * 7 + "|"]
    return [f"{score}.", "", *head, *rows, ""]


def _locate_one(explainer: Explainer, planted: Planted, precision: str) -> tuple[str, bool, bool]:
    layout = str(planted.case).replace(f" {precision}", "")
    try:
        verdict = explainer.verdict(planted.case)
    except Exception as error:
        text = str(error).strip().splitlines()[-1][:90]
        return f"| {planted.name} | {layout} | {text} | | | | wrong: not located |", False, False
    if verdict.is_clean and precision == "bf16" and planted.hidden_in_16_bits:
        return f"| {planted.name} | {layout} | nothing | | | | smaller than rounding |", False, True
    mistakes = planted.mistakes(verdict)
    judged = "right" if not mistakes else f"wrong: {', '.join(mistakes)}"
    return f"| {planted.name} | {layout} | {_cells(verdict)} | {judged} |", not mistakes, False


def _cells(verdict: Verdict) -> str:
    factor = f" {verdict.pattern.factor:.3g}" if verdict.pattern.kind == "factor" else ""
    axes = ", ".join(verdict.pattern.axes[:2])
    return f"{verdict.tensor} | {verdict.pattern.kind}{factor} | {axes} | {verdict.share:.2g}"


def search_clean(explainer: Explainer, precision: str, only: str) -> list[str]:
    """Return a table of right layouts: in none of them is anything to be found."""
    rows = list[str]()
    found = 0
    explainer.job = record_case
    cases = [replace(case, precision=precision, reference="one process") for case in clean_cases()]
    cases = [case for case in cases if only in str(case)]
    for case in cases:
        started = time.monotonic()
        verdict = explainer.verdict(case)
        found += not verdict.is_clean
        seconds = time.monotonic() - started
        what = "nothing" if verdict.is_clean else f"**{verdict.tensor}**"
        rows.append(f"| {case} | {verdict.compared:,} | {verdict.share:.0%} | {what} | {seconds:.1f} |")
        print(rows[-1], file=sys.stderr, flush=True)
    head = ["| right layout | tensors | largest difference, of its tolerance | found | seconds |", "|---" * 5 + "|"]
    return [f"{precision}: something found in {found} of {len(cases)} right layouts.", "", *head, *rows, ""]


if __name__ == "__main__":
    main()
