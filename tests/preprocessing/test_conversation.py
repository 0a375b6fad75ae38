"""A conversation: the tokens up to each answer are those that training saw, and what ends an answer is known."""

from pathlib import Path

import pytest

from gristmill.engine.options import RunOptions
from gristmill.errors import UsageError
from gristmill.io.tokenizer_file import SentencePieceTokenizer, open_tokenizer
from preprocessing.tokenize_chats import tokenize_chats
from preprocessing.tokenizer.chat_template import ChatTemplate
from preprocessing.tokenizer.conversation import Conversation
from tests.preprocessing.chats import CHATML, MARKING, PLAIN, STRICT, make_chats, make_tokenizer, write_chats
from tests.preprocessing.test_tokenize_chats import read_chats
from tests.training.hugging_face.test_tokenizer_json import train

ONE = RunOptions(workers=1, quiet=True)
TEMPLATES = {"ChatML": CHATML, "strict": STRICT, **MARKING}
WITHOUT_A_NAME = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("kind", ["tokenizer.json", "SentencePiece"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_begin_where_training_marks_them(tmp_path: Path, name: str, kind: str) -> None:
    if kind == "tokenizer.json":
        model = make_tokenizer(tmp_path / "model") / "tokenizer.json"
    else:
        model = tmp_path / "tokenizer.model"
        model.write_bytes(train().serialized_model_proto())
    (tmp_path / "chat.jinja").write_text(TEMPLATES[name])
    chats = make_chats(5)
    template = tmp_path / "chat.jinja"
    tokenize_chats(write_chats(tmp_path / "chats.jsonl", chats), tmp_path / "out", model, ONE, template=template)
    loaded = ChatTemplate.load(tmp_path / "out" / model.name)  # the template is with the shards
    tokenizer = open_tokenizer(tmp_path / "out" / model.name)
    for chat, (ids, mask) in zip(chats, read_chats(tmp_path / "out"), strict=True):
        conversation = Conversation(loaded, tokenizer)
        begins = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
        questions = chat["messages"][::2]
        answers = chat["messages"][1::2]
        assert len(begins) == len(questions)
        for begin, question, answer in zip(begins, questions, answers, strict=True):
            stops = [begin]
            if tokenizer.decode(ids[begin - 1 : begin]) == " ":  # no token of this answer's first word has its space
                stops.append(begin - 1)
            assert conversation.ask(question["content"]) in [ids[:stop] for stop in stops]
            conversation.answer(answer["content"])


@pytest.mark.parametrize(
    ("template", "ends", "stops"),
    [
        (CHATML, ["<|im_end|>"], ()),
        (STRICT, ["<|im_end|>"], ()),  # its eos_token
        (MARKING["unended"], [], ("\nuser:",)),
        (MARKING["within a line"].replace("{{ eos_token }}", ""), [], ("] user:",)),
        (WITHOUT_A_NAME, [], ()),
    ],
)
def test_what_ends_an_answer_is_read_from_the_template(
    tmp_path: Path, template: str, ends: list[str], stops: tuple[str, ...]
) -> None:
    tokenizer = open_tokenizer(make_tokenizer(tmp_path) / "tokenizer.json")
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    conversation = Conversation(ChatTemplate(template, tokens, "a template"), tokenizer)
    assert conversation.ends == {tokenizer.id_of(token) for token in ends}
    assert conversation.stops == stops


def test_a_control_token_of_sentencepiece_ends_an_answer() -> None:
    tokenizer = SentencePieceTokenizer(train().serialized_model_proto())
    conversation = Conversation(ChatTemplate(PLAIN, {"eos_token": "</s>"}, "plain"), tokenizer)
    assert conversation.ends == {tokenizer.id_of("</s>")} and not conversation.stops


def test_a_template_that_refuses_a_conversation_is_named() -> None:
    tokenizer = SentencePieceTokenizer(train().serialized_model_proto())
    one = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
    with pytest.raises(UsageError, match=r"the chat template cannot lead a conversation: .*one message only"):
        Conversation(ChatTemplate(one, {}, "one"), tokenizer)
