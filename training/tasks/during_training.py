"""TaskEvaluation: scores in tasks that a run measures as it trains, under its own layout.

Of each item, the losses of its answers after the question are computed as a holdout's are. What is asked for is which
answer is the most probable one, and how many bits the right one takes: that falls long before the first item is right.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gristmill.errors import UsageError, require
from gristmill.io.tokenizer_file import open_tokenizer
from gristmill.wording import count_of
from training.data.sequences import TokenSequences
from training.data.text import begin_text, find_tokenizer
from training.kernels.cross_entropy import IGNORE_INDEX
from training.parallel.parallel_model import ParallelModel
from training.reporting.reporting_config import EvalConfig
from training.tasks.find_tasks import data_errors, find_gold, find_tasks, quiet

Encode = Callable[[str], list[int]]
_KINDS = ("multiple_choice", "loglikelihood")


class Item(NamedTuple):
    """A question with its answers: for each the tokens of both, and how many of them are the answer's."""

    answers: list[tuple[list[int], int]]
    gold: int
    """Number of the right answer."""
    gold_bytes: int
    """Bytes of its text."""


@dataclass(frozen=True)
class TaskScore:
    """A run's score in a task after a step."""

    bits_per_byte: float
    """Of the right answers, after their questions: all bits by all bytes."""
    acc: float | None
    """Share of the items whose right answer is the most probable one; None where there is one answer only."""
    items: int


