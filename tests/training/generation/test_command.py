"""`gristmill generate`: where prompts come from, what is printed when, and what is refused in one sentence."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill_cli.generate import main
from tests.training.conftest import REPOSITORY, TORCHRUN
from training.hugging_face.export_hf import export_hf
from training.hugging_face.import_hf import import_hf

PROMPTS = ["the miller", "grain", "a slow wheel"]


@pytest.fixture
def model(checkpoint_of: Callable[[str], Path]) -> str:
    return str(checkpoint_of("llama"))


class Pipe(io.TextIOWrapper):
    """Standard input with these bytes."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))


class Watched(io.StringIO):
    """Standard output that knows what it held at each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed: list[str] = []

    def flush(self) -> None:
        self.flushed.append(self.getvalue())


def texts(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    main([*words, "--json", "true", "--device", "cpu"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_prompts_come_from_anywhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str
) -> None:
    given = texts(capsys, model, *PROMPTS, "--tokens", "5")
    assert [record["prompt"] for record in given] == PROMPTS
    assert all(len(record["tokens"]) == 5 and record["end"] == "length" for record in given)  # type: ignore[arg-type]
    (tmp_path / "lines.txt").write_text("\n".join(PROMPTS) + "\n\n")
    (tmp_path / "records.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    for name in ("lines.txt", "records.jsonl"):
        assert texts(capsys, model, "--prompts", str(tmp_path / name), "--tokens", "5") == given
    monkeypatch.setattr(sys, "stdin", Pipe("\r\n".join(PROMPTS).encode()))
    assert texts(capsys, model, "--tokens", "5") == given


def test_an_empty_prompt_lets_the_model_begin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    first, second = texts(capsys, model, "", PROMPTS[0], "--tokens", "3")
    assert (first["prompt"], second["prompt"]) == ("", PROMPTS[0]) and len(first["tokens"]) == 3  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stdin", Pipe(b"\n"))
    said = refused(capsys, model)
    assert said.startswith("error: standard input has blank lines alone; expected prompts, one per line")
    assert 'on the command line, where "" lets the model begin' in said


def test_a_text_depends_on_its_seed_and_number_alone(capsys: pytest.CaptureFixture[str], model: str) -> None:
    given = texts(capsys, model, *PROMPTS)
    assert texts(capsys, model, *PROMPTS, "--batch_size", "1") == given
    assert texts(capsys, model, *PROMPTS, "--batch_size", "2") == given
    others = texts(capsys, model, *PROMPTS, "--seed", "1")
    assert all(one["text"] != other["text"] for one, other in zip(given, others, strict=True))
    again = texts(capsys, model, PROMPTS[0], PROMPTS[0], PROMPTS[0])
    assert len({str(record["text"]) for record in again}) == 3


def test_the_first_text_is_printed_token_by_token(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    out = Watched()
    monkeypatch.setattr(sys, "stdout", out)
    main([model, *PROMPTS, "--tokens", "20", "--device", "cpu"])
    whole = out.getvalue()
    assert all(whole.startswith(flushed) for flushed in out.flushed)
    first = whole[: whole.index("grain")]
    assert len({flushed for flushed in out.flushed if len(flushed) < len(first)}) > 12
    assert [whole.index(prompt) for prompt in PROMPTS] == sorted(whole.index(prompt) for prompt in PROMPTS)


def test_a_stop_ends_a_text(capsys: pytest.CaptureFixture[str], model: str) -> None:
    (whole,) = texts(capsys, model, PROMPTS[0], "--tokens", "30")
    text = str(whole["text"])
    stop = text[10:13]
    (stopped,) = texts(capsys, model, PROMPTS[0], "--tokens", "30", "--stop", stop, "never")
    assert stopped["text"] == text[: text.index(stop)] and stopped["end"] == "stop"


def test_it_says_how_fast_it_was(capsys: pytest.CaptureFixture[str], model: str) -> None:
    main([model, *PROMPTS, "--tokens", "4", "--device", "cpu"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("3 prompts: ") and ", 12 tokens written (" in said and said.endswith(" tokens/s)")


def test_a_text_ends_with_the_context(capsys: pytest.CaptureFixture[str], model: str) -> None:
    (record,) = texts(capsys, model, "grain " * 20, "--tokens", "1000")
    assert record["end"] == "length" and 10 < len(record["tokens"]) < 64  # type: ignore[arg-type]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main([*words, "--device", "cpu"])
    said = capsys.readouterr()
    assert end.value.code in (1, 2) and said.out == "" and said.err.startswith("error: ")
    assert said.err.count("\n") == 1, said.err
    return said.err


def test_what_cannot_be_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str
) -> None:
    said = refused(capsys, model, "grain " * 80)
    assert "'grain grain grain grain grain grain grai…'" in said
    assert "and the model's context is 64; expected 63" in said
    (tmp_path / "empty.txt").write_text("\n \n")
    assert f"{tmp_path}/empty.txt has blank lines alone; expected prompts" in refused(
        capsys, model, "--prompts", str(tmp_path / "empty.txt")
    )
    monkeypatch.setattr(sys, "stdin", Pipe(b""))
    assert "standard input is empty; expected prompts" in refused(capsys, model)
    (tmp_path / "latin.txt").write_bytes(b"grain\nM\xfchle\n")
    assert "latin.txt:2 is not UTF-8" in refused(capsys, model, "--prompts", str(tmp_path / "latin.txt"))
    (tmp_path / "bad.jsonl").write_text('{"prompt": "grain"}\n{"text": "grain"}\n')
    assert 'bad.jsonl:2: expected a record such as {"prompt": "The mill"}' in refused(
        capsys, model, "--prompts", str(tmp_path / "bad.jsonl")
    )
    assert "no such file" in refused(capsys, model, "--prompts", str(tmp_path / "none.txt"))
    assert "command line and in" in refused(capsys, model, "grain", "--prompts", str(tmp_path / "empty.txt"))
    assert "temperature is -1.0; expected 0 or more; try --temperature 0.8" in refused(
        capsys, model, "grain", "--temperature", "-1"
    )
    assert "top_p is 1.5; expected 1 or less" in refused(capsys, model, "grain", "--top_p", "1.5")
    assert "stop is empty" in refused(capsys, model, "grain", "--stop", "")
    assert "a prompt or stop is not UTF-8" in refused(capsys, model, "\udcfc")
    said = refused(capsys, str(tmp_path), "grain")
    assert "expected a checkpoint with record.json" in said and "or the folder of a Hugging Face model" in said
    said = refused(capsys, model, "grain", "--parallel.ep", "2")
    assert "the model is dense; try --parallel.ep 1\n" in said  # and no other sizes, as it is trained already
    assert "dp 1 x tp 2 = 2 processes" in refused(capsys, model, "grain", "--parallel.tp", "2").replace(" x pp 1", "")


def test_a_conversation_that_cannot_be_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str
) -> None:
    assert f"{model} has no chat template; expected chat_template.jinja" in refused(
        capsys, model, "a", "--chat", "true"
    )
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert "give --chat true, too" in refused(capsys, model, "a", "--template", str(tmp_path / "chat.jinja"))
    talk = [model, "--chat", "true", "--template", str(tmp_path / "chat.jinja")]
    assert "context is 64; expected 63 or fewer: begin another conversation" in refused(capsys, *talk, "grain " * 60)
    (tmp_path / "chat.jinja").write_text("{{ raise_exception('no grain today') }}")
    assert "the chat template cannot lead a conversation: " in refused(capsys, *talk, "grain")


def _generate_at_terminal(model: str, *words: str) -> tuple[subprocess.Popen[str], int]:
    """Return `gristmill generate` whose standard input is a terminal, and the end of that to type at."""
    ours, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "gristmill_cli", "generate", model, "--tokens", "4", "--temperature", "0", *words],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
        text=True,
    )
    return process, ours


def test_messages_are_typed_and_answered_one_by_one(tmp_path: Path, model: str) -> None:
    """At a terminal the message is on the screen: only its answer is printed."""
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %} {{ m.content }}"
        "{% endgeneration %}{% else %} {{ m.content }}{% endif %}\n{% endfor %}"
    )
    process, ours = _generate_at_terminal(model, "--chat", "true", "--template", str(tmp_path / "chat.jinja"))
    assert process.stdout is not None
    for prompt in PROMPTS[:2]:
        os.write(ours, f"{prompt}\n".encode())
        assert not process.stdout.readline().startswith((prompt, ">", " "))
        assert process.stdout.readline() == "\n"
    os.write(ours, b"\x04")
    _, said = process.communicate()
    assert process.returncode == 0 and "Type a message, or Ctrl-D to end." in said and "2 prompts" in said


def test_a_model_without_a_tokenizer_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str) -> None:
    export_hf(Path(model), tmp_path / "hf", Path(model) / "train")
    for file in (tmp_path / "hf").glob("tokenizer*"):
        file.unlink()
    assert "expected a tokenizer" in refused(capsys, str(tmp_path / "hf"), "grain")
    import_hf(tmp_path / "hf", tmp_path / "imported")
    assert "give --tokenizer FILE" in refused(capsys, str(tmp_path / "imported"), "grain")
    tokenizer = f"{model}/lossless.model"
    (record,) = texts(capsys, str(tmp_path / "imported"), "grain", "--tokenizer", tokenizer, "--tokens", "3")
    assert len(record["tokens"]) == 3  # type: ignore[arg-type]
    (tmp_path / "other.model").write_bytes(b"no tokenizer")
    assert "other.model" in refused(capsys, model, "grain", "--tokenizer", str(tmp_path / "other.model"))


def test_torchrun_reads_standard_input_and_prints_once(capsys: pytest.CaptureFixture[str], model: str) -> None:
    expected = texts(capsys, model, *PROMPTS, "--tokens", "6", "--temperature", "0")
    words = ["-m", "gristmill_cli.generate", model, "--tokens", "6", "--temperature", "0", "--json", "true"]
    done = subprocess.run(
        [*TORCHRUN, *words, "--parallel.tp", "2", "--device", "cpu"],
        input="\n".join(PROMPTS),
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected
    assert done.stderr.count("tokens/s)") == 2 and "3 prompts" in done.stderr


def test_prompts_are_typed_one_by_one(model: str) -> None:
    """At a terminal each line is answered before the next one is typed."""
    process, ours = _generate_at_terminal(model)
    assert process.stdout is not None
    for prompt in PROMPTS[:2]:
        os.write(ours, f"{prompt}\n".encode())
        assert process.stdout.readline().startswith(prompt)
        assert process.stdout.readline() == "\n"
    os.write(ours, b"\x04")
    _, said = process.communicate()
    assert process.returncode == 0 and said.count("> ") == 3 and "2 prompts" in said


def test_a_model_that_does_not_fit_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr("training.parallel.free_memory.free_memory", lambda: 1000)
    assert "try more ranks with --parallel.tp or --parallel.pp, --precision bf16" in refused(capsys, model, "grain")
