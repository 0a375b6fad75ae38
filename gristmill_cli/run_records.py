"""Records of finished stages of a run: the settings and counts of each, for --from, --dry_run and the funnel."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from gristmill.counts import Counts
from gristmill.engine.ledger import Ledger
from gristmill.engine.task import LIBRARIES, library_version
from gristmill.errors import UsageError, require
from gristmill.io.files import STATE_DIR
from gristmill.paths import spell_urls
from gristmill.storage.files import is_file, read_file, remove_files, remove_partial_files, write_file
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.pipeline import FIRST_STAGE, context_of
from gristmill_cli.stages.spec import StageSpec


class StageRecord(msgspec.Struct):
    """A finished stage: the settings it ran with, its counts, and how long its last call took.

    `tasks` are those whose outputs are there, whenever they ran; `core_seconds` and `retries` are of all of them.
    """

    settings: dict[str, Any]
    counts: Counts
    seconds: float = 0.0
    tasks: int = 0
    core_seconds: float = 0.0
    retries: int = 0


def load_record(out: Path, stage: str) -> StageRecord | None:
    """The record of the stage of that name, None if it has not finished or the record is damaged."""
    path = _path(out, stage)
    try:
        return msgspec.json.decode(read_file(path), type=StageRecord) if is_file(path) else None
    except ValueError:  # not JSON, of another type, or not UTF-8
        return None


def save_record(config: RunConfig, stage: StageSpec, counts: Counts, seconds: float) -> None:
    """Write the record of a stage that has finished."""
    costs = [cost for ledger in stage_ledgers(config, stage) for cost in ledger.costs()]
    core_seconds = round(sum(cost.core_seconds for cost in costs), 3)
    retries = sum(cost.retries for cost in costs)
    settings = stage.settings(context_of(config, stage))
    record = StageRecord(settings, counts, seconds, len(costs), core_seconds, retries)
    write_file(_path(config.out, stage.name), msgspec.json.encode(record))


def remove_record(out: Path, stage: StageSpec) -> None:
    """Remove the record of a stage, which is no longer finished."""
    path = _path(out, stage.name)
    remove_files([path])
    remove_partial_files([path])


def _path(out: Path, stage: str) -> Path:
    return out / STATE_DIR / "run" / f"{stage}.json"


def recorded_sources(out: Path) -> set[str] | None:
    """The sources of the corpus of a run, if it was read; its folder may be gone."""
    record = load_record(out, FIRST_STAGE)
    return {source for source, _, _ in record.counts.rows()} if record else None


def changed_settings(config: RunConfig, stage: StageSpec, record: StageRecord) -> str:
    """Return the settings that differ from those of the record, in words; '' if none does."""
    settings = stage.settings(context_of(config, stage))
    now = msgspec.json.decode(msgspec.json.encode(settings))
    names = [name for name in {**record.settings, **now} if now.get(name) != record.settings.get(name)]
    return ", ".join(f"{name} {_spell(record.settings.get(name))} → {_spell(now.get(name))}" for name in names)


def changed_libraries(config: RunConfig, stage: StageSpec) -> str:
    """Return the libraries that decide bytes of a stage and had another version when it ran, in words; '' if none."""
    changed = dict[str, str]()
    for ledger in stage_ledgers(config, stage):
        for record in ledger.read().values():
            for name in LIBRARIES:
                earlier = record.identity.get(name)
                if earlier is not None and earlier != library_version(name):
                    changed[name] = f"{name} {earlier} → {library_version(name)}"
    return ", ".join(changed.values())


def stage_ledgers(config: RunConfig, stage: StageSpec) -> list[Ledger]:
    """Return the ledgers of a stage's tasks."""
    engine_name = stage.engine_name or stage.name
    output = stage.path(config)
    folder = output.parent if output.suffix else output
    return [ledger for ledger in Ledger.all_in(folder / STATE_DIR) if ledger.stage == engine_name]


def _spell(value: Any) -> str:
    """A setting as it is given on a command line."""
    if isinstance(value, Mapping):
        given = {name: it for name, it in value.items() if it not in ("", None)}
        inner = (f"({_spell(it)})" if isinstance(it, Mapping) else _spell(it) for it in given.values())
        return " ".join(map(" ".join, zip(given, inner, strict=True))) or "none"
    return " ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


def stage_positions(config: RunConfig, names: Sequence[str]) -> tuple[int, int]:
    """Positions of the first stage (--from) and after the last one (--until) among a run's stages.

    Raises UsageError if one is not among them, or if they are in the wrong order.
    """
    for option, name in (("--from", config.from_), ("--until", config.until)):
        require(name is None or name in names, f"{option}: expected one of {', '.join(names)}, got {name}")
    first = names.index(config.from_) if config.from_ else 0
    end = names.index(config.until) + 1 if config.until else len(names)
    require(first < end, f"--from {config.from_} --until {config.until}: expected stages in the order of the run")
    return first, end


def choose_stages(config: RunConfig, stages: Sequence[StageSpec]) -> tuple[int, int]:
    """The `stage_positions` of a run. Raises UsageError if a stage before --from has not finished as it is set now."""
    first, end = stage_positions(config, [stage.name for stage in stages])
    for stage in stages[:first]:
        record = load_record(config.out, stage.name)
        if record is None:
            raise UsageError(f"--from {config.from_}: {stage.name} has not finished: give --from {stage.name}")
        if changed := changed_settings(config, stage, record):
            raise UsageError(
                f"--from {config.from_}: {stage.name} ran with other options ({changed}): give --from {stage.name}, "
                "or the options of before"
            )
    return first, end


def plan_table(config: RunConfig, stages: Sequence[StageSpec]) -> Table:
    """Table for --dry_run: each stage's output, settings and state. Raises UsageError as `choose_stages` does."""
    first, end = choose_stages(config, stages)
    table = Table("stage", "state", title="plan; nothing was run or written", box=None, pad_edge=False)
    is_current = True  # no stage so far is to run again
    for position, stage in enumerate(stages):
        record = load_record(config.out, stage.name)
        changed = changed_settings(config, stage, record) or changed_libraries(config, stage) if record else ""
        if record is None:
            state = "to run"
        elif changed:
            state = f"to run again: {changed}"
        else:
            state = "done; its files will be checked" if is_current else "to run again where its input changes"
        is_current = is_current and state.startswith("done")
        if not first <= position < end:
            state = "done, not checked" if position < first else "not in this run"
        settings = stage.settings(context_of(config, stage))
        spelled = " ".join(f"{name}={_spell(value)}" for name, value in settings.items())
        output = stage.path(config).relative_to(config.out)
        table.add_row(Text(stage.name), Text(spell_urls(f"{state}\nwrites {output} {spelled and f'by {spelled}'}")))
    return table
