"""prepare_characters keeps every character, and the configurations in configs/ train on its shards."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.config import load_config
from gristmill.errors import InputError, UsageError
from gristmill.io.token_shards import open_shards
from scripts.prepare_characters import TOKENIZER, prepare_characters
from tests.verify_shards import verify_shards
from training.config import TrainConfig
from training.train import train

REPOSITORY = Path(__file__).resolve().parents[2]
SHORT = "--optim.steps 2 --model.vocab_size 65 --metrics.tensorboard false"
LETTERS = st.characters(exclude_categories=["Cc", "Cs"], include_characters="\t\r\n", exclude_characters="\u2581")
PROSE = "ROMEO:\nO, she doth teach  the torches to burn bright!\r\n\n水車 🙂\n " * 40


def read_back(out_dir: Path) -> list[str]:
    """The text of both folders, decoded by their own tokenizers."""
    texts = []
    for part in ("train", "holdout"):
        manifest, (shard,) = verify_shards(out_dir / part), open_shards(out_dir / part)[1]
        tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(out_dir / part / TOKENIZER))
        ids = shard.tokens.tolist()
        assert ids.pop() == manifest.tokenizer.end_of_document and ids.count(manifest.tokenizer.end_of_document) == 0
        texts.append(tokenizer.decode(ids))
        assert tokenizer.encode(texts[-1]) == ids and manifest.bytes == len(texts[-1].encode())
    return texts


def test_the_holdout_is_the_last_tenth(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_bytes(PROSE.encode())
    prepare_characters(tmp_path / "input.txt", tmp_path / "out")
    cut = len(PROSE) * 9 // 10
    assert read_back(tmp_path / "out") == [PROSE[:cut], PROSE[cut:]]
    assert verify_shards(tmp_path / "out/train").tokenizer.vocab_size == len(set(PROSE)) + 1


@settings(max_examples=50)
@given(st.text(LETTERS, min_size=2).filter(lambda text: len(set(text)) > 1))
def test_any_text_round_trips(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("text")
    (folder / "input.txt").write_bytes(text.encode())
    prepare_characters(folder / "input.txt", folder / "out", holdout=0.5)
    assert "".join(read_back(folder / "out")) == text


@pytest.mark.parametrize("data", [b"", b"a", b"\n\n\n", b"a\0b" * 9, "a ▁ b".encode() * 9, b"\xff\xfe\x00"])
def test_unusable_texts_are_rejected(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "input.txt").write_bytes(data)
    with pytest.raises((UsageError, InputError), match=r"input\.txt"):
        prepare_characters(tmp_path / "input.txt", tmp_path / "out")


@pytest.mark.parametrize(("name", "parameters"), [("nanogpt_cpu", 804_096), ("nanogpt_cpu_llama", 796_032)])
def test_the_configurations_have_the_stated_size(name: str, parameters: int, tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_bytes((PROSE * 3).encode())
    subprocess.run(
        [sys.executable, REPOSITORY / "scripts/prepare_characters.py", "input.txt", "out"], cwd=tmp_path, check=True
    )
    options = ["--config", str(REPOSITORY / f"configs/{name}.toml"), "--out_dir", str(tmp_path / "run")]
    options += ["--data.train", str(tmp_path / "out/train"), "--data.holdout", str(tmp_path / "out/holdout")]
    summary = train(load_config(TrainConfig, [*options, *SHORT.split()]))
    assert summary.parameters == parameters


def test_gpt2_124m_has_the_stated_size(tmp_path: Path) -> None:
    folders = ["--data.train", "a", "--data.holdout", "b", "--out_dir", "c"]
    config = load_config(TrainConfig, ["--config", str(REPOSITORY / "configs/nanogpt_124m.toml"), *folders])
    model = config.model.resolve(50_257, config.data.seq_len)
    blocks = model.layers * (12 * model.width**2 + 2 * model.width)
    size = blocks + (model.vocab_size + model.context + 1) * model.width
    assert size == 124_373_760 and config.data.batch_size * config.data.seq_len == 491_520
    assert np.isclose(config.optim.min_lr * 10, config.optim.lr)
