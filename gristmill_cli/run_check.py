"""Check of the whole configuration of `gristmill run`, and of its output folder, before any stage writes a file."""

import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from gristmill.counts import check_max_failed
from gristmill.errors import GristmillError, InputError, OutputError, UsageError, require
from gristmill.io.corpus import ARC, ASKED_FOR, Corpus, join_corpora, scan_corpus, scan_sources, web_libraries
from gristmill.io.documents import source_of, sources_of
from gristmill.io.facts import CORE
from gristmill.io.files import RUN_FILE, STATE_DIR
from gristmill.steps import check_steps
from gristmill.storage.files import (
    check_writable,
    exists,
    is_file,
    is_folder,
    list_level,
    reject_read_only,
    reject_unknown_scheme,
    resolved,
)
from gristmill.wording import count_of
from gristmill_cli.funnel import FUNNEL_FILE
from gristmill_cli.run_config import RunConfig, corpus_folders, recorded_options
from gristmill_cli.stages.normalize_text import document_steps
from gristmill_cli.stages.pipeline import STAGES
from preprocessing.mixing.keep_list import KeepList
from preprocessing.mixing.sampling import check_seed

_NAMED_FOLDERS = 3  # of the folders that are not read
_OPTION = re.compile(r"(?<![\w.-])--(\w+)\b(?!\.)")


def check_config(config: RunConfig, sources: set[str] | None = None) -> None:
    """Raise the error of the first option that a stage would refuse; writes nothing.

    Lists the corpus, for its `sources` if they are not given, and reads the header of one signature shard of each
    index; reads no document.
    """
    for folder in corpus_folders(config):
        _check_folders(folder, config.out)
    _reject_scratch_in_corpus(config)
    config.run_options.check()
    config.run_options.check_scratch(config)
    check_seed(config.seed)
    check_max_failed(config.max_failed)
    if sources is None:
        with _section("normalize"):
            scanned = scan_inputs(config, config.corpus)
            web_libraries(scanned.files)  # raises if they are missing
        _note_texts(scanned)
        _note_arc(scanned)
        _note_top(config, scanned)
        sources = sources_of(scanned.files)
    for stage in STAGES:
        with _section(stage.section):
            stage.check(config, sources)
    check_steps(document_steps(config), CORE.names)
    if config.keep_list:
        _note_rows(config.keep_list)
    _note_folders(config)
    with _section("alarms"):
        for name, value in vars(config.alarms).items():
            maximum = math.inf
            allowed = "a number from 0"
            if name in ("source_loss", "alike", "language", "score"):
                maximum = 1
                allowed += " to 1"
            require(0 <= value <= maximum, f"--{name} {value}: expected {allowed}; 0 is no limit")


def scan_inputs(config: RunConfig, corpus: Path) -> Corpus:
    """Return the files that a run reads and does not read. Raises UsageError."""
    spec = config.normalize
    if config.sources:
        require(
            not spec.read_also, "--read_also has no effect with [sources], each of which has a format: leave it out"
        )
        require(
            spec.extract == "main",
            '--normalize.extract has no effect with [sources]: give the sources their own, extract = "all"',
        )
        return join_corpora(scan_sources(corpus, config.sources, config.text_column, spec.skip_odd_names))
    return scan_corpus(
        corpus,
        text_column=config.text_column,
        read_also=spec.read_also,
        skip_odd_names=spec.skip_odd_names,
        extract=spec.extract,
    )


def _note_texts(corpus: Corpus) -> None:
    """Say which folders hold nothing but files of formats that are read only if asked for."""
    read = sources_of(corpus.files)
    kinds = {reason: kind for kind, reason in ASKED_FOR.items()}
    counts = Counter[tuple[str, str]]()
    for file in corpus.unread:
        if file.reason in kinds and file.source not in read:
            counts[file.source, kinds[file.reason]] += 1
    for (source, kind), count in counts.items():
        print(
            f"note: {count_of(count, f'.{kind} file')} of {source!r} not read, and it has no others: "
            f"--normalize.read_also {kind} reads them",
            file=sys.stderr,
        )


def _note_arc(corpus: Corpus) -> None:
    """Say that web archives of the format before WARC are not read, and what makes them WARC files."""
    files = [file for file in corpus.unread if file.reason in ARC.values()]
    if files:
        print(
            f"note: {count_of(len(files), 'ARC file')} not read, such as {files[0].name}: expected WARC, the format "
            "since 2009; try `warcio recompress FILE.arc.gz FILE.warc.gz`, which converts one",
            file=sys.stderr,
        )


def _note_top(config: RunConfig, corpus: Corpus) -> None:
    """Say that files directly in the folder of a corpus, next to sources, are a source of their own."""
    files = [file.name for file in corpus.files if "/" not in file.name]
    if files and len(files) < len(corpus.files):
        print(
            f"note: {count_of(len(files), 'file')} directly in {config.corpus}, such as {files[0]}: expected "
            f"CORPUS/<source>/…; read as the source {source_of(files[0])!r}",
            file=sys.stderr,
        )


