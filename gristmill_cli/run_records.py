"""Records of finished stages of a run: the settings and counts of each, for --from, --dry_run and the funnel."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from gristmill.counts import Counts
from gristmill.engine.staleness.ledger import Ledger
from gristmill.engine.staleness.records import MadeWith
from gristmill.engine.staleness.reruns import changed_steps, outdated_versions, spell_version, spell_versions
from gristmill.errors import UsageError, require
from gristmill.io.files import STATE_DIR
from gristmill.paths import spell_urls
from gristmill.storage.files import is_file, read_file, remove_files, remove_partial_files, write_file
from gristmill.wording import count_of, duration, verb_for
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.pipeline import FIRST_STAGE, context_of
from gristmill_cli.stages.spec import StageSpec


class StageRecord(msgspec.Struct):
    """A finished stage: the settings it ran with, its counts, and how long its last call took that had work to do.

    `tasks` are the tasks whose outputs are there, whenever they ran; `core_seconds` and `retries` are of all of them.
    `outside_files` are a SHA-256 of files from outside of the run that it reads, and `used_up` says that its documents
    were removed, both with --remove_used. `alarms` name the run's folder OUT.
    `kept_versions` are other versions that made some of them, then and now, kept by --accept_versions.
    """

    settings: dict[str, Any]
    counts: Counts
    seconds: float = 0.0
    tasks: int = 0
    core_seconds: float = 0.0
    retries: int = 0
    kept_versions: dict[str, tuple[str, str]] = {}
    outside_files: str = ""
    used_up: bool = False
    alarms: list[str] = []


def load_record(out: Path, stage: str) -> StageRecord | None:
    """Return the record of the stage of that name, None if it has not finished or the record is damaged."""
    path = _path(out, stage)
    if not is_file(path):
        return None
    try:
        return msgspec.json.decode(read_file(path), type=StageRecord)
    except ValueError:  # not JSON, of another type, or not UTF-8
        return None


def load_records(out: Path, stages: Iterable[StageSpec]) -> dict[str, StageRecord | None]:
    """Return the record of each stage by its name, as load_record does."""
    return {stage.name: load_record(out, stage.name) for stage in stages}


def save_record(
    config: RunConfig,
    stage: StageSpec,
    counts: Counts,
    seconds: float,
    earlier: StageRecord | None = None,
    alarms: Sequence[str] = (),
    outside_files: str = "",
) -> None:
    """Write the record of a stage that has finished; one that had nothing to do keeps the seconds of its record."""
    costs = _costs(config, stage)
    core_seconds = round(sum(cost.core_seconds for cost in costs), 3)
    retries = sum(cost.retries for cost in costs)
    settings = stage.settings(context_of(config, stage))
    kept = outdated_tasks(costs, stage.own_versions(context_of(config, stage))).versions
    if earlier and (earlier.tasks, earlier.core_seconds, earlier.counts) == (len(costs), core_seconds, counts):
        seconds = earlier.seconds
    record = StageRecord(settings, counts, seconds, len(costs), core_seconds, retries, kept, outside_files)
    record.alarms = list(alarms)
    write_record(config.out, stage.name, record)


def write_record(out: Path, stage: str, record: StageRecord) -> None:
    """Write the record of the stage of that name."""
    write_file(_path(out, stage), msgspec.json.encode(record))


def remove_record(out: Path, stage: StageSpec) -> None:
    """Remove the record of a stage, which is no longer finished."""
    path = _path(out, stage.name)
    remove_files([path])
    remove_partial_files([path])


def _path(out: Path, stage: str) -> Path:
    return out / STATE_DIR / "run" / f"{stage}.json"


def recorded_sources(out: Path) -> set[str] | None:
    """Return the sources of the corpus of a run, if it was read; its folder may be gone."""
    record = load_record(out, FIRST_STAGE)
    if record is None:
        return None
    return {source for source, _, _ in record.counts.rows()}


def changed_settings(config: RunConfig, stage: StageSpec, record: StageRecord) -> str:
    """Return the settings that differ from the record's, in words; '' if none does."""
    settings = stage.settings(context_of(config, stage))
    now = msgspec.json.decode(msgspec.json.encode(settings))
    before = record.settings
    changes = list[str]()
    for name in {**before, **now}:
        if now.get(name) != before.get(name):
            changes.append(_spell_change(name, before.get(name), now.get(name)))
    return ", ".join(changes)


