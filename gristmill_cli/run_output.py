"""The output folder of a run before its first stage: new, or that of an earlier run of the same corpus."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gristmill.engine.ledger import Ledger
from gristmill.engine.outputs import reject_unknown_files
from gristmill.errors import OutputError
from gristmill.io.files import RUN_FILE, STATE_DIR, is_unfinished
from gristmill.io.token_manifest import SHARD_SUFFIXES
from gristmill.storage.files import exists, is_file, is_folder, list_names, resolved
from gristmill.storage.names import name_of
from gristmill.storage.walking import walk
from gristmill.urls import is_remote
from gristmill_cli.funnel import FUNNEL_FILE
from gristmill_cli.run_config import RunConfig
from gristmill_cli.run_records import load_json
from gristmill_cli.run_stages import PipelineStage


def check_output(config: RunConfig, stages: Sequence[PipelineStage]) -> None:
    """Raise OutputError if a run would replace what it did not write, or mix two runs; writes nothing.

    That is a run of another corpus, or one where other documents are filtered, with or without a function of the
    user, or files of the user that have the names of this command's own, or of what `stages` write.
    """
    _reject_foreign_files(config.out)
    _reject_other_run(config)
    for stage in stages:
        _reject_foreign_outputs(stage)


def check_folders(config: RunConfig, stages: Sequence[PipelineStage]) -> None:
    """Raise OutputError if a folder of `stages` has files which they did not write, and later ones would read.

    In a bucket one listing finds folders without anything of a run; files in the others are found when they are listed.
    """
    is_listed = is_remote(config.out)
    there = set(list_names(config.out)) if is_listed else set[str]()
    for stage in stages:
        for folder in stage.folders:
            if not is_listed or (folder.name in there and not is_folder(folder / STATE_DIR)):
                _reject_unknown_files(stage, folder)


def _reject_unknown_files(stage: PipelineStage, folder: Path) -> None:
    files = [path for path in walk(folder) if path.name.lower().endswith(stage.suffixes)]
    if not files or is_unfinished(folder, stage.name):  # then it does not know all that it wrote
        return
    holders = {above for file in files for above in file.parents if above.is_relative_to(folder)}
    ledgers = [found for holder in holders for found in Ledger.all_in(holder / STATE_DIR)]
    known = {name for found in ledgers for name in found.outputs()}
    ours = [file for file in files if name_of(file) in known]
    if len(ours) < len(files):
        reject_unknown_files(folder, ours, stage.suffixes, Ledger(stage.output / STATE_DIR, stage.name))


def _reject_foreign_files(out: Path) -> None:
    """Raise OutputError if `out` has files with the names of this command's own, and no run has worked there."""
    for path in (out / RUN_FILE, out / FUNNEL_FILE):
        if is_file(path) and not _has_run(out):  # in this order: another process may begin its run just now
            raise OutputError(
                f"{path} exists, and gristmill run did not write it: it would be overwritten. Give another --out, or "
                "remove it"
            )


def _has_run(out: Path) -> bool:
    recorded = load_json(out / RUN_FILE, dict[str, Any]) or {}
    return {"corpus", "dedup"} <= recorded.keys() or is_folder(out / STATE_DIR)


def _reject_other_run(config: RunConfig) -> None:
    corpus, before = str(resolved(config.corpus)), load_json(config.out / RUN_FILE, dict[str, Any])
    if not before:
        return
    if before.get("corpus") != corpus and exists(Path(str(before.get("corpus")))):  # else it was moved
        raise OutputError(
            f"{config.out} holds a run of the corpus {before.get('corpus')}, not of {corpus}: give another --out, or "
            "remove the folder"
        )
    for option in ("recipe", "apply.function", "lines.unit", "decontaminate.against"):
        had, has = _has_stage(before, option), _has_stage(msgspec.to_builtins(config, enc_hook=str), option)
        if had != has:
            raise OutputError(
                f"{config.out} holds a run {'with' if had else 'without'} --{option}: give another --out, or remove "
                "the folder"
            )


def _has_stage(options: dict[str, Any], option: str) -> bool:
    """Whether options of a run ask for the stage that an option adds."""
    value: Any = options
    for name in option.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return bool(value) and value != "none"


def _reject_foreign_outputs(stage: PipelineStage) -> None:
    """Raise OutputError if there is a file that the stage would write, or would not take, which no ledger names."""
    folder = stage.output.parent if stage.output.suffix else stage.output
    files = list(_files_of(stage))
    ledgers = Ledger.all_in(folder / STATE_DIR) if files else []
    if any(ledger.is_damaged for ledger in ledgers):
        return  # the stage says what to do
    known = {name for ledger in ledgers for name in ledger.outputs()}
    for path in (file for file in files if name_of(file) not in known):
        raise OutputError(
            f"{path} exists, and {stage.name} did not write it: it would be overwritten. Give another --out, or "
            "remove it"
        )


def _files_of(stage: PipelineStage) -> Iterator[Path]:
    """The files that a stage writes by name, and token shards on a disk, as far as they are there."""
    if stage.output.suffix:
        yield from filter(is_file, [stage.output, *stage.beside])
    elif stage.is_result and not is_remote(stage.output):  # that would be listed
        yield from (path for path in walk(stage.output) if path.name.endswith(SHARD_SUFFIXES))
