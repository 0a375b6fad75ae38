"""Stage: train a tokenizer on a random sample of the train set: a SentencePiece model, or byte-level BPE."""

import heapq
import re
import sys
from array import array
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import msgspec
import numpy as np

from gristmill.budget import worker_share
from gristmill.command import command
from gristmill.counts import READ, Counts
from gristmill.engine.options import RunOptions, parse_size
from gristmill.engine.run import StageRun, open_stage
from gristmill.engine.slices import (
    SliceGroup,
    cut_corpus,
    cut_raw_corpus,
    group_slices,
    leaves_out_damaged,
    read_slices,
)
from gristmill.engine.staleness.outputs import reject_overlapping_folders
from gristmill.engine.task import FileSet, Stage, Task
from gristmill.errors import UsageError
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import Slice, paths_of, total_size
from gristmill.io.readers import read_chosen, read_documents
from gristmill.io.tokenizer_file import QWEN2, require_tokenizers
from gristmill.io.writers import Rejects
from gristmill.processes import call_apart
from gristmill.storage.local import atomic_write
from gristmill.text import utf8_size
from preprocessing.mixing.decided_corpus import GroupDecisions, find_decisions, open_mix, reject_other_corpus
from preprocessing.mixing.mix_manifest import mix_manifest_path
from preprocessing.mixing.sampling import check_seed, random_number, random_numbers
from preprocessing.mixing.shuffle_buckets import LineBuffer
from preprocessing.tokenizer.training import END_OF_TEXT, MAX_SENTENCE_BYTES, train_byte_bpe, train_sentencepiece

ModelType = Literal["bpe", "unigram", "byte-bpe"]
MAX_VOCAB_SIZE = 1 << 20

STAGE = Stage("train_tokenizer", version=1, libraries=("sentencepiece",))
SAMPLED = "sampled"
NOT_SAMPLED = "not sampled"
_BASE_PIECES = 256 + 3  # bytes; unknown, begin and end of sentence
_SENTENCE = re.compile(rf"[^\t\r\n\0]{{1,{MAX_SENTENCE_BYTES // 4}}}")  # characters have up to 4 bytes
_INDEX_BITS = 32  # of a document among all that were ever in the sample
_FIELDS = 4  # of a document: source, bytes of its text, where its sentences begin and end in the buffer
_COPIED = 1 << 20  # bytes at a time


