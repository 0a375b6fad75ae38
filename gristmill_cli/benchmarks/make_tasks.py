"""Command: a few cloze tasks made of held-out text, which need no network and which a small model can begin to solve.

Passages of the holdout are ordered by a hash, so that they are the same in any order of documents; each task asks for
something else of them. The wrong answers are as frequent, as long, or of the same words as the right one.
"""

import hashlib
import heapq
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text
from tyro.conf import Positional

from gristmill.batches import numbered
from gristmill.errors import UsageError, require
from gristmill.storage.files import reject_remote
from gristmill.storage.local import atomic_write_bytes
from gristmill.wording import count_of
from gristmill_cli.benchmarks.texts import parts_of

_WORDS = 48  # of a passage
_ENDING = 12  # words of a passage that are its ending
_CHOICES = 4
_SPARE = 4  # passages that are kept for an item
_NEIGHBOURS = 25  # words that are a little more, or less, frequent than a word
_WORD = re.compile(r"\S+")
_NUMBER_BYTES = 8  # of a hash
_TASK = """\
# Written by gristmill make-tasks. {help}
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


class ClozeItem(msgspec.Struct):
    """A context, its possible continuations, the number of the right one, and the document that they are from."""

    context: str
    choices: list[str]
    answer: int
    document: str
    source: str


@dataclass(frozen=True)
class Passage:
    """Some words of a document: its text, and where each word begins and ends in it."""

    text: str
    spans: list[tuple[int, int]]
    document: str
    source: str

    def words(self) -> list[str]:
        """Return its words."""
        return [self.text[start:end] for start, end in self.spans]

    def before(self, word: int) -> str:
        """Return the text before a word, without the space."""
        return self.text[: self.spans[word - 1][1]]

    def after(self, word: int) -> str:
        """Return the text from a word on."""
        return self.text[self.spans[word][0] :]


class Passages(NamedTuple):
    """The passages of a holdout in the order of their hashes; their words, from rare to frequent, and their places."""

    ordered: list[Passage]
    vocabulary: list[str]
    ranks: dict[str, int]


MakeItem = Callable[[Passages, int, random.Random], ClozeItem | None]


def make_tasks(
    holdout: Positional[Path],
    out_dir: Positional[Path],
    items: int = 200,
    seed: int = 1,
    tokenizer: Path | None = None,
    text_column: str = "text",
) -> Group:
    """Make four cloze tasks of held-out text, for `gristmill evaluate --tasks` and `--eval.tasks` without a network.

    holdout_word: which word comes next; the others are about as frequent. holdout_repeat: which word of the passage is
    repeated. holdout_ending: which ending is this passage's; the others are other passages'. holdout_order: in which
    order the last words are. Each has four answers, so that chance is 0.25. The same text and seed give the same bytes.

    gristmill make-tasks OUT/tokens/holdout OUT/tasks

    gristmill evaluate OUT/model --tasks OUT/tasks/*.yaml

    Args:
        holdout: Folder of token shards, which are decoded, or of a corpus.
        out_dir: Folder for the tasks, a .yaml and a .jsonl file each. Run the command again if you move it: tasks of
            lm_eval name their data by its path.
        items: Items of each task, at most.
        seed: Another seed draws other passages.
        tokenizer: Tokenizer of the token shards, where it is not next to them.
        text_column: The column or field of a corpus that holds the text.
    """
    require(items > 0, f"--items {items}: expected 1 or more")
    reject_remote(out_dir)
    passages = _choose_passages(holdout, items * _SPARE, seed, tokenizer, text_column)
    lines: list[RenderableType] = []
    for name, (make, help_line) in TASKS.items():
        made = list(_make_items(passages, make, items, f"{seed} {name}"))
        if not made:
            raise UsageError(
                f"{holdout} has too few passages for {name}: {len(passages.ordered)} of {_WORDS} words that are mostly "
                "letters; expected more text"
            )
        data = out_dir.absolute() / f"{name}.jsonl"
        encoder = msgspec.json.Encoder()
        atomic_write_bytes(data, encoder.encode_lines(made))
        task = _TASK.format(name=name, data=msgspec.json.encode(str(data)).decode(), help=help_line)
        atomic_write_bytes(out_dir / f"{name}.yaml", task.encode())
        lines.append(Text(f"{out_dir / name}.yaml: {count_of(len(made), 'item')}. {help_line}"))
    lines.append(Text(f"score a model in them: gristmill evaluate MODEL --tasks {out_dir}/*.yaml"))
    return Group(*lines)


def _choose_passages(holdout: Path, count: int, seed: int, tokenizer: Path | None, text_column: str) -> Passages:
    """Return the `count` passages whose hashes are the smallest, each text once."""
    heap: list[tuple[int, str, Passage]] = []  # the largest hash first
    kept = set[str]()
    for part in parts_of(holdout, tokenizer, text_column):
        for document in part.read():
            for passage in _passages_of(document.text, document.name, document.source):
                if passage.text in kept:
                    continue
                entry = (-_number(f"{seed} {passage.text}"), passage.text, passage)
                kept.add(passage.text)
                if len(heap) < count:
                    heapq.heappush(heap, entry)
                else:
                    kept.discard(heapq.heappushpop(heap, entry)[1])
    heap.sort(key=lambda entry: (-entry[0], entry[1]))
    ordered = [passage for _, _, passage in heap]
    counts = Counter[str]()
    for passage in ordered:
        counts.update(filter(_is_plain, passage.words()))
    vocabulary = sorted(counts, key=lambda word: (counts[word], word))
    return Passages(ordered, vocabulary, numbered(vocabulary))


def _passages_of(text: str, document: str, source: str) -> Iterator[Passage]:
    """Yield the passages of a text that are mostly words, one after the other."""
    spans = [match.span() for match in _WORD.finditer(text)]
    for first in range(0, len(spans) - _WORDS + 1, _WORDS):
        start = spans[first][0]
        end = spans[first + _WORDS - 1][1]
        own = [(begin - start, stop - start) for begin, stop in spans[first : first + _WORDS]]
        passage = Passage(text[start:end], own, document, source)
        letters = sum(map(_is_of_letters, passage.words()))
        if letters >= 0.8 * _WORDS and end - start < 20 * _WORDS:
            yield passage


def _is_of_letters(word: str) -> bool:
    return word.strip(".,;:!?\"'()").isalpha()


def _make_items(passages: Passages, make: MakeItem, count: int, seed: str) -> Iterator[ClozeItem]:
    """Yield the items of a task, of the first passages that have one."""
    made = 0
    for number, passage in enumerate(passages.ordered):
        item = make(passages, number, random.Random(_number(f"{seed} {passage.text}")))
        if item is not None:
            made += 1
            yield item
        if made == count:
            return


def _next_word(passages: Passages, number: int, draw: random.Random) -> ClozeItem | None:
    passage = passages.ordered[number]
    words = passage.words()
    positions = list[int]()
    for position in range(_WORDS // 2, _WORDS):
        if _is_plain(words[position]):
            positions.append(position)
    draw.shuffle(positions)
    for position in positions:
        rank = passages.ranks[words[position]]
        near = passages.vocabulary[max(0, rank - _NEIGHBOURS) : rank + _NEIGHBOURS + 1]
        others = _rarer_and_more_frequent(passages, words[position], near, draw)
        if others:
            return _item(passage, position, words[position], others, draw)
    return None


def _repeated_word(passages: Passages, number: int, draw: random.Random) -> ClozeItem | None:
    passage = passages.ordered[number]
    words = passage.words()
    positions = []
    for position in range(_WORDS // 2, _WORDS):
        if _is_plain(words[position]) and len(words[position]) > 3 and words[position] in words[:position]:
            positions.append(position)
    draw.shuffle(positions)
    for position in positions:
        earlier = dict.fromkeys(words[:position])
        of_passage = [word for word in earlier if _is_plain(word) and len(word) > 3]
        others = _rarer_and_more_frequent(passages, words[position], of_passage, draw)
        if others:
            return _item(passage, position, words[position], others, draw)
    return None


def _rarer_and_more_frequent(
    passages: Passages, word: str, others: Sequence[str], draw: random.Random
) -> list[str] | None:
    """Return wrong answers, of which none, one, two or all are more frequent than a word, each as often.

    So a model that knows no more than how frequent words are, or prefers short ones, which mostly are, is at chance.
    None where this cannot be: too few of `others` are more frequent, or less.
    """
    wrong = _CHOICES - 1
    rank = passages.ranks[word]
    rarer = list[str]()
    more_frequent = list[str]()
    for other in others:
        if passages.ranks[other] < rank:
            rarer.append(other)
        elif passages.ranks[other] > rank:
            more_frequent.append(other)
    if min(len(rarer), len(more_frequent)) < wrong:
        return None
    above = draw.randrange(_CHOICES)
    return draw.sample(more_frequent, above) + draw.sample(rarer, wrong - above)


def _ending(passages: Passages, number: int, draw: random.Random) -> ClozeItem | None:
    passage = passages.ordered[number]
    position = _WORDS - _ENDING
    endings = list[str]()  # of other documents
    of_source = list[str]()
    for other in passages.ordered:
        if other.document != passage.document:
            ending = other.after(position)
            endings.append(ending)
            if other.source == passage.source:
                of_source.append(ending)
    if len(of_source) >= _CHOICES:
        endings = of_source
    return _item(passage, position, passage.after(position), endings, draw)


def _word_order(passages: Passages, number: int, draw: random.Random) -> ClozeItem | None:
    passage = passages.ordered[number]
    position = _WORDS - _ENDING
    words = passage.words()[position:]
    others = dict[str, None]()
    for _ in range(3 * _CHOICES):
        shuffled = words.copy()
        draw.shuffle(shuffled)
        others[" ".join(shuffled)] = None
    return _item(passage, position, " ".join(words), list(others), draw)


def _item(passage: Passage, position: int, right: str, others: Sequence[str], draw: random.Random) -> ClozeItem | None:
    """Return an item with the right answer among others that are drawn; None where there are too few others."""
    wrong = [other for other in dict.fromkeys(others) if other != right]
    if len(wrong) < _CHOICES - 1:
        return None
    choices = draw.sample(wrong, _CHOICES - 1)
    answer = draw.randrange(_CHOICES)
    choices.insert(answer, right)
    return ClozeItem(passage.before(position), choices, answer, passage.document, passage.source)


def _is_plain(word: str) -> bool:
    return len(word) > 2 and word.isalpha() and word.islower()


def _number(text: str) -> int:
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:_NUMBER_BYTES], "big")


TASKS: dict[str, tuple[MakeItem, str]] = {
    "holdout_word": (_next_word, "Which word comes next: the others are about as frequent."),
    "holdout_repeat": (_repeated_word, "Which word of the passage is repeated."),
    "holdout_ending": (_ending, "Which ending is this passage's: the others are other passages'."),
    "holdout_order": (_word_order, "In which order the last words are."),
}
