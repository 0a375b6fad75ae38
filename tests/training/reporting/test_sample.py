import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace as replace_struct

from gristmill.errors import UsageError
from gristmill.io.token_shards import Manifest, TokenizerRecord
from training.distributed.process_group import init_distributed
from training.experimental.parallel_config import ParallelConfig
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig
from training.parallel.mesh import build_world
from training.parallel.parallel_model import ParallelModel
from training.parallel.parallelize import parallelize
from training.reporting.reporting_config import EvalConfig
from training.reporting.sample import Sampler


@pytest.fixture
def device() -> Iterator[torch.device]:
    with init_distributed("cpu") as found:
        yield found


def model(device: torch.device, layout: ParallelConfig = ParallelConfig(), vocabulary: int = 301) -> ParallelModel:
    config = ModelConfig(layers=2, width=16, heads=2, init_std=0.5, vocab_size=vocabulary).resolve(300, 8)
    layout = layout.resolve(dist.get_world_size(), config, 8)
    return parallelize(meta_decoder(config), layout, build_world(layout, device), seed=1)


def sampler(corpus: Path, **options: object) -> Sampler:
    folder = corpus / "tokens/train"
    return Sampler(folder, Manifest.load(folder), replace(EvalConfig(sample_tokens=12), **options), seed=1)  # type: ignore[arg-type]


def test_text_continues_the_prompt_and_is_the_same_each_time(corpus: Path, device: torch.device) -> None:
    draw = sampler(corpus, prompt="the miller")
    torch.manual_seed(1)
    text = draw.sample(model(device))
    torch.manual_seed(2)
    assert text.startswith("the miller") and len(text) > len("the miller")
    assert draw.sample(model(device)) == text


def test_temperature_zero_takes_the_most_probable_token(corpus: Path, device: torch.device) -> None:
    decoder, draw = model(device), sampler(corpus, prompt="grain", temperature=0.0, sample_tokens=1)
    best = int(decoder.parts[0](torch.tensor([draw.start]))[0, -1, :300].argmax())
    assert draw.sample(decoder) == draw.tokenizer.decode([*draw.start[1:], best])


def test_a_tiny_temperature_is_as_zero_and_a_diverged_model_says_nothing(corpus: Path, device: torch.device) -> None:
    decoder = model(device)
    texts = [sampler(corpus, prompt="grain", temperature=t).sample(decoder) for t in (0.0, 1e-320)]
    assert texts[0] == texts[1] != "grain"
    with torch.no_grad():
        decoder.parts[0].head.weight.fill_(torch.nan)  # type: ignore[union-attr, operator]
    assert sampler(corpus, prompt="grain").sample(decoder) == "grain"


def test_ids_beyond_the_tokenizer_are_never_drawn(corpus: Path, device: torch.device) -> None:
    decoder = model(device, vocabulary=1000)
    with torch.no_grad():
        decoder.parts[0].head.weight[300:] *= 100  # type: ignore[index, operator, union-attr]
    assert isinstance(sampler(corpus).sample(decoder), str)


def text_beyond_the_context(corpus: Path, layout: ParallelConfig) -> str:
    with init_distributed("cpu") as found:
        config = ModelConfig(preset="gpt2", layers=2, width=16, heads=2, context=9).resolve(300, 8)
        layout = layout.resolve(dist.get_world_size(), config, 8)
        decoder = parallelize(meta_decoder(config), layout, build_world(layout, found), seed=1)
        return sampler(corpus, prompt="the miller grinds").sample(decoder)


def test_text_longer_than_a_context_that_does_not_divide(corpus: Path, run_ranks: Callable[..., list[Any]]) -> None:
    texts = run_ranks(2, text_beyond_the_context, corpus, ParallelConfig(tp=2, sequence_parallel=True))
    assert texts[0] == texts[1] and texts[0].startswith("the miller grinds")


def drawn(corpus: Path, layout: ParallelConfig) -> str:
    with init_distributed("cpu") as device:
        return sampler(corpus, prompt="the miller").sample(model(device, layout))


@pytest.mark.parametrize(
    "layout", [ParallelConfig(tp=2, sequence_parallel=True), ParallelConfig(pp=2), ParallelConfig(zero=3)]
)
def test_every_layout_draws_the_same(corpus: Path, run_ranks: Callable[..., list[Any]], layout: ParallelConfig) -> None:
    assert run_ranks(2, drawn, corpus, layout) == [drawn(corpus, ParallelConfig())] * 2


def test_a_missing_tokenizer_is_an_error(corpus: Path, tmp_path: Path) -> None:
    manifest = Manifest.load(corpus / "tokens/train")
    with pytest.raises(UsageError, match="is missing or has changed"):
        Sampler(tmp_path, manifest, EvalConfig(), seed=1)


def test_a_file_that_is_no_tokenizer_is_an_error(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "t.model").write_bytes(b"none")
    tokenizer = TokenizerRecord("t.model", hashlib.sha256(b"none").hexdigest(), 300, 2)
    manifest = Manifest.load(corpus / "tokens/train")
    with pytest.raises(UsageError, match="is no tokenizer"):
        Sampler(tmp_path, replace_struct(manifest, tokenizer=tokenizer), EvalConfig(), seed=1)
