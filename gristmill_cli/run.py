"""Command: the whole data pipeline, from a corpus to token shards, resumable at any point."""

import shlex
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from gristmill.command import given_words, run_with_exit_code
from gristmill.config import load_config
from gristmill.console import wide_console
from gristmill.counts import HELD_OUT, Counts
from gristmill.engine.execution.context import open_execution_context
from gristmill.engine.execution.without_pandas import leave_pandas_out
from gristmill.engine.options import OWN_OPTIONS, RunOptions
from gristmill.errors import UsageError
from gristmill.io.files import RUN_FILE, STATE_DIR
from gristmill.io.token_shards import Manifest
from gristmill.paths import spell_urls
from gristmill.processes import kept_objects
from gristmill.storage.files import exists, remove_files, remove_partial_files, resolved, write_file
from gristmill.storage.stores import store_of
from gristmill.wording import count_of
from gristmill_cli.alarms import check_strict, find_alarms
from gristmill_cli.documents.last_list import note_list, warn_of_missing_lines
from gristmill_cli.first_records import check_first_records
from gristmill_cli.funnel import (
    FUNNEL_FILE,
    TRAIN,
    Funnel,
    at_folder,
    build_funnel,
    check_counts_between,
    load_manifests,
)
from gristmill_cli.run_check import check_config, check_output, options_as_typed
from gristmill_cli.run_config import RunConfig
from gristmill_cli.run_records import (
    changed_settings,
    choose_stages,
    load_record,
    load_records,
    note_versions,
    plan_table,
    recorded_sources,
    remove_record,
    save_record,
)
from gristmill_cli.stages.mix import DecideMix
from gristmill_cli.stages.pipeline import FIRST_STAGE, context_of, find_stage, plan_stages
from gristmill_cli.stages.spec import StageSpec
from gristmill_cli.used_up import find_skipped, outside_files, remove_used

_NOT_RECORDED = ("from_", "until", "dry_run", "strict", "shard", "scratch", "scratch_size", "executor", "address")


def print_warning(line: str) -> None:
    """Print a warning at once, as a stage ends."""
    print(f"warning: {line}", file=sys.stderr, flush=True)


def run(
    config: RunConfig, warn: Callable[[str], None] = print_warning, looks_at_records: bool = False
) -> Funnel | None:
    """Run the stages from `config.from_` to `config.until`, and check the counts between stages as they finish.

    Every task that is done is skipped. Another process that works on the same output is waited for. Returns the funnel,
    and writes it as funnel.json, if the last stage has run; else None. The whole configuration is checked first.
    `warn` takes what looks wrong, a sentence each, after the stage in which it does. With `looks_at_records` the first
    records of each source are read first, to say at once that they have no text.
    Raises ConservationError if documents were lost between two stages, InputError if none is left, OutputError if
    `config.out` holds a run of another corpus, AlarmError with `config.strict`, and any GristmillError of a stage.
    """
    check_run(config, looks_at_records)  # before the lock writes a file
    import preprocessing.tokenizer.encoder  # noqa: F401  workers start with the modules of stages that are imported here

    lock = config.out / STATE_DIR / "run.lock"
    with kept_objects(), open_execution_context(config.run_options, lock, work=_work_of(config)) as context:
        return _run_stages(config, replace(config.run_options, of_run=context), warn)


def check_run(config: RunConfig, looks_at_records: bool = False) -> None:
    """Raise the error for which a run with this configuration would not begin its first stage; writes nothing."""
    is_read = config.from_ in (None, FIRST_STAGE) or exists(config.corpus)  # else it may have been removed
    if is_read:
        check_config(config)
    else:
        check_config(config, recorded_sources(config.out))
    if looks_at_records and is_read:
        check_first_records(config)
    choose_stages(config, plan_stages(config))
    check_output(config)