class TaskEvaluation:
    """The tasks of a run, read once."""

    def __init__(
        self, config: EvalConfig, data: TokenSequences, micro_batch_size: int, mask_documents: bool = False
    ) -> None:
        """`data` of the run, whose tokenizer encodes items. Raises UsageError for a task that cannot be scored."""
        self.micro_batch_size = micro_batch_size
        self.items: dict[str, list[Item]] = {}
        self._ended = time.perf_counter()  # the evaluation before, or the start
        if config.tasks:
            self.items = _read_tasks(config, _encoder(data, mask_documents), data.length)

    def evaluate(self, model: ParallelModel) -> dict[str, Any]:
        """Return the scores by task, and their `seconds` and share of the time since the evaluation before.

        Returns {} without tasks. Every rank calls it.
        """
        if not self.items:
            return {}
        started = time.perf_counter()
        scores = {name: asdict(self._score(model, items)) for name, items in self.items.items()}
        now = time.perf_counter()
        share = (now - started) / (now - self._ended)
        self._ended = now
        return {**scores, "seconds": now - started, "share": share}

    def _score(self, model: ParallelModel, items: Sequence[Item]) -> TaskScore:
        answers = [answer for item in items for answer in item.answers]
        nats = iter(self._nats(model, answers))
        bits = 0.0
        right = 0
        for item in items:
            losses = [next(nats) for _ in item.answers]
            bits += losses[item.gold] / math.log(2)
            right += losses[item.gold] == min(losses)
        size = sum(item.gold_bytes for item in items)
        several = any(len(item.answers) > 1 for item in items)
        return TaskScore(bits / size, right / len(items) if several else None, len(items))

    def _nats(self, model: ParallelModel, answers: Sequence[tuple[list[int], int]]) -> list[float]:
        """Return the summed loss of each answer. Answers of one length are neighbours; replica r has those r, r + n, …

        All replicas run the same number of micro-batches: one with fewer answers repeats its last, with no targets.
        """
        world = model.world
        order = np.argsort([-len(tokens) for tokens, _ in answers], kind="stable")
        share = -(-len(order) // world.dp_size)
        mine = np.arange(share) * world.dp_size + world.dp_rank
        sums = torch.zeros(len(answers), dtype=torch.float64)
        for start in range(0, share, self.micro_batch_size):
            places = mine[start : start + self.micro_batch_size]
            numbers = order[np.minimum(places, len(order) - 1)]
            rows = [answers[number] for number in numbers]
            ids, targets = _padded(rows, model.layout.sequence_parts)
            targets[torch.from_numpy(places >= len(order))] = IGNORE_INDEX
            asked = targets.to(world.device)
            for losses in model.target_losses([ids.to(world.device)], [asked]):
                counted = losses.double().masked_fill(asked == IGNORE_INDEX, 0)
                sums.index_add_(0, torch.from_numpy(numbers), counted.sum(1).cpu())
        losses_of_answers: list[float] = world.all_reduce(sums).tolist()
        return losses_of_answers


def score_lines(step: int, scores: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each task, for the terminal."""
    for name, score in scores.items():
        if isinstance(score, dict):
            acc = "" if score["acc"] is None else f"acc {score['acc']:.4f}, "
            bits = f"{score['bits_per_byte']:.4f} bits per byte of the answer"
            yield f"task {name} after step {step}: {acc}{bits} ({count_of(score['items'], 'item')})"
    if scores:
        yield f"tasks took {scores['seconds']:.1f} s, {scores['share']:.1%} of the time since the evaluation before"


def _padded(rows: Sequence[tuple[list[int], int]], parts: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (B, T) of answers, T a multiple of `parts`; what is no answer is no target."""
    longest = max(len(tokens) for tokens, _ in rows) - 1
    length = -(-longest // parts) * parts
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    targets = torch.full_like(ids, IGNORE_INDEX)
    for row, (tokens, count) in enumerate(rows):
        end = len(tokens) - 1
        ids[row, :end] = torch.tensor(tokens[:-1])
        targets[row, end - count : end] = torch.tensor(tokens[-count:])
    return ids, targets


def _encoder(data: TokenSequences, mask_documents: bool) -> Encode:
    """Return what encodes a text from its beginning, as documents of `data` begin."""
    record = data.manifest.tokenizer
    path = find_tokenizer(record, [data.local]) if record.sha256 else None
    if path is None:
        raise UsageError(
            f"eval.tasks need the tokenizer of {data.folder}, which is missing or has changed; restore it, or leave "
            "--eval.tasks out"
        )
    tokenizer = open_tokenizer(path)
    return lambda text: begin_text(record, mask_documents, tokenizer.encode(text))


def _read_tasks(config: EvalConfig, encode: Encode, seq_len: int) -> dict[str, list[Item]]:
    with quiet():
        manager, names = find_tasks(config.tasks, config.task_folder)
        with data_errors(names):
            tasks = manager.load(names)["tasks"]
        return {name: list(_read_items(name, task, config.task_items, encode, seq_len)) for name, task in tasks.items()}


def _read_items(name: str, task: Any, limit: int, encode: Encode, seq_len: int) -> Iterator[Item]:
    require(
        task.OUTPUT_TYPE in _KINDS,
        f"task {name} is of the kind {task.OUTPUT_TYPE}; expected {' or '.join(_KINDS)} in eval.tasks: score others "
        "by gristmill evaluate --tasks",
    )
    task.set_fewshot_seed(1234)  # lm_eval's own
    task.build_all_requests(limit=limit or None)
    of_items: dict[int, list[Any]] = {}
    for request in task.instances:
        of_items.setdefault(request.doc_id, []).append(request)
    for requests in of_items.values():
        pairs = [request.args for request in requests if request.args[0] == requests[0].args[0]]
        gold = find_gold(name, task, requests[0].doc, len(pairs))
        answers = [_encode_pair(name, encode, context, answer, seq_len) for context, answer in pairs]
        yield Item(answers, gold, len(pairs[gold][1].encode()))


def _encode_pair(name: str, encode: Encode, context: str, answer: str, seq_len: int) -> tuple[list[int], int]:
    """Return the tokens of a question and an answer, at most one more than `seq_len`, and how many are the answer's.

    As lm_eval does it: spaces at the end of a question are the answer's.
    """
    question = context.rstrip()
    before = encode(question)
    begin = encode("")
    text = encode(context + answer)
    whole = text if question or text[: len(begin)] == begin else [*begin, *text]
    count = len(whole) - len(before)
    require(
        0 < count <= seq_len and bool(before),
        f"task {name} has an answer of {count_of(max(0, count), 'token')} ({answer:.40}); expected 1 to data.seq_len, "
        f"{seq_len}, after a question: leave the task out of eval.tasks",
    )
    return whole[-(seq_len + 1) :], count