def _note_folders(config: RunConfig) -> None:
    """Say which folders of the corpus no table [sources.NAME] reads."""
    if not config.sources or not is_folder(config.corpus):
        return
    read = list(map(str, corpus_folders(config)))
    others = list[str]()
    folders, _ = list_level(config.corpus)
    for name in folders:
        folder = str(config.corpus / name)
        is_read = any(path == folder or path.startswith(f"{folder}/") for path in read)
        if not is_read and not name.startswith("."):
            others.append(name)
    if others:
        named = ", ".join(sorted(others)[:_NAMED_FOLDERS])
        print(
            f"note: {count_of(len(others), 'folder')} of {config.corpus} not read, such as {named}: no table "
            "[sources.NAME] reads from there",
            file=sys.stderr,
        )


def _note_rows(keep_list: Path) -> None:
    """Say that documents to drop by row are others once rows shift. Raises UsageError for a list that is none."""
    count = sum(map(len, KeepList.read(keep_list).dropped.values()))
    if count:
        print(
            f"note: {keep_list}: {count_of(count, 'document')} to drop by FILE@ROW: if files or rules change, these "
            "rows are other documents; the lines that `gristmill trace` shows hold for a text in any row",
            file=sys.stderr,
        )


def _check_folders(corpus: Path, out: Path) -> None:
    """Raise UsageError if a folder lies in the other, OutputError if nothing can be written to `out`."""
    reject_read_only([out])
    for path in (corpus, out):
        reject_unknown_scheme(path)
    for inner, outer in ((out, corpus), (corpus, out)):
        if inner.resolve().is_relative_to(outer.resolve()):
            where = f"{inner} lies in {outer}"
            if inner.resolve() == outer.resolve():
                where = "both are one folder"
            raise UsageError(
                f"--corpus {corpus} --out {out}: {where}, and what is written would be read "
                "as input: give an --out next to the corpus"
            )
    check_writable(out)


def check_output(config: RunConfig) -> None:
    """Raise OutputError if `config.out` holds another run, or a file of the user with the name of one of a run's own.

    Another run is one of another corpus, or one where other documents are filtered, as it has other stages.
    """
    for path in (config.out / RUN_FILE, config.out / FUNNEL_FILE):
        if is_file(path) and not _has_run(config.out):  # in this order: another process may begin its run just now
            raise OutputError(
                f"{path} exists, and gristmill run did not write it: it would be overwritten. Give another --out, or "
                "remove it"
            )
    corpus = str(resolved(config.corpus))
    before = recorded_options(config.out)
    if not before:
        return
    if before.get("corpus") != corpus and exists(Path(str(before.get("corpus")))):  # else it was moved
        raise OutputError(
            f"{config.out} holds a run of the corpus {before.get('corpus')}, not of {corpus}: give another --out, or "
            "remove the folder"
        )
    now = msgspec.to_builtins(config, enc_hook=str)
    for stage in STAGES:
        had_stage = stage.is_in_run(before)
        if stage.rewrites and had_stage != stage.is_in_run(now):
            which = "with" if had_stage else "without"
            raise OutputError(
                f"{config.out} holds a run {which} --{stage.added_by}: give another --out, or remove the folder"
            )


def _has_run(out: Path) -> bool:
    return {"corpus", "dedup"} <= recorded_options(out).keys() or is_folder(out / STATE_DIR)


def _reject_scratch_in_corpus(config: RunConfig) -> None:
    """Raise UsageError if another run of the corpus would take the copies that tasks work on for documents."""
    scratch = config.scratch
    corpus = config.corpus
    if scratch and resolved(scratch).is_relative_to(resolved(corpus)):
        raise UsageError(
            f"--scratch {scratch} lies in --corpus {corpus}, and copies there would be read as documents: give a "
            "folder next to the corpus"
        )


@contextmanager
def _section(name: str) -> Iterator[None]:
    """Context: the message of an error names options of a section as they are typed, or begins with the section."""
    try:
        yield
    except (UsageError, InputError) as error:
        message = spell_options(str(error), name)
        if name and f"--{name}." not in message:
            message = f"[{name}] {message}"
        raise type(error)(message) from error


@contextmanager
def options_as_typed(section: str) -> Iterator[None]:
    """Context: an error of a stage names options as the run has them."""
    try:
        yield
    except GristmillError as error:
        arguments = list[Any]()
        for argument in error.args:
            if isinstance(argument, str):
                argument = spell_options(argument, section)
            arguments.append(argument)
        error.args = tuple(arguments)
        raise


def spell_options(message: str, section: str) -> str:
    """Return a stage's message with the run's names of the options that are in a section.

    >>> spell_options("--holdout 2: expected a fraction; see --seed and --workers", "mix")
    '--mix.holdout 2: expected a fraction; see --mix.seed and --workers'
    """
    if not section:
        return message
    names = {field.name for field in fields(get_type_hints(RunConfig)[section])}

    def spell(option: re.Match[str]) -> str:
        if option[1] in names:
            return f"--{section}.{option[1]}"
        return option[0]

    return _OPTION.sub(spell, message)
