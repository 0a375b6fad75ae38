"""Runs the trainer's tests on the oldest and the newest torch: `nox`; `nox -- tests/training/parallel` runs some.

Each session makes its own environment, of some 7 GB, and prints a row of the table in docs/reference/development.md.
"""

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import nox

TORCH = ("2.11.0", "2.15.0")
# of constraints.txt: pinned for another torch
_OWN_PINS = ("torch==", "sympy==", "networkx==", "fsspec==", "filelock==")
_TOOLS = ("pytest", "pytest-xdist", "hypothesis", "transformers", "obstore")


@nox.session(venv_backend="venv", reuse_venv=True)
@nox.parametrize("torch", TORCH)
def trainer(session: nox.Session, torch: str) -> None:
    """The trainer's tests on one version of torch."""
    folder = Path(session.create_tmp())
    constraints, report = folder / "constraints.txt", folder / "report.xml"
    pins = Path("constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    constraints.write_text("".join(pin for pin in pins if not pin.startswith(_OWN_PINS)), encoding="utf-8")
    session.install("-c", str(constraints), f"torch=={torch}", "-e", ".[train]", *_TOOLS)
    tests = session.posargs or ["tests/training"]
    session.run("pytest", *tests, f"--junitxml={report}", env={"OMP_NUM_THREADS": "1"}, success_codes=[0, 1])
    counts = _counts(report)
    print("| torch | passed | skipped | refused | failed |\n|---|---|---|---|---|")
    print(f"| {torch} |", " | ".join(str(counts[kind]) for kind in ("passed", "skipped", "refused", "failed")), "|")
    if counts["failed"]:
        session.error(f"{counts['failed']} tests failed with torch {torch}")


def _counts(report: Path) -> Counter[str]:
    """Number of tests that passed, failed, were skipped, and were skipped as they were refused with the reason."""
    counts: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        if skipped is not None:
            counts["refused" if skipped.get("message", "").startswith("refused: ") else "skipped"] += 1
        else:
            bad = case.find("failure") is not None or case.find("error") is not None
            counts["failed" if bad else "passed"] += 1
    return counts