def _run_stages(config: RunConfig, options: RunOptions, warn: Callable[[str], None]) -> Funnel | None:
    out = config.out
    stages = plan_stages(config)
    first, end = choose_stages(config, stages)
    check_output(config)  # another process may have written there since
    warn_of_missing_lines(config)
    _record_config(config)
    note_versions(config, stages[first:end])
    if config.explain or config.explain_tasks:
        by_option = _explain(config, stages[first:end])
        options = replace(options, explain=not by_option)
    earlier_records = load_records(out, stages)
    counts = dict[str, Counts]()
    for stage in stages[:first]:
        record = earlier_records[stage.name]
        if record:
            counts[stage.name] = record.counts
    remove_partial_files([out / FUNNEL_FILE])
    skipped = find_skipped(config, stages, first, end)
    for stage in stages[skipped.changed :]:  # a later stage is done only after this run of the stages before it
        remove_record(out, stage)
    remove_files([out / FUNNEL_FILE])
    alarms = list[str]()
    for name, earlier_counts in counts.items():
        alarms += find_alarms(config, name, earlier_counts)
    for position, stage in enumerate(stages[:end]):
        record = earlier_records[stage.name]
        if stage.name in skipped.names and record:
            print(f"{stage.name}: done already; what it wrote or read was used up, and removed", file=sys.stderr)
            counts[stage.name] = record.counts
            alarms += record.alarms
        if position < first or stage.name in skipped.names:
            continue
        context = context_of(config, stage, options)
        began = time.monotonic()
        with options_as_typed(stage.section):
            stage_counts = stage.call(context)
        seconds = time.monotonic() - began
        counts[stage.name] = stage_counts
        earlier = stage.stage_read(context)
        if earlier:
            reasons = stage.reads_reasons or (find_stage(earlier).keeps,)
            check_counts_between(earlier, counts[earlier], reasons, stage.name, stage_counts, stage.reads_bytes)
        stage.reject_empty(config, stage_counts)
        stage_alarms = list(find_alarms(config, stage.name, stage_counts))
        outside = ""
        if config.remove_used:
            outside = outside_files(config, stage)
        save_record(config, stage, stage_counts, round(seconds, 3), earlier_records[stage.name], stage_alarms, outside)
        if stage.name == DecideMix.name:
            note_list(config)
        alarms += stage_alarms
        shown = at_folder(stage_alarms, out)
        check_strict(config, stage.name, shown)
        for line in shown:
            warn(line)
        if config.remove_used:
            remove_used(config, stages, stages[: position + 1])
    if end < len(stages):
        return None
    manifests = load_manifests(out)
    in_funnel = [counts[stage.name] for stage in stages if stage.is_in_funnel]
    funnel = build_funnel(in_funnel, manifests, alarms)
    funnel.save(out)
    funnel.warnings = at_folder(alarms, out)
    return funnel


def _explain(config: RunConfig, stages: Sequence[StageSpec]) -> bool:
    """Print which options changed since the last run, and which stages follow; return whether one did."""
    finished = 0
    changed = dict[str, str]()
    for stage in stages:
        record = load_record(config.out, stage.name)
        if record:
            finished += 1
            settings = changed_settings(config, stage, record)
            if settings:
                changed[stage.name] = settings
    names = [stage.name for stage in stages]
    if not changed:
        said = "no option changed since the last run"
        if not finished:
            said = "no stage finished yet"
        elif finished < len(stages):
            said = "no option changed of the stages that have finished"
        print(said, file=sys.stderr, flush=True)
        return False
    first = names.index(next(iter(changed)))
    changes = [f"{name} {settings}" for name, settings in changed.items()]
    print(f"changed: {'; '.join(changes)}", file=sys.stderr)
    following = ", ".join(names[first + 1 :]) or "no other stage"
    again = names[first]
    if changed[again].startswith("tokenizer "):  # by its path; tasks compare its content
        again += ", unless its content is the same"
    print(f"runs again: {again}; and where its input changes: {following}", file=sys.stderr, flush=True)
    return True