def train_tokenizer(
    input_dir: Path,
    out_dir: Path,
    vocab_size: int = 32_000,
    model_type: ModelType = "bpe",
    sample: str = "64MiB",
    exact: bool = True,
    seed: int = 1,
    options: RunOptions = RunOptions(),
    text_column: str = "text",
    mix_dir: Path | None = None,
) -> Counts:
    """Train a tokenizer on a random sample of the documents of a train set.

    The train set is already weighted by source, and so is the sample. The tokenizer is lossless: no normalisation,
    white space is kept, and digits are single pieces. bpe and unigram write tokenizer.model for SentencePiece:
    characters outside the vocabulary become UTF-8 bytes, and only U+2581, which marks a space, is decoded as a
    space. Ids: 0 unknown, 1 beginning of sentence, 2 end of sentence (end of document). byte-bpe writes tokenizer.json
    for transformers, as GPT-2, Llama 3 and Qwen have: merges of bytes within words, cut as Qwen does; id 0 is
    <|endoftext|>.

    Args:
        input_dir: OUT/train_deduped, the train set; or, with mix_dir, the clean corpus that it is chosen from.
        out_dir: OUT/tokenizer, the folder to write tokenizer.model or tokenizer.json to.
        vocab_size: Number of pieces, including the 256 bytes and the control pieces: 3, or 1 of byte-bpe.
        model_type: bpe (byte-pair encoding of characters: Sennrich et al. 2016), unigram (Kudo 2018), or byte-bpe (of
            bytes: Radford et al. 2019; needs gristmill[tokenizers]).
        sample: Size of the text to train on, such as 64MiB; with mix_dir, about that.
        exact: Fail if the sample is too small for vocab_size pieces, instead of making fewer.
        seed: Seed of the sample.
        options: Workers, memory, and when to stop; they change no output.
        text_column: The column or field that holds the text.
        mix_dir: OUT/mix, which mix wrote: its train set is sampled, each copy of a document for itself.

    Returns:
        Documents read, sampled and not sampled, per source.
    """
    check_options(vocab_size, model_type, sample, exact, seed)
    files = list_corpus(input_dir, text_column=text_column)
    reject_overlapping_folders(input_dir, out_dir)
    model = out_dir / model_name(model_type)
    whole = model_type == "byte-bpe"
    stage = STAGE
    if whole:
        require_tokenizers("--model_type byte-bpe")
        stage = replace(STAGE, libraries=("tokenizers",))
    reads = {input_dir: paths_of(files)}
    manifest = None
    if mix_dir:
        manifest, reads[mix_dir] = open_mix(mix_dir)
    with open_stage(stage, out_dir, options, reads=reads, files=[model]) as run:
        budget = parse_size(sample)
        if mix_dir and manifest:
            run.tag(mix_manifest_path(mix_dir))  # was read above
            reject_other_corpus(files, manifest, mix_dir)
            groups = group_slices(cut_corpus(run, files))
            decisions = find_decisions(groups, manifest, mix_dir)
            last = _last_sampled(budget, manifest.train_bytes)
            sampled = run.step("sample", _tasks_of_mix(run, groups, decisions, last, seed, whole))
        else:
            slices = cut_raw_corpus(run, files)
            sampled = read_slices(run, "sample", slices, lambda groups: _sample_tasks(run, groups, budget, seed, whole))
            sampled.counts.check_malformed(STAGE.name, options.max_malformed)
        samples = tuple(sampled.paths())
        arguments = {
            "samples": FileSet(samples), "model": model, "vocab_size": vocab_size, "model_type": model_type,
            "exact": exact,
        }  # fmt: skip
        megabytes = sum(sampled.sizes()) / 1e6
        notice = f"training {vocab_size:,} pieces on {megabytes:,.1f} MB of text; 64 MB take about 20 seconds"
        run.step("train", [Task("train", train_model, arguments, (model,), notice=notice)])
        return run.finish(sampled.counts)


def model_name(model_type: str) -> str:
    """Return the name of the file of a tokenizer of this type."""
    if model_type == "byte-bpe":
        return "tokenizer.json"
    return "tokenizer.model"


def special_tokens(model_type: str) -> dict[str, str]:
    """Return the tokens of a tokenizer of this type that begin and end a document, by "bos" and "eos"."""
    if model_type == "byte-bpe":
        return {"eos": END_OF_TEXT}
    return {"bos": "<s>", "eos": "</s>"}


def check_options(vocab_size: int, model_type: str, sample: str, exact: bool, seed: int) -> None:
    """Raise UsageError for a value out of range, or a vocabulary that no sample of that size can have."""
    budget = parse_size(sample, "--sample")
    if not _BASE_PIECES < vocab_size <= MAX_VOCAB_SIZE:
        raise UsageError(
            f"--vocab_size {vocab_size}: expected more than the {_BASE_PIECES} pieces of the 256 bytes and 3 controls, "
            f"and at most {MAX_VOCAB_SIZE:,}; 32,000 is usual"
        )
    if exact and vocab_size - _BASE_PIECES > budget:
        raise UsageError(
            f"--vocab_size {vocab_size} --sample {sample}: a sample has fewer pieces than bytes: give a larger "
            f"sample, such as 64MiB, or at most {budget + _BASE_PIECES} pieces, or --exact false"
        )
    if model_type not in get_args(ModelType):
        raise UsageError(f"--model_type {model_type}: expected {' or '.join(get_args(ModelType))}")
    check_seed(seed)


