"""The list of documents to keep or drop by name: by key, which holds for rows as they are, or by the text itself."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill.counts import Counts
from gristmill.engine.run import StageRun
from gristmill.engine.slices import SliceGroup
from gristmill.engine.task import FileSet, Result, Task
from gristmill.errors import InputError, UsageError, require
from gristmill.io.documents import DocKey, name_in_run
from gristmill.io.facts import FactsFile, paths_of_facts, written_by_file
from gristmill.io.keys import KeyBlocks, KeySet, is_among, write_keys
from gristmill.io.readers import read_documents
from gristmill.io.writers import Rejects
from gristmill.storage.files import is_file, read_file
from gristmill.wording import count_of
from preprocessing.mixing.first_texts import FirstTexts, follow_keys
from preprocessing.steps.text_digest import DIGEST, TEXT_DIGEST, text_digests

KEEP = "keep"
DROP = "drop"
GONE = "gone"  # as DROP, of a text that no document need have
_LINES_NAMED = 10  # of the lines whose text no document has
_BY_TEXT = re.compile(r"(drop|gone)\s+sha256:([0-9a-fA-F]{32}(?:[0-9a-fA-F]{32})?)(?:\s+(.*))?")


class ListedText(NamedTuple):
    """A line that takes down each document with a text: its number, the text's digest, and the user's own note."""

    number: int
    digest: bytes
    note: str
    may_be_gone: bool


@dataclass(frozen=True)
class KeepList:
    """A list of documents: keys to keep, keys to drop, texts to drop, and the lines of the latter as they stand."""

    kept: KeySet
    dropped: KeySet
    texts: tuple[ListedText, ...]
    text_lines: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> "KeepList":
        """Read lines `keep KEY`, `drop KEY`, `drop sha256:DIGEST NOTE` and `gone sha256:DIGEST NOTE`.

        Raises UsageError that names the line.
        """
        require(is_file(path), f"keep_list {path}: expected a file of lines keep KEY and drop KEY, but there is none")
        lines = read_file(path).decode("utf-8", "replace").splitlines()
        rows_of: dict[str, dict[str, set[int]]] = {KEEP: {}, DROP: {}}
        texts = list[ListedText]()
        text_lines = list[str]()
        for number, line in enumerate(lines, 1):
            stripped = line.strip()
            if not stripped or line.startswith("#"):
                continue
            by_text = parse_text_line(stripped, number)
            if by_text:
                texts.append(by_text)
                text_lines.append(stripped)
                continue
            word, key = _parse_key(path, number, line)
            other_word = DROP if word == KEEP else KEEP
            other = rows_of[other_word]
            if key.row in other.get(key.file, ()):
                raise UsageError(f"{path}, line {number}: expected each key once, got {key} to keep and to drop")
            rows_of[word].setdefault(key.file, set()).add(key.row)
        return cls(_as_key_set(rows_of[KEEP]), _as_key_set(rows_of[DROP]), tuple(texts), tuple(text_lines))

    @property
    def digests(self) -> NDArray[np.bytes_]:
        """Return the digests of the texts, ascending."""
        return np.unique(np.array([text.digest for text in self.texts], DIGEST))


def describe_text(digest: bytes, name: str, word: str = DROP) -> str:
    """Return the line that drops each document with a text, given the digest of that and a name of one."""
    return f"{word} sha256:{digest.ljust(DIGEST.itemsize, bytes(1)).hex()} {name}"


def parse_text_line(line: str, number: int = 0) -> ListedText | None:
    """Return what a line takes down by the digest of its text; None if it does not."""
    by_text = _BY_TEXT.fullmatch(line.strip())
    if by_text is None:
        return None
    word, digest, note = by_text.groups(default="")
    return ListedText(number, bytes.fromhex(digest)[: DIGEST.itemsize], note, word == GONE)


def _parse_key(path: Path, number: int, line: str) -> tuple[str, DocKey]:
    word, _, text = line.strip().partition(" ")
    try:
        key = DocKey.parse(text)
    except ValueError:
        word = ""
    if word not in (KEEP, DROP):
        raise UsageError(
            f"{path}, line {number}: expected keep KEY, drop KEY or drop sha256:DIGEST, such as keep "
            f"web/a.jsonl.zst@3, got {line!r}; `gristmill trace OUT ID` shows the line for a document"
        )
    return word, key


def _as_key_set(rows_of: Mapping[str, set[int]]) -> KeySet:
    return {file: np.array(sorted(rows), np.int64) for file, rows in rows_of.items()}


def find_listed_texts(
    run: StageRun, keep_list: Path | None, sources: Sequence[Path | SliceGroup], first: FirstTexts | None = None
) -> FileSet | None:
    """Return key sets of the documents whose text the list drops, None if it drops no text.

    They are looked for in files of facts, or by reading slices of the corpus; and among the texts that the first stage
    of a run wrote. Raises InputError for a text to drop that no document has.
    """
    if not keep_list:
        return None
    listed = KeepList.read(keep_list)
    if not listed.texts:
        return None
    tasks = list[Task]()
    for number, source in enumerate(sources):
        output = run.work / "listed" / f"{number}.parquet"
        if isinstance(source, Path):
            arguments = {"facts": source, "keep_list": keep_list, "output": output}
            tasks.append(Task(f"{number}", find_in_facts, arguments, (output,)))
        else:
            tasks.append(Task.on_slices(source, find_in_slices, {"keep_list": keep_list, "output": output}, (output,)))
    positions, with_keys = _run_searches(run, "listed", tasks)
    if first:
        first_positions, first_keys = _find_in_first(run, keep_list, first)
        positions |= first_positions
        with_keys += first_keys
    _reject_missing(keep_list, listed, listed.digests[np.array(sorted(positions), np.int64)])
    return FileSet(tuple(with_keys))


def _find_in_first(run: StageRun, keep_list: Path, first: FirstTexts) -> tuple[set[int], list[Path]]:
    """Return positions of the texts that the first stage wrote, and a set of the keys of these documents in the end."""
    tasks = list[Task]()
    for number, facts in enumerate(first.plan(run)):
        output = run.work / "listed" / f"first_{number}.parquet"
        arguments = {"facts": facts, "keep_list": keep_list, "output": output}
        tasks.append(Task(f"{number}", find_in_facts, arguments, (output,)))
    positions, first_keys = _run_searches(run, "listed first", tasks)
    if not first_keys:
        return positions, []
    followed = run.work / "listed" / "followed.parquet"
    following = {"keys": FileSet(tuple(first_keys)), "losses": first.losses, "output": followed}
    run.step("follow listed", [Task("follow", follow_keys, following, (followed,))])
    return positions, [followed]


def _run_searches(run: StageRun, step: str, tasks: Sequence[Task]) -> tuple[set[int], list[Path]]:
    """Run tasks that look for texts of a list; return positions of texts that documents have, and the sets of keys."""
    held = run.step(step, tasks).values(list[int])
    positions = set[int]()
    with_keys = list[Path]()
    for task, of_task in zip(tasks, held, strict=True):
        positions.update(of_task)
        if of_task:
            with_keys.append(task.outputs[0])
    return positions, with_keys


def reject_stale_lines(
    run: StageRun, keep_list: Path | None, facts_dir: Path, files: Sequence[FactsFile], first: FirstTexts | None
) -> None:
    """Raise InputError for a line that names a text, or a row, that no document has, given the facts of a corpus."""
    if not keep_list:
        return
    written = [file for file in files if file.slices]
    find_listed_texts(run, keep_list, paths_of_facts(facts_dir, written), first)
    ends = dict[str, int]()
    for file in files:
        for part in file.slices:
            ends[part.file] = max(part.end, ends.get(part.file, 0))
    by_key = KeepList.read(keep_list)
    for keys in (by_key.kept, by_key.dropped):
        for name, rows in keys.items():
            last = int(rows[-1])
            of_documents = name_in_run(name)
            if name not in ends and of_documents in ends:
                raise InputError(
                    f"{keep_list} names {name}@{last}, by the name of a file of yours: expected {of_documents}@ROW, "
                    "with the row that `gristmill duplicates` and `gristmill browse` show, which may be another than "
                    f"in your file; or, to drop it, the line that `gristmill trace OUT {name}@{last}` shows"
                )
            if last >= ends.get(name, 0):
                raise InputError(
                    f"{keep_list} names {name}@{last}, and the run has no such document: rows are those of what is "
                    "mixed, and are others once files or rules change. Take the line out, or put the line in its place "
                    "that `gristmill trace OUT ID` shows, which holds for a text in any row"
                )


def _reject_missing(path: Path, listed: KeepList, held: NDArray[np.bytes_]) -> None:
    """Raise InputError for a text to drop that no document has, given the digests that documents have."""
    digests = np.array([text.digest for text in listed.texts], DIGEST)
    missing = list[ListedText]()
    for text, is_held in zip(listed.texts, np.isin(digests, held).tolist(), strict=True):
        if not is_held and not text.may_be_gone:
            missing.append(text)
    if not missing:
        return
    first = missing[0]
    said = f"{path}, line {first.number}: no document has the text of `{DROP} sha256:{first.digest.hex()} {first.note}`"
    if len(missing) > 1:
        named = ", ".join(f"line {text.number} ({text.note})" for text in missing[:_LINES_NAMED])
        if len(missing) > _LINES_NAMED:
            named += ", …"
        said = f"{path}: no document has the text of {count_of(len(missing), 'line')}: {named}"
    raise InputError(
        f"{said}, so it changed, by a rule or in the corpus, or is gone. `gristmill trace OUT --file {path} "
        "--lines true` writes the list anew: lines of texts that changed become those of the documents that they name, "
        "and `gone` where there is none, which takes it down should it come back"
    )


def find_in_facts(facts: Path, keep_list: Path, output: Path) -> Result:
    """Task: write the keys of the documents in a file of facts whose text the list drops.

    The value is the positions of these texts among the list's digests.
    """
    matches = _Matches(keep_list)
    for name, table in written_by_file(facts, TEXT_DIGEST):
        matches.add(name, table.column("row").to_numpy(), text_digests(table))
    return matches.write(output)


def find_in_slices(group: SliceGroup, keep_list: Path, output: Path) -> Result:
    """Task: do as find_in_facts, by reading the documents of slices."""
    matches = _Matches(keep_list)
    for part in group:
        for document in read_documents(part, Counts({}, []), Rejects(output)):
            digest = hashlib.sha256(document.text.encode()).digest()[: DIGEST.itemsize]
            matches.add(part.name, np.array([document.key.row]), np.array([digest], DIGEST))
    return matches.write(output)


class _Matches:
    """Documents whose text a list drops."""

    def __init__(self, keep_list: Path) -> None:
        self._digests = KeepList.read(keep_list).digests
        self._positions = set[int]()
        self._rows = KeyBlocks()

    def add(self, name: str, rows: NDArray[np.int64], digests: NDArray[np.bytes_]) -> None:
        """Note the documents, of the documents (n) of a corpus file, whose digest is in the list."""
        is_listed = is_among(digests, self._digests)
        if is_listed.any():
            self._rows.add(name, rows[is_listed])
            self._positions.update(np.searchsorted(self._digests, digests[is_listed]).tolist())

    def write(self, output: Path) -> Result:
        """Write the keys."""
        write_keys(output, self._rows.join())
        return Result(Counts({}, []), sorted(self._positions))
