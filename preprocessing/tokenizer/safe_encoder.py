"""SafeEncoder: ids of documents, without those on which the tokenizer fails, or on which it ended a worker process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from gristmill.counts import FAILED, WORKER_DIED, Counts
from gristmill.engine.execution.worker_deaths import note_place, rows_of_deaths, times_suspected
from gristmill.engine.slices import SliceGroup, note_reading
from gristmill.errors import GristmillError, UsageError
from gristmill.io.documents import Document, Slice
from gristmill.io.readers import read_documents
from gristmill.io.writers import Rejects
from gristmill.paths import spell_urls
from gristmill.steps import MANY_FAILING
from preprocessing.tokenizer.loading import EnginesDifferError

if TYPE_CHECKING:
    from preprocessing.tokenizer.loading import AnyEncoder

Encoded = TypeVar("Encoded")
TOKENIZER = "tokenizer"  # in the reason of a document on which it failed
_PANIC = "PanicException"  # of a library in Rust: no Exception


class ReadDocument(NamedTuple):
    """A document, and the slice that it was read from."""

    part: Slice
    document: Document

    @property
    def row(self) -> int:
        """Return the row of the document in its file."""
        return self.document.key.row

    @property
    def place(self) -> str:
        """Return where the document is, for messages."""
        return f"{self.part.path} line {self.row + 1}"


class FailedDocument(msgspec.Struct):
    """A document that has no tokens: its file and row, the reason, the error, and its own id."""

    file: str
    row: int
    rule: str
    detail: str
    id: str | None = None

    @property
    def removed_row(self) -> tuple[str, int, str, float | None, str, str | None]:
        """Return it as a row of a table of removed documents."""
        return self.file, self.row, self.rule, None, self.detail, self.id


def read_with_slices(
    group: SliceGroup, counts: Counts, rejects: Rejects, by_original_source: bool = False
) -> Iterator[ReadDocument]:
    """Yield the documents of slices as read_documents does, each with its slice; note which slice is read."""
    for part in group:
        if not part.damage:
            note_reading(part)
        documents = read_documents(part, counts, rejects, by_original_source)
        yield from map(partial(ReadDocument, part), documents)  # holds no document while the next is read


class TokenizerFailed(UsageError):
    """The tokenizer raised an error; `detail` says which."""

    def __init__(self, place: str, detail: str) -> None:
        super().__init__(place, detail)
        self.place = place
        self.detail = detail

    def __str__(self) -> str:
        return spell_urls(f"the tokenizer failed at {self.place}: {self.detail}. Give another tokenizer")


class EncodedDocuments(NamedTuple):
    """The ids of documents (n), those that begin and end each included, and offsets (n + 1) of each; none of a failed.

    `failed` says, by number, why documents have no ids.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    failed: dict[int, str]


