"""Tokenizers of every kind behind one interface; how one is found, and what its special tokens are."""

import json
import os
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import tiktoken
import tiktoken_ext.openai_public as openai_public
from hypothesis import given
from hypothesis import strategies as st

from gristmill.errors import UsageError
from gristmill.io.tokenizer_companions import companions_of, read_config
from gristmill.io.tokenizer_file import (
    GPT4,
    QWEN2,
    JsonTokenizer,
    find_ends,
    find_tokenizer_file,
    open_tokenizer,
    special_id,
)
from preprocessing.tokenizer.loading import JsonEncoder
from tests.hub_server import Hub, running_hub
from tests.tokenizers_of_models import BEGIN, END, PROSE, content_of, write_ranks

opened = cache(open_tokenizer)
LLAMA3 = {"<|begin_of_text|>": 128_000, "<|end_of_text|>": 128_001, "<|eot_id|>": 128_009}
QWEN = {END: 151_643, "<|im_start|>": 151_644, "<|im_end|>": 151_645}
COUNTS = {"r50k_base": 50_256, "p50k_base": 50_280, "cl100k_base": 100_256, "o200k_base": 199_998}
COUNTS |= {"llama3": 128_000, "qwen": 151_643}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_text(content_of("Llama 3"), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=COUNTS)
def ranks(request, tmp_path_factory) -> tuple[Path, tiktoken.Encoding]:
    """A rank file with made-up ranks, and tiktoken's encoding with them: its own constructor where it has one."""
    name: str = request.param
    path = tmp_path_factory.mktemp("ranks") / "any.tiktoken"
    found = write_ranks(path, COUNTS[name], gap=50_256 if name == "p50k_base" else -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_public, "load_tiktoken_bpe", lambda *args, **options: found)
        own = {
            "llama3": {"pat_str": GPT4, "mergeable_ranks": found, "special_tokens": LLAMA3},
            "qwen": {"pat_str": QWEN2, "mergeable_ranks": found, "special_tokens": QWEN},
        }.get(name)
        return path, tiktoken.Encoding(**({"name": name} | own if own else getattr(openai_public, name)()))


@pytest.mark.every(3)
@given(text=st.one_of(st.text(), st.lists(st.sampled_from([*PROSE, " ", "\n", "12345", "'s", "e\u0301"])).map("".join)))
def test_ids_of_a_rank_file_are_those_of_tiktoken(ranks, text: str) -> None:
    path, reference = ranks
    text = unicodedata.normalize("NFC", text) if reference.name == "qwen" else text
    found = opened(path)
    assert found.encode(text) == reference.encode_ordinary(text)
    assert found.decode(found.encode(text)) == text


@pytest.mark.every(3)
def test_a_rank_file_is_encoded_by_gigatoken_and_has_its_publishers_special_tokens(ranks) -> None:
    path, reference = ranks
    found = opened(path)
    assert isinstance(found, JsonTokenizer)
    encoder = JsonEncoder(found)
    assert not encoder.fallback
    assert encoder.encode(PROSE)[0].tolist() == [i for text in PROSE for i in reference.encode_ordinary(text)]
    special = [f"the{token} mill" for token in reference.special_tokens_set]
    wanted = [reference.encode(text, allowed_special="all") for text in special]
    assert [found.encode(text) for text in special] == wanted
    assert encoder.encode(special)[0].tolist() == [i for ids in wanted for i in ids]
    end = "<|end_of_text|>" if reference.name == "llama3" else END
    begin = 128_000 if reference.name == "llama3" else -1
    assert (found.special({}, "eos"), found.special({}, "bos")) == (reference.encode_single_token(end), begin)
    assert found.kind == "tiktoken"


def test_damaged_and_unknown_rank_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "few.tiktoken"
    write_ranks(path, 1000)
    with pytest.raises(UsageError, match=r"has 1,000 ranks.*expected 50,256 \(gpt2\), .*; convert it"):
        open_tokenizer(path)
    path.write_bytes(path.read_bytes()[:-3] + b"x\n")
    with pytest.raises(UsageError, match="is damaged"):
        open_tokenizer(path)


@pytest.mark.parametrize("content", [b"", b"no model", b"{", b'{"a": 1}', b"\x00\xff" * 99])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UsageError, match=r"file is no tokenizer \(.*\): expected a tokenizer.json, a SentencePiece"):
        open_tokenizer(tmp_path / "file")


