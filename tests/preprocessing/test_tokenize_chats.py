"""tokenize-chats: texts and masks are those of transformers, and what is no chat is left out and counted."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, OutputError, TooManyMalformed, UsageError
from gristmill.io.token_masks import TokenMasks
from gristmill.io.token_shards import open_shards
from preprocessing.tokenize_chats import tokenize_chats
from preprocessing.tokenizer.chat_template import ChatError, ChatTemplate
from tests.gristmill_cli.corpus import tree
from tests.gristmill_cli.documentation import commands, shell
from tests.object_faults import Seldom
from tests.object_store import object_store
from tests.patience import patience
from tests.preprocessing.chats import TEMPLATES, make_chats, make_tokenizer, write_chats

ONE = RunOptions(workers=1, quiet=True)


def read_chats(folder: Path) -> list[tuple[list[int], list[bool]]]:
    """The ids and the mask of each chat."""
    manifest, shards = open_shards(folder)
    masks = TokenMasks.load(folder, manifest)
    assert masks is not None
    chats = []
    start = 0
    for ids in (ids for shard in shards for ids in shard):
        chats.append((ids.tolist(), masks.between(start, start + len(ids)).tolist()))
        start += len(ids)
    return chats


def theirs(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_and_ids_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = make_tokenizer(tmp_path / "model", name)
    chats = make_chats(30)
    path = write_chats(tmp_path / "chats.jsonl", chats)
    tokenize_chats(path, tmp_path / "out", folder, ONE)
    other = theirs(folder)
    template = ChatTemplate.load(folder / "tokenizer.json")
    end = other.convert_tokens_to_ids("<|im_end|>")
    for chat, (ids, _) in zip(chats, read_chats(tmp_path / "out"), strict=True):
        messages = chat["messages"]
        assert template.render(messages) == other.apply_chat_template(messages, tokenize=False)
        prompt = other.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        assert template.render(messages[:1], prompt=True) == prompt
        expected = other.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert ids == (expected if expected[-1] == end else [*expected, end])


def test_a_mask_is_what_transformers_says_where_a_template_marks_it(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "model", "marked")
    chats = make_chats(30)
    tokenize_chats(write_chats(tmp_path / "chats.jsonl", chats), tmp_path / "out", folder, ONE)
    for chat, (ids, mask) in zip(chats, read_chats(tmp_path / "out"), strict=True):
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        expected = theirs(folder).apply_chat_template(chat["messages"], **options)
        assert mask[: len(expected["input_ids"])] == [bool(value) for value in expected["assistant_masks"]]
        assert not any(mask[len(expected["input_ids"]) :]) and len(ids) == len(mask)


@pytest.mark.parametrize("name", ["ChatML", "strict", "marked"])
def test_targets_are_what_the_assistant_says_and_the_token_that_ends_it(tmp_path: Path, name: str) -> None:
    folder = make_tokenizer(tmp_path / "model", name)
    chats = make_chats(20, seed=4)
    tokenize_chats(
        write_chats(tmp_path / "chats.jsonl", chats), tmp_path / "out", folder, RunOptions(workers=2, quiet=True)
    )
    decode = theirs(folder).decode
    for chat, (ids, mask) in zip(chats, read_chats(tmp_path / "out"), strict=True):
        said = [message["content"] for message in chat["messages"] if message["role"] == "assistant"]
        targets = decode([token for token, is_target in zip(ids, mask, strict=True) if is_target])
        assert [part.strip() for part in targets.split("<|im_end|>")[:-1]] == said
        assert "Say it" not in targets and "assistant" not in targets and targets.count("<|im_end|>") == len(said)


def test_messages_that_a_template_rewrites_are_no_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tokenizer(tmp_path / "model", "thinking")
    chats = make_chats(20, turns=3)
    tokenize_chats(write_chats(tmp_path / "chats.jsonl", chats), tmp_path / "out", folder, RunOptions(workers=1))
    earlier = sum(len(chat["messages"]) // 2 - 1 for chat in chats)
    assert f"note: {earlier} messages of the assistant are no targets" in capsys.readouterr().err
    for chat, (ids, mask) in zip(chats, read_chats(tmp_path / "out"), strict=True):
        text = theirs(folder).decode([token for token, is_target in zip(ids, mask, strict=True) if is_target])
        assert text.strip() == f"<think>\n\n</think>\n\n{chat['messages'][-1]['content']}<|im_end|>"


def test_workers_and_slices_change_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tokenizer(tmp_path / "model")
    for source in ("a", "b"):
        write_chats(tmp_path / "chats" / source / "chats.jsonl", make_chats(60, seed=len(source)))
    tokenize_chats(tmp_path / "chats", tmp_path / "one", folder, ONE)
    monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", 2000)
    tokenize_chats(tmp_path / "chats", tmp_path / "two", folder, RunOptions(workers=2, quiet=True))
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert open_shards(tmp_path / "one")[0].sources.keys() == {"a", "b"}
    tokenize_chats(tmp_path / "chats", tmp_path / "small", folder, ONE, shard_size="4KiB")
    assert len(open_shards(tmp_path / "small")[0].shards) > 3
    assert read_chats(tmp_path / "small") == read_chats(tmp_path / "one")


def test_what_is_no_chat_is_left_out_and_counted(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "model", "strict")
    good = make_chats(6)
    bad: list[Any] = [
        {"messages": [{"role": "user", "content": "Why?"}]},
        {"messages": [{"role": "assistant", "content": "It grinds."}]},
        {"messages": "no list"},
        {"text": "no messages"},
        {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "So."}]},
    ]
    path = write_chats(tmp_path / "chats.jsonl", [*good, *bad])
    with pytest.raises(TooManyMalformed) as error:
        tokenize_chats(path, tmp_path / "out", folder, ONE)
    assert "5 of 11 records are malformed" in str(error.value) and "\n" not in str(error.value)
    assert "chats.jsonl line 7: the assistant has no message" in str(error.value)
    with pytest.raises(InputError, match="is not complete: tokenize_chats"):
        open_shards(tmp_path / "out")
    counts = tokenize_chats(path, tmp_path / "out", folder, RunOptions(workers=1, max_malformed=0.5, quiet=True))
    assert len(read_chats(tmp_path / "out")) == 6 == counts.total("written").documents
    reasons = {reason: counts.total(reason).documents for reason in counts.reasons if reason.startswith("malformed")}
    assert reasons == {
        "malformed: the assistant has no message": 1,
        "malformed: the template refuses it: roles must alternate user and assistant": 1,
        "malformed: messages is not a list of messages": 1,
        "malformed: no messages": 1,
        'malformed: the template cannot be filled in: TypeError: can only concatenate str (not "NoneType") to str': 1,
    }
    (listed,) = (tmp_path / "out").glob("*.malformed")
    assert [json.loads(line)["line"] for line in listed.read_text().splitlines()] == [7, 8, 9, 10, 11]


PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
PARTS = "{% for message in messages %}{% for part in message.content %}{{ part.text }};{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"content": ""}, "a message of the assistant is empty"),
        ({"content": " \n"}, "a message of the assistant is empty"),
        ({"content": None}, "a message of the assistant is empty"),
        ({"content": None, "tool_calls": [{"id": 1}]}, "no text but null, for which the template has no words"),
        ({"content": [{"type": "text", "text": "hey"}]}, "no text but list, for which the template has no words"),
        ({"content": "None", "tool_calls": [{"id": 1}]}, ""),
    ],
)
def test_what_a_template_would_write_as_python_does_is_malformed(answer: dict[str, Any], reason: str) -> None:
    template = ChatTemplate(PLAIN, {}, "plain")
    messages = [{"role": "user", "content": "None of it?"}, {"role": "assistant", **answer}]
    if not reason:
        assert template.apply(messages).text == "user: None of it?\nassistant: None\n"
        return
    with pytest.raises(ChatError, match=reason):
        template.apply(messages)


def test_content_that_a_template_knows_is_a_chat() -> None:
    messages = []
    for role, text in (("user", "Hi"), ("assistant", "hey")):
        messages.append({"role": role, "content": [{"type": "text", "text": text}]})
    assert ChatTemplate(PARTS, {}, "parts").apply(messages).text == "Hi;hey;"


def test_another_field_is_advised_by_its_own_option(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "model")
    path = write_chats(tmp_path / "chats.jsonl", [{"turns": chat["messages"]} for chat in make_chats(3)])
    with pytest.raises(TooManyMalformed, match=r"Give --messages NAME if the messages are in another field"):
        tokenize_chats(path, tmp_path / "out", folder, ONE)
    counts = tokenize_chats(path, tmp_path / "out", folder, ONE, messages="turns")
    assert counts.total("written").documents == 3


def test_a_source_without_chats_is_refused(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "model")
    with pytest.raises(InputError, match="has no chats; expected records with a list of messages"):
        tokenize_chats(write_chats(tmp_path / "chats.jsonl", []), tmp_path / "out", folder, ONE)


def test_it_is_a_stage_as_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is done is skipped, what has changed runs again, and --explain says why; a template is an argument."""
    folder = make_tokenizer(tmp_path / "model")
    for source in ("a", "b"):
        write_chats(tmp_path / "chats" / source / "chats.jsonl", make_chats(40, seed=len(source)))
    options = RunOptions(workers=1, explain=True)
    tokenize_chats(tmp_path / "chats", tmp_path / "out", folder, options)
    before = tree(tmp_path / "out")
    assert "80 read = 80 written" in capsys.readouterr().err
    tokenize_chats(tmp_path / "chats", tmp_path / "out", folder, options)
    assert "done already, nothing to do" in capsys.readouterr().err
    write_chats(tmp_path / "chats/b/chats.jsonl", make_chats(50, seed=9))
    tokenize_chats(tmp_path / "chats", tmp_path / "out", folder, options)
    said = capsys.readouterr().err
    assert "90 read = 90 written" in said and "b/chats.jsonl" in said and tree(tmp_path / "out") != before
    (tmp_path / "own.jinja").write_text(TEMPLATES["strict"])
    tokenize_chats(tmp_path / "chats", tmp_path / "out", folder, options, template=tmp_path / "own.jinja")
    assert "rule" in capsys.readouterr().err
    tokenize_chats(tmp_path / "chats", tmp_path / "fresh", folder, ONE, template=tmp_path / "own.jinja")
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")


