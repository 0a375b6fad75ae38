"""Files that differ from the others of their source: in length, in language, in what a token is."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from gristmill.counts import READ, Counts
from gristmill.engine.execution.call import Call
from gristmill.engine.execution.local import LocalExecutor
from gristmill.engine.execution.staging import local_copies
from gristmill.engine.execution.worker_deaths import note_place, rows_of_deaths
from gristmill.engine.staleness.ledger import Ledger
from gristmill.errors import DamagedFile, WorkerDied
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import CorpusFile
from gristmill.io.readers import read_corpus
from gristmill.io.tokenizer_file import find_tokenizer_file
from gristmill.storage.files import copy_first_bytes, exists, is_folder
from gristmill.text import utf8_size
from gristmill_cli.run_config import RunConfig
from preprocessing.tokenizer.loading import count_tokens

FEW_DOCUMENTS = 20  # of a file, or of a source: fewer are not compared
_MIN_FILES = 3  # of a source: fewer are not compared
_SAMPLED_FILES = 32  # of a source, whose tokens are counted
_SAMPLED_BYTES = 1 << 15  # of a file, whose tokens are counted
_FETCHED_BYTES = 1 << 20  # of a file in a bucket
_LANGUAGE = "language"  # the rule of a recipe
Distance = Callable[[float, float], float]  # of a value from the median
CountsByFile = dict[str, Counts]  # source → the counts of each of its files, in the place of a source


def counts_by_file(ledger: Ledger, step: str) -> CountsByFile:
    """Return for each source the counts of its files, as the tasks of a step have recorded them.

    Small files that one task reads count as the first of them.
    """
    files_of_source: CountsByFile = {}
    for record in ledger.read().values():
        if record.step != step:
            continue
        file = record.task.rpartition("+")[0] or record.task
        for source, reason, tally in record.counts.rows():
            counts = files_of_source.setdefault(source, Counts({}, []))
            counts.add(file, reason, tally.bytes, tally.documents)
    return files_of_source


def odd_lengths(files_of_source: CountsByFile, limit: float) -> Iterator[str]:
    """Yield files whose documents are `limit` times longer, or shorter, than in the median file of their source."""
    for source, files in sorted(files_of_source.items()):
        means = dict[str, float]()
        for file in sorted(files.tallies):
            documents = files.documents_read(file)
            size = files.total(READ, file).bytes
            if documents >= FEW_DOCUMENTS and size:
                means[file] = size / documents
        for file, middle, others in _odd_file(means, limit, _ratio):
            yield (
                f"documents of {file} have {means[file]:,.0f} bytes on average, in the median file of {source} "
                f"{middle:,.0f}{others}: check whether this file holds a different kind of text"
            )


def odd_languages(files_of_source: CountsByFile, limit: float) -> Iterator[str]:
    """Yield files of which the rule `language` removes another share than of the median file, by more than `limit`."""
    for source, files in sorted(files_of_source.items()):
        shares = dict[str, float]()
        for file in sorted(files.tallies):
            read = files.documents_read(file)
            if read >= FEW_DOCUMENTS:
                shares[file] = files.total(_LANGUAGE, file).documents / read
        for file, middle, others in _odd_file(shares, limit, _difference):
            yield (
                f"the rule {_LANGUAGE} removes {shares[file]:.0%} of the documents of {file}, of the median file of "
                f"{source} {middle:.0%}{others}: check whether it is in another language"
            )


def odd_token_sizes(config: RunConfig, corpus: Path, tokenizer: Path) -> Iterator[str]:
    """Yield files whose texts have far more bytes a token than the median file of their source, or fewer.

    That is told from a sample: the first 32 KiB of some 32 files of each source, before duplicates are removed. A file
    with a text on which the tokenizer fails is not compared.
    """
    if not config.alarms.bytes_a_token or not (config.tokenizer.file or exists(tokenizer)):
        return
    if not is_folder(corpus):  # removed to save space, once its tokens were written
        return
    files_of_source = dict[str, list[CorpusFile]]()
    for file in list_corpus(corpus, text_column=config.text_column):
        files_of_source.setdefault(file.source, []).append(file)
    samples = dict[str, dict[str, list[str]]]()
    for source, files in sorted(files_of_source.items()):
        if len(files) >= _MIN_FILES:
            samples[source] = _sample_texts(files)
    with local_copies([find_tokenizer_file(tokenizer)]) as (copy,):
        for source, texts_of_files in samples.items():
            tokens = _count_tokens(texts_of_files, copy, may_die=config.max_failed > 0)
            ratios = dict[str, float]()
            for name, count in tokens.items():
                ratios[name] = utf8_size("".join(texts_of_files[name])) / max(1, count)
            for file_name, middle, others in _odd_file(ratios, config.alarms.bytes_a_token, _ratio):
                yield (
                    f"a token of {file_name} has {ratios[file_name]:.2f} bytes, in the median file of {source} "
                    f"{middle:.2f}{others}: check whether it is in another language or script"
                )


def _sample_texts(files: list[CorpusFile]) -> dict[str, list[str]]:
    """Return the first texts of some of the files that have enough text, by name."""
    texts_of_files = dict[str, list[str]]()
    stride = -(-len(files) // _SAMPLED_FILES)
    for file in files[::stride]:
        texts = _first_texts(file)
        characters = sum(map(len, texts))
        if len(texts) >= FEW_DOCUMENTS or characters >= _SAMPLED_BYTES:
            texts_of_files[file.name] = texts
    return texts_of_files


def _count_tokens(texts_of_files: dict[str, list[str]], tokenizer: Path, may_die: bool) -> dict[str, int]:
    """Return the tokens of texts of files, by name; none where that fails, or, if it `may_die`, ends its process."""
    call = Call(count_tokens_of_files, {"texts_of_files": texts_of_files, "tokenizer": tokenizer}, sets_aside=True)
    if not may_die:
        return dict(call())
    with LocalExecutor(1) as executor, suppress(WorkerDied):  # of too many of the files
        ((_, tokens),) = executor.run([call])
        return dict(tokens)
    return {}


def count_tokens_of_files(texts_of_files: dict[str, list[str]], tokenizer: Path) -> dict[str, int]:
    """Return the tokens of texts of files, by name; none where a text makes the tokenizer fail, or ended a process."""
    tokens = dict[str, int]()
    for name, texts in texts_of_files.items():
        label = f"{name}+0"
        if rows_of_deaths(label):
            continue
        note_place(label, 0, is_alone=True)
        with suppress(Exception):  # of the tokenizer's library
            tokens[name] = count_tokens(tokenizer, texts)
    return tokens


def _first_texts(file: CorpusFile) -> list[str]:
    """Return the first texts of a file, 32 KiB together; of an object no more is fetched than its first MiB."""
    texts = list[str]()
    size = 0
    with TemporaryDirectory() as folder, suppress(DamagedFile):  # a copy of the first bytes has no end
        path = copy_first_bytes(file.path, min(file.size, _FETCHED_BYTES), Path(folder))
        for document in read_corpus(path, file.text_column, on_malformed="skip"):
            text = document.text[: _SAMPLED_BYTES - size]
            texts.append(text)
            size += len(text)
            if size >= _SAMPLED_BYTES:
                break
    return texts


def _odd_file(values: dict[str, float], limit: float, distance: Distance) -> Iterator[tuple[str, float, str]]:
    """Yield the file whose value is furthest from the median of all, if its distance is more than `limit`.

    With the median, and how many other files differ as much, in words. Yield none of few files, or if `limit` is 0.
    """
    if not limit or len(values) < _MIN_FILES:
        return
    middle = median(values.values())
    distances = dict[str, float]()
    differing = 0
    for file, value in values.items():
        distances[file] = distance(value, middle)
        differing += distances[file] > limit
    furthest = max(distances, key=lambda file: distances[file])
    if distances[furthest] <= limit:
        return
    others = ""
    if differing > 1:
        others = f"; {differing:,} files differ as much"
    yield furthest, middle, others


def _ratio(value: float, middle: float) -> float:
    return max(value / middle, middle / value)


def _difference(value: float, middle: float) -> float:
    return abs(value - middle)