def test_special_tokens_are_those_of_the_config_a_name_or_none(file: Path) -> None:
    found = open_tokenizer(file)
    for config, name, wanted, expected in [
        ({}, "eos", "model", found.id_of(END)),  # a name that is usual
        ({}, "eos", BEGIN, found.id_of(BEGIN)),
        ({}, "bos", "none", -1),
        ({"bos_token": BEGIN}, "bos", "model", found.id_of(BEGIN)),
        ({"eos_token": {"content": BEGIN}}, "eos", "model", found.id_of(BEGIN)),
    ]:
        assert special_id(found, file, config, name, wanted) == expected
    with pytest.raises(UsageError, match="no bos token is named by it; give --bos TOKEN"):
        special_id(found, file, {}, "bos", "model")
    with pytest.raises(UsageError, match="'<none>' is not in its vocabulary; give --eos TOKEN"):
        special_id(found, file, {}, "eos", "<none>")
    with pytest.raises(UsageError) as refused:
        special_id(found, file, {}, "eos", "</s>")
    assert f"give --eos TOKEN, such as {END!r}, or --eos none" in str(refused.value)
    for config in ({"eos_token": "<gone>"}, {"eos_token": {"content": "<gone>"}}):
        expected = "tokenizer_config.json beside it names the eos token '<gone>', which is not in its vocabulary; give"
        with pytest.raises(UsageError, match=expected):
            special_id(found, file, config, "eos", "model")


@pytest.mark.parametrize(
    ("token", "number", "fault"),
    [("<|more|>", 500, "it does not have"), (END, 499, "has the id 0 in it"), ("the", None, "it does not look for")],
)
def test_a_token_that_only_the_config_adds_is_refused(file: Path, token: str, number: int | None, fault: str) -> None:
    """transformers adds it and finds it in texts, but the tokenizer.json alone does not."""
    config = {"added_tokens_decoder": {str(number): {"content": token}}, "additional_special_tokens": [BEGIN, token]}
    if number is None:
        del config["added_tokens_decoder"]
    file.with_name("tokenizer_config.json").write_text(json.dumps(config))
    expected = rf"the files beside it add the token '{re.escape(token)}', which {fault}.*: texts would spell it out"
    with pytest.raises(UsageError, match=expected):
        find_ends(file, "none", "model")


def test_tokens_of_deepseek_have_a_bar_of_full_width(tmp_path: Path) -> None:
    begin, end = (f"<\uff5c{name}\u2581of\u2581sentence\uff5c>" for name in ("begin", "end"))
    file_content = content_of("GPT-2").replace(END, end).replace(BEGIN, begin)
    file = tmp_path / "tokenizer.json"
    file.write_text(file_content, encoding="utf-8")
    tokenizer = open_tokenizer(file)
    assert special_id(tokenizer, file, {}, "bos", "model") == tokenizer.id_of(begin) >= 0
    assert special_id(tokenizer, file, {}, "eos", "model") == tokenizer.id_of(end) >= 0


def test_a_file_is_found_in_a_folder_of_a_model(file: Path, tmp_path: Path) -> None:
    assert find_tokenizer_file(file) == find_tokenizer_file(tmp_path) == file
    assert companions_of(file) == []
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    assert read_config(companions_of(file)) == {"eos_token": END}
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UsageError, match=r"tokenizer_config\.json is damaged"):
        read_config(companions_of(file))
    with pytest.raises(UsageError, match=r"expected a tokenizer, but there is no such file; give a tokenizer\.json"):
        find_tokenizer_file(tmp_path / "none.json")


@pytest.fixture
def hub(file: Path) -> Iterator[Hub]:
    with running_hub() as found:
        found.commit({"tokenizer.json": file.read_bytes(), "tokenizer_config.json": b'{"eos_token": "<|begin|>"}'})
        yield found


def find_in_a_process(repository: str, hub: Hub, cache_folder: Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; from gristmill.command import run_with_exit_code; from pathlib import Path\n"
    program += "from gristmill.io.tokenizer_file import find_tokenizer_file as find\n"
    program += "from gristmill.io.tokenizer_companions import companions_of\n"
    program += f"sys.exit(run_with_exit_code(lambda: print(companions_of(find(Path({repository!r})))[0].read_text())))"
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache_folder), "HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)


def test_a_repository_of_the_hub_is_fetched_once_with_its_config(hub: Hub, tmp_path: Path) -> None:
    for _ in range(2):
        found = find_in_a_process("org/name", hub, tmp_path / "hub")
        assert (found.returncode, found.stdout) == (0, '{"eos_token": "<|begin|>"}\n'), found.stderr
    assert [path for verb, path in hub.requests if verb == "GET" and not path.startswith("/datasets/")] == [
        "/org/name/resolve/main/tokenizer.json", "/org/name/resolve/main/tokenizer_config.json",
    ]  # fmt: skip


def test_a_repository_that_is_not_there_is_refused_in_a_sentence(hub: Hub, tmp_path: Path) -> None:
    found = find_in_a_process("org/other", hub, tmp_path / "hub")
    assert found.returncode == 2
    assert found.stderr.startswith("error: org/other: there is no such file, nor repository")
    hub.url = "http://127.0.0.1:9"
    found = find_in_a_process("org/name", hub, tmp_path / "hub")
    assert found.returncode == 2
    (sentence,) = found.stderr.splitlines()
    assert "the Hub cannot be reached" in sentence


def test_without_the_hub_a_repository_is_read_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    assert find_in_a_process("org/name", hub, tmp_path / "hub").returncode == 0
    hub.url = "http://127.0.0.1:9"
    found = find_in_a_process("org/name", hub, tmp_path / "hub")
    assert (found.returncode, found.stderr) == (0, "")
