"""Conversation: messages of a user and a model's answers, as tokens by the template that the model was tuned with."""

from gristmill.errors import UsageError
from gristmill.io.tokenizer_file import AnyTokenizer
from preprocessing.tokenizer.chat_encoding import encode_chat
from preprocessing.tokenizer.chat_template import ASSISTANT, ChatError, ChatTemplate

_NO_END = -1
_FIRST_WORDS = ("The", "the", "I")  # of answers


class Conversation:
    """The messages so far; `ends` are tokens that end an answer, `stops` texts that do."""

    def __init__(self, template: ChatTemplate, tokenizer: AnyTokenizer) -> None:
        """Raise UsageError for a template that cannot write a question, an answer and another question."""
        self._template = template
        self._tokenizer = tokenizer
        self._messages: list[dict[str, str]] = []
        self.ends = frozenset[int]()
        self.stops: tuple[str, ...] = ()
        try:
            between = template.between_turns()
        except ChatError as error:
            raise UsageError(f"the chat template cannot lead a conversation: {error}") from error
        token = self._first_token(between)
        if token is not None and not tokenizer.decode([token]):  # of a control token
            self.ends = frozenset([token])
        elif between.strip():
            self.stops = (between.rstrip(),)

    def ask(self, question: str) -> list[int]:
        """Add a message of the user; return the tokens of all messages, up to the answer. Raises UsageError."""
        self._messages.append({"role": "user", "content": question})
        try:
            text = self._template.prompt(self._messages)
        except ChatError as error:
            raise UsageError(f"the message {question!r:.60}: {error}") from error
        return self._tokens_before_answer(text)

    def answer(self, text: str) -> None:
        """Add the model's answer."""
        self._messages.append({"role": ASSISTANT, "content": text})

    def _tokens_before_answer(self, text: str) -> list[int]:
        """Encode the text up to an answer, without spaces that are in the first token of an answer."""
        prompts = []
        for word in _FIRST_WORDS:
            span = (len(text), len(text) + len(word))
            ids, is_target = encode_chat(self._tokenizer, text + word, [span], _NO_END)
            prompts.append(ids[: is_target.index(True)])
        return min(prompts, key=len)

    def _first_token(self, text: str) -> int | None:
        """Return the first token of a text that is more than spaces."""
        ids, _ = encode_chat(self._tokenizer, text, [], _NO_END)
        for token in ids:
            decoded = self._tokenizer.decode([token])
            if not decoded or decoded.strip():
                return token
        return None
