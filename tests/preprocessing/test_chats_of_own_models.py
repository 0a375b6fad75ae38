"""Chats for a model with SentencePiece's tokenizer, as gristmill run trains it, and masks of words after a space."""

import io
import json
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Tokenizer

from gristmill.engine.options import RunOptions
from gristmill.io.tokenizer_file import SentencePieceTokenizer, open_tokenizer
from gristmill_cli.generate import main as generate
from preprocessing.tokenize_chats import tokenize_chats
from preprocessing.tokenizer.chat_encoding import encode_chat
from preprocessing.tokenizer.chat_template import ChatTemplate
from preprocessing.tokenizer.conversation import Conversation
from tests.gristmill_cli.documentation import commands, shell
from tests.preprocessing.chats import MARKING, make_chats, write_chats
from tests.preprocessing.test_tokenize_chats import read_chats
from tests.tokenizers_of_models import content_of
from tests.training.conftest import write_shards
from tests.training.hugging_face.test_tokenizer_json import load as load_exported
from tests.training.hugging_face.test_tokenizer_json import train
from training.hugging_face.export_hf import export_hf

ONE = RunOptions(workers=1, quiet=True)
END = "<|im_end|>"


def byte_level(trims: bool) -> Tokenizer:
    tokenizer = Tokenizer.from_str(content_of("Qwen"))
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trims)
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    texts = [message["content"] + " user: assistant:\n[]Say" for chat in make_chats(50) for message in chat["messages"]]
    tokenizer.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=300))
    return tokenizer


KINDS = {"metaspace": metaspace, "byte-level": lambda: byte_level(False), "trimmed": lambda: byte_level(True)}


@pytest.mark.parametrize(
    ("kind", "template"),
    [case for case in product(KINDS, MARKING) if case != ("trimmed", "with its space")],  # transformers marks nothing
)
def test_masks_are_those_of_transformers(tmp_path: Path, kind: str, template: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", END)])
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokenizer.json").write_text(tokenizer.to_str())
    config = {
        "eos_token": END,
        "bos_token": END,
        "chat_template": MARKING[template],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    chats = make_chats(15)
    tokenize_chats(write_chats(tmp_path / "chats.jsonl", chats), tmp_path / "out", tmp_path / "model", ONE)
    for chat, (ids, mask) in zip(chats, read_chats(tmp_path / "out"), strict=True):
        options: dict[str, Any] = {"return_dict": True, "return_assistant_tokens_mask": True}
        expected = theirs.apply_chat_template(chat["messages"], **options)
        count = len(expected["input_ids"])
        assert ids[:count] == expected["input_ids"] and 0 <= len(ids) - count <= 1
        assert mask[:count] == [bool(value) for value in expected["assistant_masks"]] and not any(mask[count:])


def test_all_bytes_of_a_last_character_are_targets() -> None:
    """The one place where transformers marks less: the first byte of a character that a mark ends with."""
    model = SentencePieceTokenizer(train().serialized_model_proto())
    text = "assistant: \U0001f642\U0001f642 user"
    ids, mask = encode_chat(model, text, [(11, 13)], -1)
    targets = [token for token, is_target in zip(ids, mask, strict=True) if is_target]
    assert model.decode(targets).strip() == "\U0001f642\U0001f642" and len(targets) >= 8


def test_ids_of_a_sentencepiece_model_are_those_of_its_export(tmp_path: Path) -> None:
    """Its control tokens are found in a chat's text, and every other id is SentencePiece's own."""
    processor = train()
    (tmp_path / "tokenizer.model").write_bytes(processor.serialized_model_proto())
    (tmp_path / "chat.jinja").write_text(MARKING["with its space"])
    chats = make_chats(20)
    path = write_chats(tmp_path / "chats.jsonl", chats)
    tokenize_chats(path, tmp_path / "out", tmp_path, ONE, template=tmp_path / "chat.jinja")
    (tmp_path / "exported").mkdir()
    exported = load_exported(processor, tmp_path / "exported")
    exported.split_special_tokens = False
    template = ChatTemplate(MARKING["with its space"], {"eos_token": "</s>"}, "plain")
    end = processor.eos_id()
    for chat, (ids, mask) in zip(chats, read_chats(tmp_path / "out"), strict=True):
        text = template.render(chat["messages"])
        assert ids == exported(text, add_special_tokens=False)["input_ids"]
        turns = [message["content"] for message in chat["messages"] if message["role"] == "assistant"]
        assert ids.count(end) == len(turns) and ids[-1] == end
        targets = [token for token, is_target in zip(ids, mask, strict=True) if is_target]
        assert processor.decode(targets).split() == " ".join(turns).split()
        assert all(is_target for token, is_target in zip(ids, mask, strict=True) if token == end)


def test_a_model_of_ones_own_learns_to_chat(tmp_path: Path) -> None:
    """The page's commands, from a run with SentencePiece's tokenizer to a model that answers."""
    _, block = commands("guides/chats.md")
    processor = train()
    (tmp_path / "tokenizer.model").write_bytes(processor.serialized_model_proto())
    documents = [[processor.encode(message["content"]) for chat in make_chats(60) for message in chat["messages"]]]
    write_shards(tmp_path / "tokens", documents, tmp_path / "tokenizer.model", processor.vocab_size())
    trained = (
        'gristmill train --data.train "$OUT/tokens" --data.holdout "$OUT/tokens" --out_dir "$RUN" --model.layers 1 '
        "--model.width 32 --model.heads 2 --data.seq_len 32 --data.batch_size 4 --optim.steps 2 --device cpu\n"
    )
    chats = write_chats(tmp_path / "chats.jsonl", make_chats(80))
    done = shell(trained + block, CHATS=str(chats), OUT=str(tmp_path), RUN=str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "80 read = 80 written" in done.stderr and "step 10/10" in done.stdout
    assert "assistant:⟦ " in done.stdout and "</s>⟧" in done.stdout
    assert "\n> What grinds?\n" in done.stdout and "1 prompt: " in done.stderr
    tuned = tmp_path / "tuned"
    assert (tuned / "chat_template.jinja").read_bytes() == (tmp_path / "chat.jinja").read_bytes()
    talk_as_transformers_does(tuned, tmp_path / "hf")


def talk_as_transformers_does(tuned: Path, exported: Path) -> None:
    """Talk to a tuned model and to its export: transformers reads the same tokens, by the template in the folder."""
    transformers = pytest.importorskip("transformers")
    export_hf(tuned, exported)
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    questions = ["What grinds?", "And what turns its wheel?"]
    answers = answers_of(tuned, *questions)
    assert [record["prompt"] for record in answers] == questions
    assert answers_of(exported, questions[0])[0]["tokens"] == answers[0]["tokens"]
    template = ChatTemplate.load(exported / "tokenizer.json")
    conversation = Conversation(template, open_tokenizer(tuned / "tokenizer.model"))
    messages = list[dict[str, str]]()
    for question in questions:
        messages.append({"role": "user", "content": question})
        asked = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert conversation.ask(question) == asked
        messages.append({"role": "assistant", "content": "The mill."})
        conversation.answer("The mill.")


def answers_of(model: Path, *questions: str) -> list[dict[str, Any]]:
    words = ["--chat", "true", "--json", "true", "--temperature", "0", "--tokens", "12", "--device", "cpu"]
    with redirect_stdout(io.StringIO()) as out:
        generate([str(model), *questions, *words])
    return [json.loads(line) for line in out.getvalue().splitlines()]