def main(argv: Sequence[str] | None = None) -> None:
    """`gristmill run [pipeline.toml] [--section.key value …]`: runs the pipeline, prints the funnel and paths."""
    arguments = given_words(argv)
    if arguments and not arguments[0].startswith("-"):
        arguments.insert(0, "--config")
    sys.exit(run_with_exit_code(lambda: _run_command(arguments)))


def _run_command(arguments: list[str]) -> None:
    if len(arguments) > 1 and arguments[0] == "--config" and Path(arguments[1]).is_dir():
        folder = arguments[1]
        hint = f"try gristmill run --corpus {folder} --out OUT"
        raise UsageError(f"expected a pipeline.toml, got the folder {folder}; {hint}")
    config = load_config(RunConfig, arguments, prog="gristmill run")
    console = wide_console()
    if config.dry_run:
        check_run(config, looks_at_records=True)
        stages = plan_stages(config)
        if config.explain or config.explain_tasks:
            first, end = choose_stages(config, stages)
            _explain(config, stages[first:end])
        console.print(plan_table(config, stages))
        return
    funnel = run_and_print(config)
    if funnel is None:
        names = [stage.name for stage in plan_stages(config)]
        following = names[names.index(str(config.until)) + 1]
        console.print(f"finished {config.until}; next: {following}. To continue, run the same command without --until")
        return
    held_out = Manifest.load(config.out / "tokens" / HELD_OUT).documents
    console.print(_next_steps(config.out, held_out, config.mix.holdout), highlight=False, markup=False)


def run_and_print(config: RunConfig) -> Funnel | None:
    """Run the stages as `run`, and print the funnel; of warnings that were printed as their stages ended the number."""
    said = list[str]()

    def warn(line: str) -> None:
        print_warning(line)
        said.append(line)

    leave_pandas_out()
    funnel = run(config, warn, looks_at_records=True)
    if funnel is not None:
        console = wide_console()
        if said:
            console.print(f"{count_of(len(said), 'warning')} above, while the stages ran", style="bold")
        funnel.warnings = [line for line in funnel.warnings if line not in said]
        console.print(funnel)
    return funnel


def _next_steps(out: Path, held_out_documents: int, share: float) -> str:
    """Say where the results are, and how to train on them: from a disk, not a bucket, and not without a holdout."""
    tokens = out / "tokens"
    local = out
    copy = ""
    if store_of(out).needs_copies:
        local = Path()
        copy = f"copy {tokens} to a disk, and there "
    train = shlex.quote(str(local / "tokens" / TRAIN))
    held_out = shlex.quote(str(local / "tokens" / HELD_OUT))
    model = shlex.quote(str(local / "model"))
    lines = f"\nfunnel: {out / FUNNEL_FILE}\ntokens: {tokens / TRAIN}, {tokens / HELD_OUT}\n"
    if not held_out_documents:
        return spell_urls(
            f"{lines}The holdout is empty, and training needs one: run again with more documents, or with a larger "
            f"--mix.holdout than {share:g}, such as 0.1"
        )
    return spell_urls(
        f"{lines}to train: {copy}torchrun --nproc_per_node=2 -m gristmill_cli.train --data.train {train} "
        f"--data.holdout {held_out} --out_dir {model}"
    )


def _options_of(config: RunConfig) -> dict[str, Any]:
    options: dict[str, Any] = msgspec.to_builtins(config, enc_hook=str)
    return options


def _without(options: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the options without some of them."""
    return {name: value for name, value in options.items() if name not in names}


def _work_of(config: RunConfig) -> str:
    """Return all options of a run that change bytes, as JSON."""
    options = _options_of(config) | {"corpus": str(resolved(config.corpus)), "out": str(resolved(config.out))}
    return msgspec.json.encode(_without(options, OWN_OPTIONS)).decode()


def _record_config(config: RunConfig) -> None:
    path = config.out / RUN_FILE
    options = _options_of(config) | {"corpus": str(resolved(config.corpus))}
    record = _without(options, _NOT_RECORDED)
    remove_partial_files([path])  # of a run that was killed just here
    write_file(path, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


if __name__ == "__main__":
    main()
