"""Command: text from a trained model, also with `torchrun --nproc_per_node=2 -m gristmill_cli.generate …`.

Nothing here imports torch, which takes seconds, before the options are known to be right.
"""

import json
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

if __name__ == "__main__":  # with -m the current folder comes first, where `training` may be a folder of the user
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tyro.conf import Positional

from gristmill.config import INT64, Range, check_ranges
from gristmill.errors import InputError, require, wrap_read_errors
from gristmill.wording import count_of
from training.distributed.command_line import exit_on_user_error, read_options

if TYPE_CHECKING:
    from preprocessing.tokenizer.conversation import Conversation
    from training.generation.text import Text
    from training.language_model import LanguageModel


_SECONDS_TO_WAIT = 86_400.0  # of a rank for another; one that has died is noticed at once


@dataclass(frozen=True)
class Ranks:
    """How the model is divided over the processes that torchrun starts; the other processes write other texts."""

    RANGES: ClassVar[dict[str, Range]] = dict.fromkeys(("tp", "pp", "ep"), Range(1, 2**31 - 1))

    tp: int = 1
    """Tensor-parallel processes: every matrix is divided over them."""
    pp: int = 1
    """Pipeline-parallel processes: each has some of the layers."""
    ep: int = 1
    """Expert-parallel processes: they have different experts, and send each other tokens."""


@dataclass(frozen=True)
class GenerateConfig:
    """Write text with a trained model. Prompts are given on the command line, in a file, through a pipe, or typed:

    gristmill generate OUT/model "The mill" "Bread is"

    gristmill generate OUT/model --prompts prompts.txt --temperature 0 --json true > texts.jsonl

    head -n 5 prompts.txt | gristmill generate hf_folder --tokens 20

    gristmill generate OUT/model

    gristmill generate OUT/tuned --chat true
    """

    RANGES: ClassVar[dict[str, Range]] = {
        "tokens": Range(1, 1_000_000),
        "temperature": Range(0),
        "top_k": Range(0, INT64),
        "top_p": Range(0, 1, above=True),
        "repetition_penalty": Range(0, above=True),
        "seed": Range(0, INT64),
        "batch_size": Range(1, 1_000_000),
    }

    model: Positional[Path]
    """A checkpoint (OUT/checkpoints/step-…), the latest of a folder of them or of a run's --out_dir, or the folder of a
    Hugging Face model."""
    text: Positional[tuple[str, ...]] = ()
    """Prompts: texts to continue."""
    prompts: Path | None = None
    """File of prompts, one a line; in a .jsonl file the field `prompt` of each record, which may have line breaks."""
    tokens: int = 100
    """Tokens that follow a prompt, at most; a text also ends with its document, and where the model's context does."""
    temperature: float = 0.8
    """0: always the most probable token; 1: as the model's probabilities are; in between: probable ones more often."""
    top_k: int = 0
    """Draw from the k most probable tokens only; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest tokens whose probabilities add up to p; 1: from all."""
    repetition_penalty: float = 1.0
    """Above 1: make tokens that the text has already less probable, such as 1.2; 1: leave them."""
    stop: tuple[str, ...] = ()
    r"""Texts that end a text, and are left out of it, such as $'\n'."""
    chat: bool = False
    """Talk to a model that was tuned on chats: each prompt is a message of one conversation, and the model answers."""
    template: Path | None = None
    """Jinja file with another chat template than the model's, for --chat."""
    seed: int = 0
    """Another seed draws other texts; the same seed draws the same text for a prompt, whatever the other prompts."""
    batch_size: int = 8
    """Prompts that are continued together; at a terminal one."""
    json: bool = False
    """Print a JSON line for each prompt: prompt, text, tokens, and why it ended (document, stop, length)."""
    ema: bool = False
    """Use the average of the weights, of a run with optim.ema_decay, instead of the weights."""
    tokenizer: Path | None = None
    """The model's tokenizer; by default that of the run's folder, or of the Hugging Face model's."""
    code: tuple[Path, ...] = ()
    """Files of yours with the parts of the model that are yours: their code runs, as in training. They have the names
    that they had there."""
    parallel: Ranks = field(default_factory=Ranks)
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Of the weights, and of what is computed; bf16 takes half the memory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU per process if there are any, else the CPU."""

    def check(self) -> None:
        """Raise UsageError for a value out of range, prompts given twice, or a stop that is no text."""
        check_ranges(self)
        check_ranges(self.parallel, "parallel.")
        require(
            not self.text or self.prompts is None,
            f"prompts are given on the command line and in {self.prompts}; give the one or the other",
        )
        require(
            self.chat or self.template is None,
            f"--template {self.template} is for a conversation; give --chat true, too, or leave it out",
        )
        require(all(self.stop), "stop is empty, which would end every text at once; leave --stop out")
        require(
            not any(map(_has_other_bytes, (*self.text, *self.stop))), "a prompt or stop is not UTF-8; expected text"
        )


def _has_other_bytes(text: str) -> bool:
    """Return whether a word of the command line has bytes that are not UTF-8: Python has them as surrogates."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and write text. On a user error every process exits with its code."""
    with exit_on_user_error():
        config = read_options(GenerateConfig, argv, prog="gristmill generate")
        config.check()
        try:
            _generate(config)
        except KeyboardInterrupt:
            print(file=sys.stderr)
            sys.exit(128 + signal.SIGINT)


