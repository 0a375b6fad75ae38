"""Each tutorial is followed from its first command to its last, and prints what it says, but for numbers."""

import re
import sys
from pathlib import Path
from subprocess import run

import pytest
import torch

from tests.gristmill_cli.documentation import DOCS, PAGES, shell
from tests.tokenizers_of_models import content_of

TUTORIALS = sorted(page for page in PAGES if page.startswith("tutorials/") and "```bash" in PAGES[page])
BLOCK = re.compile(r"^```(bash|text|python|toml)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LONG = ("first-model", "hugging-face", "layouts", "living-corpus", "quality", "training-job")  # a minute each
LONG = {f"tutorials/{name}.md" for name in _LONG}
BEGINNINGS = {  # of long ones, up to a heading: some twenty seconds each
    "tutorials/living-corpus.md": "\n## The run is killed",
    "tutorials/training-job.md": "\n## 2. ",
}
NUMBER = re.compile(r"\d[\d,.]*\d|\d")


def test_there_are_eight() -> None:
    assert len(TUTORIALS) == 8 == len(list((DOCS / "tutorials").glob("*.md")))


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.thorough] * (page in LONG)) for page in TUTORIALS]
)
def test_a_tutorial_ends_as_it_says(page: str, tmp_path: Path) -> None:
    follow(page, PAGES[page], tmp_path)


@pytest.mark.parametrize("page", BEGINNINGS)
def test_a_long_tutorial_begins_as_it_says(page: str, tmp_path: Path) -> None:
    beginning, heading, _ = PAGES[page].partition(BEGINNINGS[page])
    assert heading
    follow(page, beginning, tmp_path)


def follow(page: str, text: str, tmp_path: Path) -> None:
    """Run the commands of a page's text in a folder, and compare what they print."""
    if "smollm" in PAGES[page]:
        _small_model(tmp_path / "smollm")
    said = ""
    for kind, block in BLOCK.findall(text):
        if kind == "bash":
            block = block.replace("--optim.steps 300", "--optim.steps 20")  # numbers are not compared
            done = shell(f"cd {tmp_path}\n{block}", COLUMNS="120")
            said = done.stdout + done.stderr
            assert done.returncode == 0, said
        elif kind == "text":
            for line in block.splitlines():
                assert re.search(_pattern(line), said), f"{line!r} is not in\n{said}"
        elif name := re.findall(rf"into `([\w.]+)`:\n\n```{kind}\n" + re.escape(block), PAGES[page]):
            (tmp_path / name[0]).write_text(block)
        elif kind == "python":
            done = run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            promised = re.findall(r"print\(.*\)  # (.*)", block)
            assert promised == done.stdout.splitlines()[: len(promised)]
        else:
            raise AssertionError(f"the page does not say into which file this goes: {block}")


def _pattern(line: str) -> str:
    """A pattern of a line of output, in which each number stands for any, and spaces for any spaces."""
    words = (r"[\d,.]+".join(re.escape(part) for part in NUMBER.split(word)) for word in line.split())
    return r"\s+".join(words)


def _small_model(folder: Path) -> None:
    """A tiny Llama of random weights, as transformers saves it, with a tokenizer.json."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 500}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    ids = {"max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ids)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(content_of("Llama 3"))