class SafeEncoder:
    """Encodes documents, each between the ids `begin` and `end`, -1: none.

    `failed` are the documents that were left out so far; in `counts` they are described, and not counted.
    """

    def __init__(self, encoder: "AnyEncoder", begin: int, end: int, counts: Counts) -> None:
        self.failed: list[FailedDocument] = []
        self._encoder = encoder
        self._begin = begin
        self._end = end
        self._first = np.array([begin] if begin >= 0 else [], np.int32)
        self._counts = counts

    def encode(self, documents: Sequence[ReadDocument]) -> EncodedDocuments:
        """Encode documents together. Raises UsageError if the tokenizer fails on most of them, or on none alone."""
        first = documents[0]
        dead = self._deaths(documents)
        if times_suspected(first.part.label, first.row):
            self._try_alone(documents, dead)
        note_place(first.part.label, first.row)
        left = [number for number in range(len(documents)) if number not in dead]
        errors = dict[int, str]()
        try:
            ids, offsets = self._encode(documents, left)
        except BaseException as error:
            if not _is_of_tokenizer(error):
                raise
            errors = self._find_failing(documents, left, error)
            left = [number for number in left if number not in errors]
            ids, offsets = self._encode(documents, left)
        lengths = np.zeros(len(documents), np.int64)
        lengths[left] = np.diff(offsets)
        reasons = dict[int, str]()
        for number in sorted(dead.keys() | errors.keys()):
            detail = dead.get(number) or errors[number]
            reasons[number] = self._leave_out(documents[number], detail, is_dead=number in dead)
        return EncodedDocuments(ids, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]), reasons)

    def death(self, document: ReadDocument) -> str:
        """Return the reason to leave out a long document if a worker died of it; '' if none did.

        Notes that it is worked on.
        """
        note_place(document.part.label, document.row, is_alone=True)
        dead = self._deaths([document])
        return self._leave_out(document, dead[0], is_dead=True) if dead else ""

    def encode_parts(self, document: ReadDocument) -> Iterator[NDArray[np.int32]]:
        """Yield the ids of one long document in parts. Raises TokenizerFailed, also after some of them."""
        try:
            key = document.document.key
            yield from chain(
                [self._first], self._encoder.encode_parts(document.document.text, self._end, what=f"the text {key}")
            )
        except BaseException as error:
            if not _is_of_tokenizer(error):
                raise
            raise TokenizerFailed(document.place, _describe(error)) from error

    def encode_alone(self, document: ReadDocument, encode: Callable[[], Encoded]) -> Encoded | str:
        """Return what `encode` makes of one document, or the reason to leave it out: it fails, or ended a worker."""
        reason = self.death(document)
        if reason:
            return reason
        try:
            return encode()
        except BaseException as error:
            if not _is_of_tokenizer(error):
                raise
            return self._leave_out(document, _describe(error), is_dead=False)

    def leave_out(self, document: ReadDocument, error: TokenizerFailed) -> str:
        """Leave out a long document on which the tokenizer failed; return the reason."""
        return self._leave_out(document, error.detail, is_dead=False)

    def _leave_out(self, read: ReadDocument, detail: str, is_dead: bool) -> str:
        reason = f"{FAILED}: {WORKER_DIED if is_dead else TOKENIZER}"
        document = read.document
        self.failed.append(FailedDocument(document.key.file, read.row, reason, detail, document.own_id))
        what = WORKER_DIED if is_dead else "the tokenizer failed"
        self._counts.add_failure(f"{what} at {read.place}: {detail}")
        return reason

    def _deaths(self, documents: Sequence[ReadDocument]) -> dict[int, str]:
        """Return how workers died, by the numbers of the documents that they died on."""
        deaths = dict[str, Mapping[int, str]]()  # by slice and row
        dead = dict[int, str]()
        for number, read in enumerate(documents):
            label = read.part.label
            if label not in deaths:
                deaths[label] = rows_of_deaths(label)
            if read.row in deaths[label]:
                dead[number] = deaths[label][read.row]
        return dead

    def _try_alone(self, documents: Sequence[ReadDocument], dead: dict[int, str]) -> None:
        """Encode documents one by one, near which a worker died before: one dies on that to blame. Drop what comes."""
        for number, read in enumerate(documents):
            if number in dead:
                continue
            note_place(read.part.label, read.row, is_alone=True)
            try:
                self._encoder.encode([read.document.text])
            except (GristmillError, EnginesDifferError):
                pass  # so it is among the others, too
            except BaseException as error:
                if not _is_of_tokenizer(error):
                    raise

    def _encode(
        self, documents: Sequence[ReadDocument], chosen: Sequence[int]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the ids and offsets of the chosen documents."""
        if not chosen:
            return np.empty(0, np.int32), np.zeros(1, np.int64)
        ids, offsets = self._encoder.encode([documents[number].document.text for number in chosen], self._end)
        if len(self._first):
            ids = np.insert(ids, offsets[:-1], self._begin)
            offsets = offsets + np.arange(len(offsets))
        return ids, offsets

    def _find_failing(
        self, documents: Sequence[ReadDocument], failing: list[int], error: BaseException
    ) -> dict[int, str]:
        """Return the errors of the documents on which the tokenizer fails alone, among some on which it fails."""
        errors = dict(self._halve(documents, failing, error))
        if not errors or (len(errors) >= MANY_FAILING and len(errors) > len(failing) // 2):
            first = documents[next(iter(errors), failing[0])]
            raise TokenizerFailed(first.place, next(iter(errors.values()), _describe(error))) from error
        return errors

    def _halve(
        self, documents: Sequence[ReadDocument], failing: list[int], error: BaseException
    ) -> Iterator[tuple[int, str]]:
        """Yield the documents on which the tokenizer fails, and how, among some on which it fails together."""
        if len(failing) == 1:
            yield failing[0], _describe(error)
            return
        middle = len(failing) // 2
        for half in (failing[:middle], failing[middle:]):
            try:
                self._encode(documents, half)
            except BaseException as of_half:
                if not _is_of_tokenizer(of_half):
                    raise
                yield from self._halve(documents, half, of_half)


def _is_of_tokenizer(error: BaseException) -> bool:
    """Return whether the library of a tokenizer raised an error: none of ours, and none that ends this process."""
    if isinstance(error, GristmillError | EnginesDifferError):
        return False
    return isinstance(error, Exception) or type(error).__name__ == _PANIC


def _describe(error: BaseException) -> str:
    """Return an error of a library in one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}{message and ': ' + message}"