def _generate(config: GenerateConfig) -> None:
    from training.distributed.process_group import init_distributed, main_only
    from training.experimental.parallel_config import ParallelConfig
    from training.language_model import open_language_model
    from training.own_code import allow_files

    is_dialogue = not config.text and config.prompts is None and sys.stdin.isatty()
    prompts = _prompts(config, is_dialogue)
    size = config.batch_size
    if is_dialogue or config.chat:
        size = 1
    # ranks wait for the one that reads prompts, which may be typed
    with init_distributed(config.device, _SECONDS_TO_WAIT) as device:
        # prompts that cannot be read are refused before a model is
        first = list[str]()
        if not is_dialogue:
            first = main_only(lambda: list(islice(prompts, size)))
        allow_files(config.code)
        ranks = config.parallel
        layout = ParallelConfig(tp=ranks.tp, pp=ranks.pp, ep=ranks.ep)
        model = open_language_model(config.model, device, layout, config.precision, config.ema, config.tokenizer)
        conversation = _begin_conversation(config, model) if config.chat else None
        writer = _TextPrinter(config, model, conversation, is_dialogue)
        while batch := first or main_only(lambda: list(islice(prompts, size))):
            writer.write(batch)
            first = []
        writer.summarize()


def _begin_conversation(config: GenerateConfig, model: "LanguageModel") -> "Conversation":
    """Raises UsageError for a model without a chat template."""
    from preprocessing.tokenizer.chat_template import ChatTemplate
    from preprocessing.tokenizer.conversation import Conversation

    return Conversation(ChatTemplate.load(model.tokenizer_file, config.template), model.tokenizer)


def _prompts(config: GenerateConfig, is_dialogue: bool) -> Iterator[str]:
    """Yield the prompts, as they come; of standard input no more is read than is asked for."""
    if config.text:
        yield from config.text
    elif config.prompts is not None:
        yield from _prompts_of_file(config.prompts)
    elif is_dialogue:
        what = "a message" if config.chat else "the beginning of a text"
        yield from _lines("standard input", _asked_lines(what))
    else:
        yield from _lines("standard input", sys.stdin.buffer)


def _asked_lines(what: str) -> Iterator[bytes]:
    """Yield the lines that are typed at a terminal, up to Ctrl-D."""
    print(f"Type {what}, or Ctrl-D to end.", file=sys.stderr)
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
        if not line:
            print(file=sys.stderr)
            return
        yield line


