"""Origins of a key set: whether the corpus files that it was made of are still as they were then."""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from gristmill.engine.records import DoneRecord, Ledger
from gristmill.engine.run import StageRun
from gristmill.errors import InputError
from gristmill.io.documents import CorpusFile, source_of
from gristmill.io.files import STATE_DIR
from gristmill.storage.files import list_names
from gristmill.storage.names import name_of
from gristmill.urls import folders_above

_GROUP = "argument group"  # in the identity of a task that reads slices of a corpus
_INPUT = "input "


def reject_outdated(run: StageRun, key_set: Path, files: Iterable[CorpusFile]) -> None:
    """Raise InputError if a key set was made of corpus files of which some have other content now.

    Its rows would be those of other documents. The ledger beside the key set says what the stage read: the corpus, or
    files of other stages, whose ledgers are followed as far as they are there: duplicates, clusters, pairs, signatures.
    A set without a ledger, such as a user's, is taken as it is.
    """
    todo = [ledger for ledger, _ in _writers(name_of(key_set.with_suffix("")), key_set.suffix)]
    seen = set[Path]()
    while todo:
        ledger = todo.pop()
        if ledger.file in seen:
            continue
        seen.add(ledger.file)
        records = list(ledger.read().values())
        corpus = [(source_of(record.task), *found) for record in records for found in _corpus_inputs(record)]
        if changed := _find_changed(run, corpus, files):
            raise InputError(
                f"{key_set} was made from another state of the corpus: {changed} has changed since. Run "
                f"{_stage(ledger)} again, and the stages after it"
            )
        for source, is_read in _sources(ledger):
            if not is_read:
                raise InputError(
                    f"{key_set} is not up to date: {_stage(ledger)} has not read what {_stage(source)} wrote last. Run "
                    f"{_stage(ledger)} again, and the stages after it"
                )
            todo.append(source)


def _find_changed(run: StageRun, read: Iterable[tuple[str, str, str]], files: Iterable[CorpusFile]) -> Path | None:
    """A corpus file that is not as a stage has `read` it: source, file name and content tag of each.

    Files of one source and name are compared together: one must have a tag that was not read, and one tag be of none.
    """
    tags: dict[tuple[str, str], set[str]] = defaultdict(set)
    for source, name, tag in read:
        tags[source, name].add(tag)
    present: dict[tuple[str, str], list[CorpusFile]] = defaultdict(list)
    for file in files if tags else ():
        present[file.source, file.path.name].append(file)
    for key in tags.keys() & present.keys():
        new = [file for file in present[key] if not any(_may_be(run, file, tag) for tag in tags[key])]
        if new and not all(any(_may_be(run, file, tag) for file in present[key]) for tag in tags[key]):
            return new[0].path
    return None


def _sources(ledger: Ledger) -> Iterator[tuple[Ledger, bool]]:
    """The ledgers of the stages whose files a stage has read, each with whether it read what is there now."""
    tags = ledger.input_tags()
    for place, name in ledger.sources():
        path = next((path for path in map(name_of, (place, name)) if _writers(path)), name_of(place))
        found = _writers(path)
        outputs = {name: tag for written in found for name, tag in written.tags.items()}
        if any(name.startswith(f"{path}/") for name in outputs):
            as_set = "\n".join(f"{path.name} {outputs[str(path)]}" for path in sorted(map(Path, outputs)))
            is_read = sha256(as_set.encode()).hexdigest() in tags or _has_others(path, outputs)
            yield from ((written.ledger, is_read) for written in found)
        else:  # of files with several suffixes, one was read
            read = [written.ledger for written in found if not tags.isdisjoint(written.tags.values())]
            yield from ((source, True) for source in read)
            yield from ((written.ledger, False) for written in (found if not read else []))


class _Written(NamedTuple):
    """A ledger, and the content tags of some files that it names, by absolute path."""

    ledger: Ledger
    tags: dict[str, str]


def _writers(path: str, suffix: str = "") -> list[_Written]:
    """The ledgers that name what is read from `path`: a file of this name and a suffix, or key files in a folder."""
    for folder in (Path(path), *folders_above(Path(path))):
        ledgers = [
            _Written(ledger, {
                name: output.sha256 for name, output in ledger.outputs().items() if _is_read(name, path, suffix)
            })
            for ledger in Ledger.all_in(folder / STATE_DIR)
        ]  # fmt: skip
        if found := [written for written in ledgers if written.tags]:
            return found
    return []


def _is_read(name: str, path: str, suffix: str) -> bool:
    """Whether a stage that has read `path`, a folder or a file without its suffix, has read a file."""
    if not name.startswith(path):
        return False
    rest = name[len(path) :]
    return rest[:1] == "/" and _is_key_file(rest) if "/" in rest else "." not in rest[1:] and rest.endswith(suffix)


def _is_key_file(name: str) -> bool:
    name = name.rpartition("/")[2]
    return name.endswith(".signatures.arrow") or (name.startswith("duplicate_pairs") and name.endswith(".txt"))


def _has_others(folder: str, outputs: Container[str]) -> bool:
    """Whether a folder holds key files of users, which are read with the `outputs` of stages."""
    return any(_is_key_file(name) and f"{folder}/{name}" not in outputs for name in list_names(Path(folder)))


def _stage(ledger: Ledger) -> str:
    return ledger.file.stem.partition("-")[0]


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
