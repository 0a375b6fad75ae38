"""Origins of a key set: whether the corpus files that it was made of are still as they were then."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from gristmill.engine.records import DoneRecord, Ledger
from gristmill.engine.run import StageRun
from gristmill.errors import InputError
from gristmill.io.documents import CorpusFile, source_of
from gristmill.io.files import STATE_DIR
from gristmill.storage.names import name_of

_GROUP = "argument group"  # in the identity of a task that reads slices of a corpus
_INPUT = "input "


def reject_outdated(run: StageRun, key_set: Path, files: Iterable[CorpusFile]) -> None:
    """Raise InputError if a stage made a key set of corpus files of which some have other content now.

    Its rows would be those of other documents. The ledger beside the key set says what the stage read; a set without
    one, such as a user's, is taken as it is, and so is one that was made of signatures, which are compared nowhere.
    """
    found = [ledger for ledger in Ledger.all_in(key_set.parent / STATE_DIR) if name_of(key_set) in ledger.outputs()]
    if not found:
        return
    present: dict[tuple[str, str], list[CorpusFile]] = defaultdict(list)
    for file in files:
        present[file.source, file.path.name].append(file)
    for record in found[0].read().values():
        for name, tag in _corpus_inputs(record):
            same_name = present.get((source_of(record.task), name), [])
            if same_name and not any(_may_be(run, file, tag) for file in same_name):
                raise InputError(
                    f"{key_set} was made from another state of the corpus: {same_name[0].path} has changed since. Run "
                    f"{found[0].file.stem.partition('-')[0]} again, and the stages after it"
                )


def _corpus_inputs(record: DoneRecord) -> Iterator[tuple[str, str]]:
    """The file names and content tags of the corpus files that a task read."""
    for name, tag in record.identity.items():
        if _GROUP in record.identity and name.startswith(_INPUT) and not name.endswith(" files)"):
            yield name.partition("(")[2].removesuffix(")"), tag


def _may_be(run: StageRun, file: CorpusFile, tag: str) -> bool:
    """Whether a file may have the content of a tag: it has that tag, or the size in it, or only the tag is a hash."""
    now = run.tag(file.path)
    if now == tag:
        return True
    size, is_size, _ = tag.partition(" bytes of ")
    return file.size == int(size) if is_size else " bytes of " in now