@pytest.mark.parametrize("many", [["--shard", "0/2"], ["--executor", "ray"]])
def test_shards_and_ray_write_the_bytes_of_one_process(tmp_path: Path, many: list[str]) -> None:
    if "ray" in many:
        pytest.importorskip("ray")
    folder = make_tokenizer(tmp_path / "model")
    for source in ("a", "b", "c"):
        write_chats(tmp_path / "chats" / source / "chats.jsonl", make_chats(40, seed=ord(source)))
    tokenize_chats(tmp_path / "chats", tmp_path / "one", folder, ONE)
    command = [sys.executable, "-m", "gristmill_cli", "tokenize-chats", str(tmp_path / "chats"), str(tmp_path / "many")]
    command += ["--tokenizer", str(folder), "--workers", "1", "--memory", "1GiB"]
    starts = [many, ["--shard", "1/2"]] if "--shard" in many else [many]
    started = [subprocess.Popen([*command, *words], stderr=subprocess.PIPE, text=True) for words in starts]
    said = [process.communicate(timeout=patience(120))[1] for process in started]
    assert [process.returncode for process in started] == [0] * len(starts), said
    assert tree(tmp_path / "many") == tree(tmp_path / "one")


def test_chats_and_tokens_may_be_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tokenizer(tmp_path / "model")
    write_chats(tmp_path / "chats/a/chats.jsonl", make_chats(40))
    tokenize_chats(tmp_path / "chats", tmp_path / "one", folder, ONE)
    with object_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        store.upload_tree(tmp_path / "chats", "chats")
        store.fault = Seldom(5, 0.2)
        tokenize_chats(Path("s3://bucket/chats"), Path("s3://bucket/out"), folder, ONE)
        store.fault = None
        written = {name: data for name, data in store.tree("out").items() if not name.startswith(".gristmill")}
    assert written == tree(tmp_path / "one")


