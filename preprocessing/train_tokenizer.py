"""Stage: a SentencePiece tokenizer, trained on a sample of the train set, lossless by default."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import heapq

import numpy as np
import sentencepiece

from gristmill.command import command
from gristmill.counts import Counts
from gristmill.engine.stage import STATE_DIR, RunOptions, Task, parse_size, run_stage
from gristmill.errors import UsageError
from gristmill.io.documents import list_corpus
from gristmill.io.files import atomic_write
from gristmill.io.lines import split_lines
from gristmill.io.readers import Slice, plan_slices, read_documents
from gristmill.io.writers import Rejects
from gristmill.text import utf8_size
from preprocessing.mixing.sampling import random_numbers

NAME = "train_tokenizer"
MODEL = "tokenizer.model"
SAMPLED = "sampled"
PASSED = "not sampled"
_LONGEST = 4096  # bytes of a training sentence; longer lines are cut
_THREADS = 4  # fixed: the trainer's sums depend on it


def train_tokenizer(
    input_dir: Path,
    out_dir: Path,
    vocab_size: int = 32_000,
    model_type: Literal["bpe", "unigram"] = "bpe",
    sample: str = "64MiB",
    exact: bool = True,
    seed: int = 1,
    options: RunOptions = RunOptions(),
) -> Counts:
    """Train OUT/tokenizer/tokenizer.model on a random sample of the documents of a train set.

    The train set is weighted already, and so is a sample of it. Nothing is normalised, no white space
    removed, digits are split and unknown characters become bytes: decoding gives back the text (but
    for U+2581, which SentencePiece uses for a space). Ids: 0 unknown, 1 begin, 2 end of document.

    Args:
        input_dir: OUT/train_deduped.
        out_dir: OUT/tokenizer.
        vocab_size: Pieces, the 256 bytes and 3 control pieces included.
        model_type: bpe or unigram.
        sample: Text to train on.
        exact: Fail where the sample cannot fill the vocabulary, rather than make fewer pieces.
        seed: Seed of the sample.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read, sampled and not, per source.
    """
    budget = parse_size(sample)
    if vocab_size < 300:
        raise UsageError(f"--vocab_size {vocab_size}: wanted more than the 256 bytes and 3 control pieces, 300 or more")
    slices = [part for file in list_corpus(input_dir) for part in plan_slices(file)]
    size = sum(part.size for part in slices) or 1
    state = out_dir / STATE_DIR
    tasks = [
        _sample_task(part, max(1, budget * part.size // size), seed, state / "sample" / f"{part.label}.txt")
        for part in slices
    ]
    counts = run_stage(NAME, tasks, state, options)
    samples = tuple(task.outputs[0] for task in tasks)
    arguments = {
        "samples": samples, "model": out_dir / MODEL,
        "vocab_size": vocab_size, "model_type": model_type, "exact": exact,
    }  # fmt: skip
    train = Task("train", train_model, arguments, samples, (out_dir / MODEL,))
    run_stage(f"{NAME}-model", [train], state, options, summary=False)
    return counts


def sample_slice(part: Slice, budget: int, seed: int, output: Path) -> Counts:
    """Write the sentences of the documents with the smallest draws, `budget` bytes of text of them."""
    counts = Counts({}, [])
    chosen: list[tuple[int, int, str, str]] = []  # a heap: (-draw, -row, source, text), the largest draw on top
    held = 0
    for document in read_documents(part, counts, Rejects(output), by_original_source=True):
        key = document.original_key
        draw = int(random_numbers(seed, f"tokenizer {document.key.row}", key.file, np.array([key.row]))[0])
        heapq.heappush(chosen, (-draw, -document.key.row, key.source, document.text))
        held += utf8_size(document.text)
        while held > budget and len(chosen) > 1:
            _, _, source, text = heapq.heappop(chosen)
            held -= utf8_size(text)
            counts.add(source, PASSED, utf8_size(text))
    for _, _, source, text in chosen:
        counts.add(source, SAMPLED, utf8_size(text))
    ordered = sorted(chosen, key=lambda item: -item[1])
    with atomic_write(output) as temporary, temporary.open("wb") as file:
        file.writelines(sentence.encode() + b"\n" for *_, text in ordered for sentence in sentences(text))
    return counts


def sentences(text: str) -> Iterator[str]:
    """What the trainer can learn from: lines cut at tabs (it skips any with one) and at its longest.

    >>> list(sentences("a\\tb\\n\\nc"))
    ['a', 'b', 'c']
    """
    for line in text.replace("\t", "\n").replace("\r", "\n").replace("\0", "\n").split("\n"):
        yield from (line[i : i + _LONGEST // 4] for i in range(0, len(line), _LONGEST // 4))


def train_model(samples: tuple[Path, ...], model: Path, vocab_size: int, model_type: str, exact: bool) -> Counts:
    """Train on sentences; the model appears whole. UsageError if the text cannot fill the vocabulary."""
    with atomic_write(model) as temporary, temporary.open("wb") as file:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_stored_sentences(samples), model_writer=file,
                vocab_size=vocab_size, model_type=model_type,
                hard_vocab_limit=exact, byte_fallback=True, split_digits=True, normalization_rule_name="identity",
                remove_extra_whitespaces=False, add_dummy_prefix=False, allow_whitespace_only_pieces=True,
                unk_id=0, bos_id=1, eos_id=2, pad_id=-1,
                max_sentence_length=_LONGEST, num_threads=_THREADS, minloglevel=2,
            )  # fmt: skip
        except (RuntimeError, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise  # the model could not be written
            raise UsageError(
                f"SentencePiece cannot make {vocab_size:,} pieces of this sample ({_last_words(error)}): "
                "give a smaller --vocab_size, or more text"
            ) from error
    return Counts({}, [])


def _stored_sentences(samples: tuple[Path, ...]) -> Iterator[str]:
    for path in samples:
        with path.open("rb") as file:
            yield from (line.decode() for line in split_lines(iter(lambda: file.read(1 << 20), b"")) if line)


def _last_words(error: Exception) -> str:
    return str(error).strip().rsplit("] ", 1)[-1] or type(error).__name__


def _sample_task(part: Slice, budget: int, seed: int, output: Path) -> Task:
    arguments = {"part": part, "budget": budget, "seed": seed, "output": output}
    return Task(part.label, sample_slice, arguments, (Path(part.path),), (output,), part.size)


if __name__ == "__main__":
    command(train_tokenizer)
