"""Command: what goes on in an output folder: which stages are done, who works, what was retried, what it has cost."""

from pathlib import Path

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from gristmill.command import command
from gristmill.errors import InputError
from gristmill.io.files import STATE_DIR
from gristmill.storage.files import is_folder
from gristmill_cli.status.works import Status, Work, find_status


def status(out: Positional[Path], json: bool = False) -> Group | Text:
    """Tell how far a run or a stage is, whoever works on it, here or on other machines. Changes nothing.

    Processes on other machines are watched for up to half the time after which they would count as dead (15 s).

    Args:
        out: The output folder of a run or of stages; also s3://bucket/folder.
        json: Print JSON.
    """
    if not is_folder(out):
        raise InputError(f"{out}: there is no such folder. Give the --out of a run, or a stage's output folder")
    found = find_status(out)
    if json:
        return Text(msgspec.json.encode(found).decode())
    parts: list[Text | Table] = [Text(line) for line in _lines(found)]
    for work in found.works:
        if work.processes:
            parts += [Text(), _processes(work)]
    if not is_folder(out / STATE_DIR):
        parts.append(Text(f"{out} is neither the --out of a run nor the output folder of a stage"))
    return Group(*parts)


def _lines(found: Status) -> list[str]:
    lines = []
    for state in ("finished", "running", "stopped", "waiting"):
        if names := [name for name, its in found.stages.items() if its == state]:
            lines.append(f"stages {state}: {', '.join(names)}")
    lines += [_line(work) for work in found.works]
    if not any(work.state == "working" for work in found.works):
        lines.append("nothing is running here")
    return lines


def _line(work: Work) -> str:
    """What is known of a stage or run, in one line."""
    parts = [f"{work.name} in {work.folder}: {work.state}"]
    if work.tasks:
        taken = f", {work.tasks_running:,} taken" if work.tasks_running else ""
        parts.append(f"{work.step}: {work.tasks_done:,} of {work.tasks:,} tasks done{taken}")
    elif work.records:
        parts.append(f"{work.records:,} tasks done in this run of the stage")
    if work.retried:
        parts.append(f"{work.retried:,} retried")
    parts += [f"{work.core_hours:,.2f} core hours so far"] if work.core_hours else []
    parts += [f"{work.holder} was in charge"] if work.state == "stopped" and work.holder else []
    return "; ".join(parts) + (f"; {work.error}" if work.error else "")


def _processes(work: Work) -> Table:
    table = Table("process", "host", "since", "", "tasks done", "retried", "core hours", "runs now", box=None)
    for each in work.processes:
        role = each.role if each.alive else f"{each.role}; dead"
        more = f" and {len(each.running) - 1:,} more" if each.running[1:] else ""
        table.add_row(
            str(each.process), Text(each.host), each.since, role, f"{each.tasks_done:,}",
            f"{each.retried:,}", f"{each.core_hours:,.3f}", Text("".join(each.running[:1]) + more),
        )  # fmt: skip
    return table


if __name__ == "__main__":
    command(status)