def test_what_cannot_be_done_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "model")
    path = write_chats(tmp_path / "chats.jsonl", make_chats(3))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"chat_template": "{% for"}, "has a chat template that is no Jinja"),
        ({"chat_template": None}, "has no chat template; expected chat_template.jinja"),
    ]
    for change, message in cases:
        (folder / "tokenizer_config.json").write_text(json.dumps(config | change))
        with pytest.raises(UsageError, match=message):
            tokenize_chats(path, tmp_path / "out", folder)
    (tmp_path / "own.jinja").write_text(TEMPLATES["ChatML"])
    tokenize_chats(path, tmp_path / "out", folder, template=tmp_path / "own.jinja")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/tokens_00000.bin").touch()
    with pytest.raises(OutputError, match="that tokenize_chats did not write"):
        tokenize_chats(path, tmp_path / "other", folder, template=tmp_path / "own.jinja")
    with pytest.raises(UsageError, match="there is none"):
        tokenize_chats(tmp_path / "nothing.jsonl", tmp_path / "new", make_tokenizer(tmp_path / "again"))


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    block, _ = commands("guides/chats.md")
    model = make_tokenizer(tmp_path / "model")
    chats = write_chats(tmp_path / "chats.jsonl", make_chats(80))
    done = shell(block, CHATS=str(chats), MODEL=str(model), OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "80 read = 80 written" in done.stderr and "are the assistant's" in done.stderr
    assert "⟦" in done.stdout and "step 10/10" in done.stdout


def test_a_template_runs_no_code(tmp_path: Path) -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}", {}, "evil")
    with pytest.raises(ChatError):
        template.render([])