def _lines(name: str, lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines that are not blank. Raises UsageError where there are none."""
    is_empty = True
    number = 0
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InputError(f"{name}:{number} is not UTF-8 ({error}); convert it first") from error
        if text.strip():
            is_empty = False
            yield text
    what = "has blank lines alone" if number else "is empty"
    require(
        not is_empty,
        f'{name} {what}; expected prompts, one per line, or give them on the command line, where "" lets the model '
        "begin",
    )


def _prompts_of_file(path: Path) -> Iterator[str]:
    require(path.is_file(), f"{path}: there is no such file; expected prompts, one per line, or records with a prompt")
    with wrap_read_errors(path), path.open("rb") as file:
        for number, line in enumerate(_lines(str(path), file), 1):
            if path.suffix == ".jsonl":
                line = _prompt_of_record(path, number, line)
            yield line


def _prompt_of_record(path: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"{path}:{number}: expected a JSON record with a prompt ({error})") from error
    prompt = None
    if isinstance(record, dict):
        prompt = record.get("prompt")
    if not isinstance(prompt, str):
        raise InputError(f'{path}:{number}: expected a record such as {{"prompt": "The mill"}}, got {line:.60}')
    return prompt


class _TextPrinter:
    """Writes texts as they come: the first unfinished one token by token, later ones after it has ended."""

    def __init__(
        self, config: GenerateConfig, model: "LanguageModel", conversation: "Conversation | None", is_typed: bool
    ) -> None:
        """With a `conversation` each text is an answer; `is_typed`: the prompts are on the screen already."""
        from training.generation.loop import TextGenerator
        from training.generation.sampling import SamplingOptions

        self.config = config
        self.model = model
        options = SamplingOptions(config.temperature, config.top_k, config.top_p, config.repetition_penalty)
        self.conversation = conversation
        self.shows_messages = not is_typed
        ends = model.ends
        self.stops = config.stop
        if conversation is not None:
            ends |= conversation.ends
            self.stops += conversation.stops
        self.generator = TextGenerator(model.cache, options, ends, model.hidden, model.agree)
        self.texts = 0
        self.read = 0  # tokens of prompts
        self.written = 0
        self.seconds_to_read = 0.0
        self.seconds_to_write = 0.0

    def write(self, prompts: Sequence[str]) -> None:
        """Continue a batch of prompts; every rank calls it, and rank 0 writes."""
        from training.generation.sampling import text_generator

        texts = [self._begin(prompt) for prompt in prompts]
        generators = [text_generator(self.config.seed, self.texts + i) for i in range(len(texts))]
        printer = self._printer(prompts, texts) if self.model.world.is_main else None
        started = time.perf_counter()
        first = 0.0
        for count in self.generator.extend(texts, generators):
            first = first or time.perf_counter()
            self.written += count
            if printer is not None:
                printer.update()
        self.seconds_to_read += first - started
        self.seconds_to_write += time.perf_counter() - first
        self.read += sum(len(text.prompt) for text in texts)
        self.texts += len(texts)
        if self.conversation is not None:
            self.conversation.answer(texts[0].text.strip())

    def _printer(self, prompts: Sequence[str], texts: Sequence["Text"]) -> "_Printer":
        if self.conversation is None:
            return _Printer(self.config.json, prompts, texts, prompts)
        headings = [""] * len(prompts)
        if self.shows_messages:
            headings = [f"> {prompt}\n" for prompt in prompts]
        return _Printer(self.config.json, prompts, texts, headings, trims=True)

    def _begin(self, prompt: str) -> "Text":
        from training.generation.text import Text

        if self.conversation is None:
            ids = self.model.begins(prompt)
        else:
            ids = self.conversation.ask(prompt)
        context = self.model.config.context
        shown = repr(prompt)
        if len(prompt) >= 40:
            shown = repr(f"{prompt[:40]}…")
        require(
            bool(ids),
            "nothing begins a text, as documents have neither a begin nor an end token; expected a prompt, such as "
            f"gristmill generate {self.config.model} 'The mill'",
        )
        require(
            self.conversation is None or len(ids) < context,
            f"the conversation has {count_of(len(ids), 'token')} up to {shown}, and the model's context is {context}; "
            f"expected {context - 1} or fewer: begin another conversation",
        )
        require(
            len(ids) < context,
            f"the prompt {shown} has {count_of(len(ids), 'token')}, and the model's context is {context}; expected "
            f"{context - 1} or fewer: shorten it",
        )
        return Text(ids, min(self.config.tokens, context - len(ids)), self.model.tokenizer, self.stops)

    def summarize(self) -> None:
        """Say how fast it was, on standard error."""
        if self.model.world.is_main and self.texts:
            later = max(0, self.written - self.texts)  # the first token of each comes with reading its prompt
            rate = _rate(later, self.seconds_to_write)
            read = _rate(self.read, self.seconds_to_read)
            print(
                f"{count_of(self.texts, 'prompt')}: {count_of(self.read, 'token')} read ({read:,.0f} tokens/s), "
                f"{count_of(self.written, 'token')} written ({rate:,.1f} tokens/s)",
                file=sys.stderr,
            )


def _rate(count: int, seconds: float) -> float:
    """Return a count by second; 0 where no time went by."""
    if not seconds:
        return 0.0
    return count / seconds


class _Printer:
    """Prints the texts of a batch in their order, each after its heading; `trims` spaces around a text."""

    def __init__(
        self,
        as_json: bool,
        prompts: Sequence[str],
        texts: Sequence["Text"],
        headings: Sequence[str],
        trims: bool = False,
    ) -> None:
        self.as_json = as_json
        self.waiting = list(zip(prompts, texts, headings, strict=True))
        self.trims = trims
        self.printed = -1  # characters of the first one; -1: not its heading

    def update(self) -> None:
        """Print what has come."""
        while self.waiting:
            prompt, text, heading = self.waiting[0]
            shown = text.text.strip() if self.trims else text.text
            if not self.as_json:
                self._print_new(heading, shown)
            if not text.end:
                break
            if self.as_json:
                print(json.dumps({"prompt": prompt, "text": shown, "tokens": text.tokens, "end": text.end}))
            else:
                print("\n")
            self.waiting.pop(0)
            self.printed = -1
        sys.stdout.flush()  # also within a line

    def _print_new(self, heading: str, text: str) -> None:
        if self.printed < 0:
            print(heading, end="")
            self.printed = 0
        print(text[self.printed :], end="")
        self.printed = len(text)


if __name__ == "__main__":
    main()