def _sample_tasks(run: StageRun, groups: list[SliceGroup], budget: int, seed: int, whole: bool) -> Iterator[Task]:
    """Yield a task for each group of slices; each slice has its share of the budget."""
    total = sum(map(total_size, groups)) or 1
    for group in groups:
        output = run.work / "sample" / f"{group[0].label}.txt"
        budgets = tuple(max(1, budget * part.size // total) for part in group)
        arguments = {"budgets": budgets, "seed": seed, "whole": whole, "output": output}
        yield Task.on_slices(group, sample_group, arguments, (output,))


def _last_sampled(budget: int, train_bytes: int) -> int:
    """Return the largest random number of a document that is sampled: `budget` bytes of all, about."""
    numbers = 1 << 64
    return min(numbers, budget * numbers // max(1, train_bytes)) - 1


def _tasks_of_mix(
    run: StageRun, groups: list[SliceGroup], decisions: list[GroupDecisions], last: int, seed: int, whole: bool
) -> Iterator[Task]:
    for group, of_group in zip(groups, decisions, strict=True):
        output = run.work / "sample" / f"{group[0].label}.txt"
        arguments = {"decisions": of_group, "last": last, "seed": seed, "whole": whole, "output": output}
        yield Task.on_slices(group, sample_mix, arguments, (output,))


def sample_mix(
    group: SliceGroup, decisions: GroupDecisions, last: int, seed: int, output: Path, whole: bool = False
) -> Counts:
    """Task: write the lines (see _lines_of) of a random sample of the documents in a group that are in the train set.

    A copy of a document is in the sample if its random number is not above `last`, whatever is in other groups.
    """
    counts = Counts({}, [])
    with atomic_write(output) as temporary, temporary.open("wb") as file:
        for part, decided in decisions.load(group):
            copies = decided.train_copies
            times = np.zeros_like(copies)
            for copy in range(int(copies.max(initial=0))):
                numbers = random_numbers(seed, f"tokenizer {copy}", part.name, decided.rows)
                times += (copies > copy) & (numbers <= np.uint64(last))
            for reason, counted in ((READ, copies), (SAMPLED, times), (NOT_SAMPLED, copies - times)):
                size = int((counted * decided.sizes).sum())
                counts.add(part.source, reason, size, int(counted.sum()))
            is_sampled = times > 0
            documents = read_chosen(part, decided.rows[is_sampled].tolist(), only_text=True)
            for document, repeats in zip(documents, times[is_sampled].tolist(), strict=True):
                for _ in range(repeats):
                    file.writelines(_lines_of(document.text, whole))
                del document  # a large one is gone before the next is read
    return counts


def _lines_of(text: str, whole: bool) -> Iterator[bytes]:
    """Yield the sentences of a text, a line each; or, if `whole`, the text as JSON in one line."""
    if whole:
        yield msgspec.json.encode(text) + b"\n"
        return
    for sentence in sentences(text):
        yield sentence.encode() + b"\n"


@leaves_out_damaged
def sample_group(group: SliceGroup, budgets: tuple[int, ...], seed: int, output: Path, whole: bool = False) -> Counts:
    """Task: write the sentences of a random sample of each slice; or, if `whole`, its texts as JSON, a line each."""
    counts = Counts({}, [])
    rejects = Rejects(output)
    with atomic_write(output) as temporary, temporary.open("wb") as file:
        for part, budget in zip(group, budgets, strict=True):
            for block in _sample_slice(part, budget, seed, counts, rejects, output.parent, whole):
                file.write(block)
    return counts


def _sample_slice(
    part: Slice, budget: int, seed: int, counts: Counts, rejects: Rejects, folder: Path, whole: bool
) -> Iterator[bytes]:
    """Yield the lines of the documents with the smallest random numbers, in order: `budget` bytes, but at least one."""
    share = worker_share()
    with closing(LineBuffer(folder, None if share is None else share // 4)) as buffer:
        sample = SentenceSample(budget, buffer, whole)
        for document in read_documents(part, counts, rejects, by_original_source=True):
            key = document.original_key
            number = random_number(seed, f"tokenizer {document.key.row}", key.file, key.row)
            for left in sample.add(number, key.source, document.text):
                counts.add(left.source, NOT_SAMPLED, left.size)
            del document  # a large one is gone before the next is read
        for sampled in sample.documents():
            counts.add(sampled.source, SAMPLED, sampled.size)
        yield from sample.blocks()


class Sampled(NamedTuple):
    """A document that was added: its source, and the bytes of its text in UTF-8."""

    source: str
    size: int


class SentenceSample:
    """Keeps the documents with the smallest random numbers: `budget` bytes of text, but at least one document.

    One that is removed leaves its lines in `buffer`: few do, as most are refused before they are added. The lines of a
    document are its sentences, or, if `whole`, one: its text as JSON.
    """

    def __init__(self, budget: int, buffer: LineBuffer, whole: bool = False) -> None:
        self._budget = budget
        self._buffer = buffer
        self._whole = whole
        self._heap: list[int] = []  # of number and index in one, negative: the largest on top
        self._documents = array("Q")  # _FIELDS for each
        self._sources: list[str] = []
        self._size = 0

    def add(self, number: int, source: str, text: str) -> list[Sampled]:
        """Add a document with a random number below 2^64; returns the documents that the sample now leaves out."""
        sampled = Sampled(source, utf8_size(text))
        index = len(self._documents) // _FIELDS
        priority = -(number << _INDEX_BITS | index)
        if self._heap and self._size + sampled.size > self._budget and priority < self._heap[0]:
            return [sampled]
        start = self._buffer.size
        for line in _lines_of(text, self._whole):
            self._buffer.append(line)
        if source not in self._sources:
            self._sources.append(source)
        self._documents.extend((self._sources.index(source), sampled.size, start, self._buffer.size))
        heapq.heappush(self._heap, priority)
        self._size += sampled.size
        return self._remove_largest()

    def documents(self) -> Iterator[Sampled]:
        """Return the documents of the sample, in no order."""
        return map(self._document, self._heap)

    def blocks(self) -> Iterator[bytes]:
        """Yield the lines of the sample, document by document in the order in which they were added."""
        view = self._buffer.view()
        for index in sorted(map(_index, self._heap)):
            start, end = self._documents[index * _FIELDS + 2 : (index + 1) * _FIELDS]
            for at in range(start, end, _COPIED):
                yield view[at : min(at + _COPIED, end)].tobytes()

    def _remove_largest(self) -> list[Sampled]:
        """Remove documents until the others fit the budget, or one is left."""
        removed = []
        while self._size > self._budget and len(self._heap) > 1:
            removed.append(self._document(heapq.heappop(self._heap)))
            self._size -= removed[-1].size
        return removed

    def _document(self, priority: int) -> Sampled:
        at = _index(priority) * _FIELDS
        return Sampled(self._sources[self._documents[at]], self._documents[at + 1])


def _index(priority: int) -> int:
    return -priority & ((1 << _INDEX_BITS) - 1)


def sentences(text: str) -> Iterator[str]:
    """Split a text into sentences that SentencePiece trains on: lines of up to MAX_SENTENCE_BYTES.

    Tabs split the text too, as SentencePiece skips a sentence with one; so do carriage returns and NULs.

    >>> list(sentences("a\\tb\\n\\nc"))
    ['a', 'b', 'c']
    """
    return (match[0] for match in _SENTENCE.finditer(text))  # a list of all may take many times the text's memory


def train_model(samples: FileSet, model: Path, vocab_size: int, model_type: str, exact: bool) -> None:
    """Task: train a model on the sentences of all samples, or, for byte-bpe, on their texts.

    Raises UsageError if there is no text, if its characters alone are more than `vocab_size` pieces, or if it
    is too little for that many pieces and `exact` is set.
    """
    if not any(path.stat().st_size for path in samples.paths):
        raise UsageError(
            "there is no text to train a tokenizer on: no document, or only empty ones. Give a corpus with text"
        )
    with atomic_write(model) as temporary:
        arguments = {"paths": samples.paths, "model": temporary, "vocab_size": vocab_size, "exact": exact}
        if model_type == "byte-bpe":
            call_apart(train_byte_bpe, words=QWEN2, **arguments)
        else:
            call_apart(train_sentencepiece, model_type=model_type, **arguments)


if __name__ == "__main__":
    command(train_tokenizer)
