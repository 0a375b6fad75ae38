"""ChatTemplate: the text of a chat by a model's own template, and which parts of it the assistant says.

A template is Jinja, of chat_template.jinja or tokenizer_config.json, as transformers renders it: in a sandbox, with
`messages`, `tools`, `add_generation_prompt` and the names of special tokens. Where a template marks what the assistant
says by {% generation %}, that is it. Else a message of the assistant is what the text of all messages up to it has more
than the text before it, which ends with the prompt for a generation; both must be the beginning of the whole text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gristmill.errors import UsageError
from gristmill.io.tokenizer_companions import CHAT_TEMPLATE, CONFIG, companions_of, read_config
from gristmill.io.tokenizer_file import open_tokenizer
from gristmill.storage.files import is_file, read_file
from preprocessing.tokenizer.chat_encoding import special_tokens

ASSISTANT = "assistant"
_TAG = "endgeneration"
_BEGIN = "\ue0f0"  # around what is generated, while a template is rendered
_END = "\ue0f1"
_ANSWER = "\ue0f2"  # stand for messages of which no template knows anything
_QUESTION = "\ue0f3"
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class ChatText(NamedTuple):
    """The text of a chat; `spans` are the characters of it that the assistant says, in order.

    `rewritten` counts messages of the assistant that the template writes otherwise once others follow: they are in no
    span.
    """

    text: str
    spans: list[tuple[int, int]]
    rewritten: int = 0


class ChatError(Exception):
    """A chat that has no text by a template, or in which the assistant says nothing; why."""


@dataclass(frozen=True)
class TemplateSource:
    """The text of a template, the special tokens that it may name, and its name for errors."""

    text: str
    tokens: tuple[tuple[str, str], ...]
    name: str

    @classmethod
    def find(cls, tokenizer: Path, given: Path | None = None) -> "TemplateSource":
        """Return the template of a tokenizer, or the `given` file. Raises UsageError where there is none."""
        companions = companions_of(tokenizer)
        config = read_config(companions)
        tokens = tuple(_special_tokens(tokenizer, config).items())
        file = given or next((path for path in companions if path.name == CHAT_TEMPLATE), None)
        if file is not None:
            if not is_file(file):
                raise UsageError(f"{file}: there is no such file; expected a chat template")
            return cls(read_file(file).decode(errors="replace"), tokens, file.name)
        stored = config.get("chat_template")
        if isinstance(stored, list):  # several, by name
            stored = _default_of(stored)
        if not isinstance(stored, str):
            raise UsageError(
                f"{tokenizer.parent} has no chat template; expected {CHAT_TEMPLATE}, or chat_template in "
                "tokenizer_config.json; give one by --template FILE"
            )
        return cls(stored, tokens, CONFIG)


class ChatTemplate:
    """A model's template."""

    def __init__(self, source: str, tokens: Mapping[str, str], name: str) -> None:
        """`tokens` are special tokens by name, such as bos_token; `name` is for errors.

        Raises UsageError where the source is no template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UsageError(
                f"{name} has a chat template that is no Jinja ({error}); give another by --template FILE"
            ) from error
        self._tokens = dict(tokens)
        self._marks = _TAG in source

    @classmethod
    def of(cls, source: "TemplateSource") -> "ChatTemplate":
        """Return the template of a source. Raises UsageError where it is no Jinja."""
        return cls(source.text, dict(source.tokens), source.name)

    @classmethod
    def load(cls, tokenizer: Path, given: Path | None = None) -> "ChatTemplate":
        """Return the template of a tokenizer, or the `given` file. Raises UsageError where there is none."""
        return cls.of(TemplateSource.find(tokenizer, given))

    def render(self, messages: Sequence[Mapping[str, Any]], prompt: bool = False, tools: Any = None) -> str:
        """Return the text of messages; with `prompt` it ends where the assistant begins. Raises ChatError."""
        return self._render(messages, prompt, tools).replace(_BEGIN, "").replace(_END, "")

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of messages up to what the assistant says next, as in training. Raises ChatError."""
        if not self._marks:
            return self._render(messages, True, None)
        answered = self._render([*messages, {"role": ASSISTANT, "content": "…"}], False, None)
        return _marked(answered.rpartition(_BEGIN)[0]).text

    def between_turns(self) -> str:
        """Return what comes between an answer of the assistant and the next message of the user. Raises ChatError."""
        first = {"role": "user", "content": "Who?"}
        answer = {"role": ASSISTANT, "content": _ANSWER}
        second = {"role": "user", "content": _QUESTION}
        text = self.render([first, answer, second])
        return text.partition(_ANSWER)[2].partition(_QUESTION)[0]

    def _render(self, messages: Sequence[Mapping[str, Any]], prompt: bool, tools: Any) -> str:
        try:
            text: str = self._template.render(
                messages=messages, tools=tools, add_generation_prompt=prompt, **self._tokens
            )
        except TemplateError as error:
            raise ChatError(f"the template refuses it: {error}") from error
        except Exception as error:  # of an expression in the template
            raise ChatError(f"the template cannot be filled in: {type(error).__name__}: {error}") from error
        return text

    def apply(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> ChatText:
        """Return the text of a chat, with what the assistant says. Raises ChatError."""
        of_assistant = [message for message in messages if message.get("role") == ASSISTANT]
        if not of_assistant:
            raise ChatError("the assistant has no message")
        whole_chat = "".join(map(str, messages))
        if _BEGIN in whole_chat or _END in whole_chat:
            raise ChatError("it has characters of private use (U+E0F0, U+E0F1)")
        if not all(map(_says_something, of_assistant)):
            raise ChatError("a message of the assistant is empty")
        whole = self._render(messages, False, tools)
        self._reject_python(messages, tools, whole)
        if self._marks:
            chat = _marked(whole)
        else:
            chat = self._by_prefixes(whole, messages, tools)
        if not chat.spans:
            raise ChatError("the template leaves no message of the assistant whole")
        return chat

    def _reject_python(self, messages: Sequence[Mapping[str, Any]], tools: Any, whole: str) -> None:
        """Raise ChatError if the template writes content that is no text as Python does: None, or [{'type': …}]."""
        for number, message in enumerate(messages):
            content = message.get("content", "")
            if isinstance(content, str):
                continue
            written = str(content)
            without_content = [*messages[:number], {**message, "content": ""}, *messages[number + 1 :]]
            if whole.count(written) > self._render(without_content, False, tools).count(written):
                kind = type(content).__name__
                if content is None:
                    kind = "null"
                raise ChatError(f"the content of a message is no text but {kind}, for which the template has no words")

    def _by_prefixes(self, whole: str, messages: Sequence[Mapping[str, Any]], tools: Any) -> ChatText:
        spans = []
        rewritten = 0
        for number, message in enumerate(messages):
            if message.get("role") != ASSISTANT:
                continue
            before = self._render(messages[:number], True, tools)
            until = whole
            if number < len(messages) - 1:
                until = self._render(messages[: number + 1], False, tools)
            if whole.startswith(before) and whole.startswith(until) and len(before) < len(until):
                spans.append((len(before), len(until)))
            else:
                rewritten += 1
        return ChatText(whole, spans, rewritten)


def _says_something(message: Mapping[str, Any]) -> bool:
    """Return whether a message has text, calls of tools, or anything else besides its role."""
    for key, value in message.items():
        if isinstance(value, str):
            value = value.strip()
        if value and key not in ("role", "name"):
            return True
    return False


class _Generation(Extension):
    """The tag {% generation %} … {% endgeneration %}: puts marks around what is in it."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    @staticmethod
    def _mark(caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _marked(text: str) -> ChatText:
    """Return a text without marks, and where they were."""
    spans = []
    plain, *parts = text.split(_BEGIN)
    for part in parts:
        said, _, rest = part.partition(_END)
        if said:
            spans.append((len(plain), len(plain) + len(said)))
        plain += said + rest
    return ChatText(plain, spans)


def _default_of(templates: Sequence[Any]) -> Any:
    """Return the template named default of several with names; None without one."""
    template: Any = None
    for item in templates:
        if isinstance(item, dict) and item.get("name") == "default":
            template = item.get("template")
    return template


def _special_tokens(tokenizer: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a tokenizer that a template may name: of its config, or else its own."""
    named = dict[str, str]()
    for name in _TOKENS:
        content = _content(config.get(name))
        if content is not None:
            named[name] = content
    return named or special_tokens(open_tokenizer(tokenizer))


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        return None
    return token
