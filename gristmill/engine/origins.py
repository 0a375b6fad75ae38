"""Origins of a key set, or of clusters: whether the corpus files that it was made of are those that are given."""

import sys
from collections import defaultdict
from collections.abc import Container, Iterable
from functools import partial
from pathlib import Path

from gristmill.engine.handovers import is_below
from gristmill.engine.records import DoneRecord
from gristmill.engine.run import StageRun
from gristmill.engine.tags import KnownLedger, is_hash
from gristmill.errors import InputError
from gristmill.io.documents import CorpusFile, source_of

_GROUP = "argument group"  # in the identity of a task that reads slices of a corpus
_PARTS = "argument parts"  # of one that reads some documents of such slices
_INPUT = "input "


def reject_outdated(
    run: StageRun, key_set: Path, files: Iterable[CorpusFile], wanted: Iterable[str] = ()
) -> list[KnownLedger]:
    """Raise InputError if a key set was made of corpus files of which some have other content now, or more have joined.

    Its rows would be those of other documents, or documents would be mixed that were not compared. The ledger beside
    the key set says what the stage read: the corpus, or files of other stages, whose ledgers are followed as far as
    they are there: duplicates, clusters, pairs, signatures. Of these, too, none may be outdated. A set without a
    ledger, such as a user's, is taken as it is. Returns the ledgers of all these stages. A note is printed if they have
    read some sources, and not all that are `wanted`.
    """
    covered, present = set[str](), {file.name: file.path for file in files}
    ledgers = run.check_made([key_set], partial(_compare, run, key_set, present, covered))
    missing = sorted(set(wanted) - covered)
    if covered and missing and not run.options.quiet:
        print(
            f"note: {key_set} was made without the documents of {', '.join(missing)}, and drops none of them: if that "
            f"is not meant, run the stages that made it on {'this source' if len(missing) == 1 else 'these sources'}, "
            "too",
            file=sys.stderr,
        )
    return ledgers


def _compare(run: StageRun, key_set: Path, present: dict[str, Path], covered: set[str], ledger: KnownLedger) -> bool:
    """Compare the corpus that a stage has read, if it did, with the files that are `present`, by name in the corpus.

    The sources that it has read are added to `covered`.
    """
    records = list(ledger.ledger.read().values())
    whole, some = (_corpus_tags(records, argument) for argument in (_GROUP, _PARTS))
    sources = set(map(source_of, whole))
    covered |= sources
    changed, joined = _find_changed(run, whole or some, present), [name for name in present if name not in whole]
    unread = next((present[name] for name in joined if source_of(name) in sources), None)
    if fault := f"{changed} has changed" if changed else f"{unread} has joined it" if unread else "":
        raise InputError(
            f"{key_set} was made from another state of the corpus: {fault} since. Run {ledger.stage} again, and the "
            f"stages after it, or give the corpus that it has read. (If {key_set} is right as it is, copy it to "
            "another folder, and give that.)"
        )
    return bool(whole or some) or _has_listed(ledger, present)


def _has_listed(ledger: KnownLedger, names: Container[str]) -> bool:
    """Whether a stage has listed a corpus with files of these names, of which it may have had to read none."""
    return any(
        is_below(path, folder) and path.removeprefix(f"{folder}/") in names
        for read in ledger.inputs.values()
        for folder in read.folders
        for files in read.files.values()
        for path in files
    )


def _corpus_tags(records: Iterable[DoneRecord], argument: str) -> dict[str, set[str]]:
    """The content tags of the corpus files that tasks with an `argument` read, by name in the corpus."""
    tags: dict[str, set[str]] = defaultdict(set)
    for record in records:
        for name, tag in record.identity.items() if argument in record.identity else ():
            if name.startswith(_INPUT) and not name.endswith(" files)"):
                tags[name.partition("(")[2].removesuffix(")")].add(tag)
    return dict(tags)


def _find_changed(run: StageRun, read: dict[str, set[str]], present: dict[str, Path]) -> Path | None:
    """A corpus file that is not as a stage has `read` it: content tags by name in the corpus.

    A file of which the stage knew the hash, and now no ledger does, such as a copy, is hashed.
    """
    tags = {path: read[name] for name, path in present.items() if name in read and run.tag(path) not in read[name]}
    hashes = run.hash_files([path for path in tags if any(map(is_hash, tags[path])) and not is_hash(run.tag(path))])
    return next((path for path in tags if hashes.get(path, "") not in tags[path]), None)