def _spell_change(name: str, before: Any, now: Any) -> str:
    """Return how a setting changed; of [sources] which are new, gone or changed."""
    if name != "sources" or not (before and now):
        return f"{name} {_spell(before) or 'none'} → {_spell(now) or 'none'}"
    changes = list[str]()
    for source in {**before, **now}:
        if source not in before:
            changes.append(f"source {source} new")
        elif source not in now:
            changes.append(f"source {source} gone")
        else:
            options = now[source]
            for option in {**before[source], **options}:
                if before[source].get(option) != options.get(option):
                    change = _spell_change(option, before[source].get(option), options.get(option))
                    changes.append(f"source {source}: {change}")
    return ", ".join(changes)


@dataclass
class Outdated:
    """Work of a stage by other versions of Gristmill or of libraries: then and now by name, tasks, their cost.

    `steps`: in words, which steps on documents are new or gone. Such tasks run again, whatever versions are accepted.
    """

    versions: dict[str, tuple[str, str]] = field(default_factory=dict)
    steps: dict[str, None] = field(default_factory=dict)
    tasks: int = 0
    core_seconds: float = 0.0


def outdated_tasks(costs: Iterable[MadeWith], own_versions: Mapping[str, str]) -> Outdated:
    """Return which of a stage's tasks were made with other versions than today's; `own_versions` are Gristmill's."""
    outdated = Outdated()
    for cost in costs:
        steps = changed_steps(cost.identity, own_versions)
        versions = dict[str, tuple[str, str]]()
        if not steps:
            versions = outdated_versions(cost.identity, own_versions)
        if steps or versions:
            outdated.steps |= dict.fromkeys(steps)
            outdated.versions |= versions
            outdated.tasks += 1
            outdated.core_seconds += cost.core_seconds
    return outdated


def note_versions(config: RunConfig, stages: Sequence[StageSpec]) -> None:
    """Say, before a run begins, which stages run again as versions are others, and what that costs."""
    versions = dict[str, tuple[str, str]]()
    names = list[str]()
    tasks = 0
    core_seconds = 0.0
    for stage in stages:
        record = load_record(config.out, stage.name)
        if record is None or changed_settings(config, stage, record):
            continue
        outdated = outdated_tasks(_costs(config, stage), stage.own_versions(context_of(config, stage)))
        if outdated.steps:
            took = f"{count_of(outdated.tasks, 'task')} that took {duration(outdated.core_seconds)} of core time"
            print(f"note: {stage.name} runs again, as {', '.join(outdated.steps)}: {took}", file=sys.stderr, flush=True)
        elif outdated.tasks:
            names.append(stage.name)
            for name, change in outdated.versions.items():
                versions[name.replace("the stage", stage.name)] = change
            tasks += outdated.tasks
            core_seconds += outdated.core_seconds
    if not names:
        return
    changes = spell_versions(versions)
    if config.accept_versions:
        said = f"{changes}: --accept_versions keeps what {', '.join(names)} wrote"
    else:
        workers = config.run_options.processes
        cost = f"{count_of(tasks, 'task')} that took {duration(core_seconds)} of core time"
        wall = f"about {duration(core_seconds / workers)} with {count_of(workers, 'worker')}"
        verb = verb_for(len(names), "runs", "run")
        said = f"{changes}: {', '.join(names)} {verb} again, {cost}, {wall}; --accept_versions keeps what is there"
    print(f"note: {said}", file=sys.stderr, flush=True)


def has_other_versions(config: RunConfig, stage: StageSpec) -> bool:
    """Return whether a stage has something to write again as versions are others."""
    outdated = outdated_tasks(_costs(config, stage), stage.own_versions(context_of(config, stage)))
    return bool(outdated.steps) or (bool(outdated.tasks) and not config.accept_versions)


def kept_versions(stages: Mapping[str, StageRecord]) -> Iterator[str]:
    """Yield which stages keep, by --accept_versions, what other versions of libraries made."""
    for name, record in stages.items():
        for versioned, (then, now) in record.kept_versions.items():
            made_with = spell_version(versioned, then)
            yield f"Some of what {name} wrote was made with {made_with}, and kept by --accept_versions at {now}."


