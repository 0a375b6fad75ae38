"""Origins of a key set: whether the corpus files that it was made of are still as they were then."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from gristmill.engine.records import DoneRecord, Ledger
from gristmill.engine.run import StageRun
from gristmill.engine.tags import is_hash
from gristmill.errors import InputError
from gristmill.io.documents import CorpusFile
from gristmill.io.files import STATE_DIR
from gristmill.storage.files import list_names
from gristmill.storage.names import name_of
from gristmill.urls import folders_above

_GROUP = "argument group"  # in the identity of a task that reads slices of a corpus
_INPUT = "input "


def reject_outdated(run: StageRun, key_sets: Iterable[Path], files: Iterable[CorpusFile]) -> None:
    """Raise InputError if a key set was made of corpus files of which some have other content now.

    Its rows would be those of other documents. The ledger beside the key set says what the stage read: the corpus, or
    files of other stages, whose ledgers are followed as far as they are there: duplicates, clusters, pairs, signatures.
    A set without a ledger, such as a user's, is taken as it is.
    """
    origins, present = _Origins(), {file.name: file.path for file in files}
    for key_set in key_sets:
        todo = [written.ledger for written in origins.writers(name_of(key_set.with_suffix("")), key_set.suffix)]
        seen = set[Path]()
        while todo:
            ledger = todo.pop()
            if ledger.file in seen:
                continue
            seen.add(ledger.file)
            if changed := _find_changed(run, ledger.corpus_tags, present):
                raise InputError(
                    f"{key_set} was made from another state of the corpus: {changed} has changed since. Run "
                    f"{ledger.stage} again, and the stages after it"
                )
            for source, is_read in origins.sources(ledger):
                if not is_read:
                    raise InputError(
                        f"{key_set} is not up to date: {ledger.stage} has not read what {source.stage} wrote last. Run "
                        f"{ledger.stage} again, and the stages after it"
                    )
                todo.append(source)


def _find_changed(run: StageRun, read: dict[str, set[str]], present: dict[str, Path]) -> Path | None:
    """A corpus file that is not as a stage has `read` it: content tags by name in the corpus.

    A file of which the stage knew the hash, and now no ledger does, such as a copy, is hashed.
    """
    tags = {path: read[name] for name, path in present.items() if name in read and run.tag(path) not in read[name]}
    hashes = run.hash_files([path for path in tags if any(map(is_hash, tags[path])) and not is_hash(run.tag(path))])
    return next((path for path in tags if hashes.get(path, "") not in tags[path]), None)


class _KnownLedger:
    """A ledger, of which each part is read once."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self.file, self.stage = ledger, ledger.file, ledger.stage

    @cached_property
    def corpus_tags(self) -> dict[str, set[str]]:
        """The content tags of the corpus files that the stage read, by name in the corpus."""
        tags: dict[str, set[str]] = defaultdict(set)
        for record in self._ledger.read().values():
            for name, tag in _corpus_inputs(record):
                tags[name].add(tag)
        return dict(tags)

    @cached_property
    def sources(self) -> list[tuple[Path, Path]]:
        return self._ledger.sources()

    @cached_property
    def input_tags(self) -> set[str]:
        return self._ledger.input_tags()

    @cached_property
    def _outputs(self) -> tuple[list[str], dict[str, str]]:
        """The absolute paths of all files that the stage wrote, sorted, and their content tags."""
        tags = {name: output.sha256 for name, output in self._ledger.outputs().items()}
        return sorted(tags), tags

    def written(self, path: str, suffix: str) -> dict[str, str]:
        """The content tags of what is read from `path` (see _is_read), by absolute path."""
        names, tags = self._outputs
        end = bisect_left(names, path + "\U0010ffff")
        return {name: tags[name] for name in names[bisect_left(names, path) : end] if _is_read(name, path, suffix)}


class _Written(NamedTuple):
    """A ledger, and the content tags of some files that it names, by absolute path."""

    ledger: _KnownLedger
    tags: dict[str, str]


class _Origins:
    """The ledgers of the stages that a key set was made by, of which each is read once."""

    def __init__(self) -> None:
        self._ledgers_in = cache(lambda folder: list(map(_KnownLedger, Ledger.all_in(folder / STATE_DIR))))

    def sources(self, ledger: _KnownLedger) -> Iterator[tuple[_KnownLedger, bool]]:
        """The ledgers of the stages whose files a stage has read, each with whether it read what is there now."""
        for place, name in ledger.sources:
            path = next((path for path in map(name_of, (place, name)) if self.writers(path)), name_of(place))
            found = self.writers(path)
            outputs = {name: tag for written in found for name, tag in written.tags.items()}
            if any(name.startswith(f"{path}/") for name in outputs):
                as_set = "\n".join(f"{path.name} {outputs[str(path)]}" for path in sorted(map(Path, outputs)))
                known = sha256(as_set.encode()).hexdigest() in ledger.input_tags
                yield from ((written.ledger, known or _has_others(path, outputs)) for written in found)
            else:  # of files with several suffixes, one was read
                read = [written.ledger for written in found if not ledger.input_tags.isdisjoint(written.tags.values())]
                yield from ((source, True) for source in read)
                yield from ((written.ledger, False) for written in (found if not read else []))

    def writers(self, path: str, suffix: str = "") -> list[_Written]:
        """The ledgers that name what is read from `path`: a file of this name and suffix, or key files in a folder."""
        for folder in (Path(path), *folders_above(Path(path))):
            found = [_Written(ledger, ledger.written(path, suffix)) for ledger in self._ledgers_in(folder)]
            if found := [written for written in found if written.tags]:
                return found
        return []


def _is_read(name: str, path: str, suffix: str) -> bool:
    """Whether a stage that has read `path`, a folder or a file without its suffix, has read a file."""
    rest = name[len(path) :]
    return rest[:1] == "/" and _is_key_file(rest) if "/" in rest else "." not in rest[1:] and rest.endswith(suffix)


def _is_key_file(name: str) -> bool:
    name = name.rpartition("/")[2]
    return name.endswith(".signatures.arrow") or (name.startswith("duplicate_pairs") and name.endswith(".txt"))


def _has_others(folder: str, outputs: Container[str]) -> bool:
    """Whether a folder holds key files of users, which are read with the `outputs` of stages."""
    return any(_is_key_file(name) and f"{folder}/{name}" not in outputs for name in list_names(Path(folder)))


def _corpus_inputs(record: DoneRecord) -> Iterator[tuple[str, str]]:
    """The names in the corpus and the content tags of the corpus files that a task read."""
    for name, tag in record.identity.items():
        if _GROUP in record.identity and name.startswith(_INPUT) and not name.endswith(" files)"):
            yield name.partition("(")[2].removesuffix(")"), tag
