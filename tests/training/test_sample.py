from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.errors import UsageError
from pipeline.tokens import Manifest
from training.config import EvalConfig, ModelConfig
from training.initialize import materialize
from training.model import Decoder
from training.sample import Sampler


def model(vocabulary: int = 300) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(ModelConfig(layers=1, width=16, init_std=0.5, vocab_size=vocabulary).resolve(300, 8))
    return materialize(decoder, torch.device("cpu"), 1)


def sampler(corpus: Path, **options: object) -> Sampler:
    folder = corpus / "tokens/train"
    return Sampler(folder, Manifest.load(folder), replace(EvalConfig(sample_tokens=12), **options), seed=1)  # type: ignore[arg-type]


def test_text_continues_the_prompt_and_is_the_same_each_time(corpus: Path) -> None:
    draw = sampler(corpus, prompt="the miller")
    torch.manual_seed(1)
    text = draw.text(model())
    torch.manual_seed(2)
    assert text.startswith("the miller") and len(text) > len("the miller")
    assert draw.text(model()) == text


def test_temperature_zero_takes_the_most_probable_token(corpus: Path) -> None:
    decoder, draw = model(), sampler(corpus, prompt="grain", temperature=0.0, sample_tokens=1)
    best = int(decoder(torch.tensor([draw.start]))[0, -1, :300].argmax())
    assert draw.text(decoder) == draw.tokenizer.decode([*draw.start[1:], best])


def test_ids_beyond_the_tokenizer_are_never_drawn(corpus: Path) -> None:
    decoder = model(vocabulary=1000)
    with torch.no_grad():
        decoder.head.weight[300:] *= 100  # type: ignore[index, operator, union-attr]
    assert isinstance(sampler(corpus).text(decoder), str)


def test_a_missing_tokenizer_is_an_error(corpus: Path, tmp_path: Path) -> None:
    manifest = Manifest.load(corpus / "tokens/train")
    with pytest.raises(UsageError, match="missing or is not the one"):
        Sampler(tmp_path, manifest, EvalConfig(), seed=1)