def _costs(config: RunConfig, stage: StageSpec) -> list[MadeWith]:
    costs = list[MadeWith]()
    for ledger in stage_ledgers(config, stage):
        costs += ledger.costs()
    return costs


def stage_ledgers(config: RunConfig, stage: StageSpec) -> list[Ledger]:
    """Return the ledgers of a stage's tasks."""
    folder = stage.path(config)
    if folder.suffix:  # of a file
        folder = folder.parent
    return [ledger for ledger in Ledger.all_in(folder / STATE_DIR) if ledger.stage == stage.engine.name]


def _spell(value: Any) -> str:
    """Return a setting as it is given on a command line."""
    if isinstance(value, Mapping):
        spelled = list[str]()
        for name, item in value.items():
            if item in ("", None):
                continue
            words = _spell(item)
            if isinstance(item, Mapping):
                words = f"({words})"
            spelled.append(f"{name} {words}")
        return " ".join(spelled) or "none"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return str(value)


def stage_positions(config: RunConfig, names: Sequence[str]) -> tuple[int, int]:
    """Return the positions of the first stage (--from) and after the last one (--until) among a run's stages.

    Raises UsageError if one is not among them, or if they are in the wrong order.
    """
    for option, name in (("--from", config.from_), ("--until", config.until)):
        require(name is None or name in names, f"{option}: expected one of {', '.join(names)}, got {name}")
    first = 0
    if config.from_:
        first = names.index(config.from_)
    end = len(names)
    if config.until:
        end = names.index(config.until) + 1
    require(first < end, f"--from {config.from_} --until {config.until}: expected stages in the order of the run")
    return first, end


def choose_stages(config: RunConfig, stages: Sequence[StageSpec]) -> tuple[int, int]:
    """Return the `stage_positions` of a run.

    Raises UsageError if a stage before --from has not finished as it is set now.
    """
    first, end = stage_positions(config, [stage.name for stage in stages])
    for stage in stages[:first]:
        record = load_record(config.out, stage.name)
        if record is None:
            raise UsageError(f"--from {config.from_}: {stage.name} has not finished: give --from {stage.name}")
        changed = changed_settings(config, stage, record)
        if changed:
            raise UsageError(
                f"--from {config.from_}: {stage.name} ran with other options ({changed}): give --from {stage.name}, "
                "or the options of before"
            )
    return first, end


def plan_table(config: RunConfig, stages: Sequence[StageSpec]) -> Table:
    """Return the table for --dry_run: each stage's output, settings and state.

    Raises UsageError as `choose_stages` does.
    """
    first, end = choose_stages(config, stages)
    table = Table("stage", "state", title="plan; nothing was run or written", box=None, pad_edge=False)
    is_current = True  # no stage so far is to run again
    for position, stage in enumerate(stages):
        record = load_record(config.out, stage.name)
        state = "to run"
        if record:
            state = _state(config, stage, record, is_current)
        is_current = is_current and state.startswith("done")
        if position < first:
            state = "done, not checked"
        elif position >= end:
            state = "not in this run"
        settings = stage.settings(context_of(config, stage))
        spelled = " ".join(f"{name}={_spell(value)}" for name, value in settings.items())
        if spelled:
            spelled = f"by {spelled}"
        output = stage.path(config).relative_to(config.out)
        table.add_row(Text(stage.name), Text(spell_urls(f"{state}\nwrites {output} {spelled}")))
    return table


def _state(config: RunConfig, stage: StageSpec, record: StageRecord, is_current: bool) -> str:
    """Return what --dry_run says of a stage that has finished; `is_current`: none before it is to run again."""
    changed = changed_settings(config, stage, record)
    outdated = outdated_tasks(_costs(config, stage), stage.own_versions(context_of(config, stage)))
    versions = spell_versions(outdated.versions)
    if changed:
        return f"to run again: {changed}"
    cost = duration(outdated.core_seconds)
    if outdated.steps:
        return f"to run again: {', '.join(outdated.steps)}; it took {cost} of core time"
    if versions and not config.accept_versions:
        return f"to run again: {versions}; it took {cost} of core time, --accept_versions keeps what is there"
    if not is_current:
        state = "to run again where its input changes"
        if record.used_up:
            state += "; what it wrote was removed"
    elif record.used_up:
        state = "done; what no later stage reads was removed"
    else:
        state = "done; its files will be checked"
    if versions:
        state += f" (made with other versions: {versions})"
    return state
