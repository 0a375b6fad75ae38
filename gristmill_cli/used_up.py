"""Documents that no later stage of a run reads: --remove_used removes them, and later runs of the same do without.

A stage whose documents are gone, and stages that read them, are skipped as long as nothing has changed: their options,
versions, the files outside of the run that they read, and what the readers wrote. Else the documents are written again.
"""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal

from gristmill.engine.staleness.lineage import matches
from gristmill.errors import UsageError
from gristmill.io.files import REJECTS_SUFFIX, STATE_DIR
from gristmill.paths import name_of
from gristmill.storage.files import file_info, hash_file, remove_files
from gristmill.wording import verb_for
from gristmill_cli.run_check import scan_inputs
from gristmill_cli.run_config import RunConfig
from gristmill_cli.run_records import (
    StageRecord,
    changed_settings,
    has_other_versions,
    load_record,
    load_records,
    stage_ledgers,
    write_record,
)
from gristmill_cli.stages.pipeline import FIRST_STAGE, context_of
from gristmill_cli.stages.spec import StageSpec


def is_used_up(out: Path, stage: StageSpec) -> bool:
    """Return whether the documents of a stage were removed as no later stage reads them."""
    record = load_record(out, stage.name)
    return record is not None and record.used_up


def remove_used(config: RunConfig, stages: Sequence[StageSpec], done: Sequence[StageSpec]) -> None:
    """Remove the documents of stages that only stages read which are done."""
    done_names = {stage.name for stage in done}
    for stage in done:
        readers = [reader.name for reader in stages if _reads(config, reader, stage)]
        record = load_record(config.out, stage.name)
        if readers and done_names.issuperset(readers) and record and not record.used_up:
            record.used_up = True
            write_record(config.out, stage.name, record)  # first: a run that is killed now finds it
            size = _remove_documents(config, stage)
            print(f"{stage.name}: removed {decimal(size)} that no later stage reads", file=sys.stderr, flush=True)


class SkippedStages(NamedTuple):
    """The stages that a run skips, and the position of the first stage that is not as before."""

    names: set[str]
    changed: int


def find_skipped(config: RunConfig, stages: Sequence[StageSpec], first: int, end: int) -> SkippedStages:
    """Return the stages from `first` to `end` that a run skips, as documents are gone and nothing has changed.

    Raises UsageError if the documents of a stage before `first` are needed again.
    """
    records = load_records(config.out, stages)
    gone = {name for name, record in records.items() if record and record.used_up}
    if not gone:
        return SkippedStages(set(), first)
    skippable = [stage for stage in stages if stage.name in gone or _reads_any(config, stage, gone)]
    changed = end
    for position in range(first, end):
        stage = stages[position]
        record = records[stage.name]
        is_same = record is not None and not _has_changed(config, stage, record, stage in skippable)
        if not is_same:
            changed = position
            break
    needed = set[str]()
    for position in reversed(range(end)):
        stage = stages[position]
        if position >= changed or stage.name in needed:
            for name in gone:
                if _reads_any(config, stage, {name}):
                    needed.add(name)
    in_order = [stage.name for stage in stages if stage.name in needed]
    if not needed.isdisjoint(stage.name for stage in stages[:first]):
        raise UsageError(
            f"--from {config.from_}: what {', '.join(in_order)} wrote was removed as it was used up (--remove_used): "
            f"give --from {in_order[0]}, which writes it again"
        )
    if needed:
        again = ", ".join(in_order)
        verb = verb_for(len(needed), "writes", "write")
        print(
            f"note: {stages[changed].name} is not as before, so {again} {verb} again what was removed as used up",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    skipped = set[str]()
    for position, stage in enumerate(stages[:changed]):
        if position >= first and stage in skippable and stage.name not in needed:
            skipped.add(stage.name)
            if stage.name in gone:
                _remove_documents(config, stage)  # what a run left that was killed while it removed them
    return SkippedStages(skipped, changed)


def outside_files(config: RunConfig, stage: StageSpec) -> str:
    """Return a SHA-256 of the names, sizes and versions of the files from outside of the run that a stage reads."""
    if stage.name == FIRST_STAGE:
        paths = [file.path for file in scan_inputs(config, config.corpus).files]
    else:
        paths = stage.outside_files(config)
    digest = hashlib.sha256()
    for name in sorted(map(name_of, paths)):
        digest.update(f"{name}\0{file_info(Path(name))}\n".encode())
    return digest.hexdigest()


def _has_changed(config: RunConfig, stage: StageSpec, record: StageRecord, is_skippable: bool) -> bool:
    """Return whether a stage may have work to do; of one that would be skipped, whatever it reads and writes."""
    if changed_settings(config, stage, record) or has_other_versions(config, stage):
        return True
    if config.retry_failed and record.counts.has_failures:
        return True
    if not is_skippable:
        return False  # it looks itself
    if record.outside_files != outside_files(config, stage):
        return True
    return not record.used_up and not _is_intact(config, stage)


def _is_intact(config: RunConfig, stage: StageSpec) -> bool:
    """Return whether the outputs of a stage are as recorded."""
    for ledger in stage_ledgers(config, stage):
        for name, output in ledger.outputs().items():
            if name.startswith(f"{name_of(ledger.root)}/{STATE_DIR}/"):  # temporary
                continue
            info = file_info(Path(name))
            if info is None or info.size != output.size:
                return False
            if not matches(info, output) and hash_file(Path(name)) != output.sha256:
                return False
    return True


def _reads_any(config: RunConfig, reader: StageSpec, names: set[str]) -> bool:
    """Return whether a stage reads documents of one of the stages."""
    context = context_of(config, reader)
    return reader.reads in names or (reader.reads_documents and context.corpus_stage in names)


def _reads(config: RunConfig, reader: StageSpec, stage: StageSpec) -> bool:
    """Return whether a stage reads what another one wrote, and that may be removed then."""
    return (stage.rewrites or stage.is_intermediate) and _reads_any(config, reader, {stage.name})


def _remove_documents(config: RunConfig, stage: StageSpec) -> int:
    """Remove the documents of a stage; its records, and what it says of documents, stay. Return their bytes."""
    folder = stage.path(config)
    prefix = f"{name_of(folder)}/"
    removed = 0
    paths = list[Path]()
    for ledger in stage_ledgers(config, stage):
        for name, output in ledger.outputs().items():
            if name.startswith(prefix) and not name.endswith(REJECTS_SUFFIX) and file_info(Path(name)):
                paths.append(Path(name))
                removed += output.size
    remove_files(paths, folder)
    return removed
