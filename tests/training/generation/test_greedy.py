"""A model writes the most probable tokens that transformers does, also from its export, and on several ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.training.hf_models import MODELS
from training.distributed.process_group import init_distributed
from training.experimental.parallel_config import ParallelConfig
from training.generation.loop import TextGenerator
from training.generation.sampling import SamplingOptions, text_generator
from training.generation.text import Text
from training.hugging_face.export_hf import export_hf
from training.language_model import open_language_model

PROMPTS = ["the miller\n  carries 水", "grain", "a slow wheel turns the stone of the mill"]
TOKENS = 12


def written(
    folder: Path,
    precision: str,
    options: SamplingOptions = SamplingOptions(0.0),
    prompts: Sequence[str] = PROMPTS,
    tokens: int = TOKENS,
    **layout: int,
) -> list[tuple[list[int], list[int], str]]:
    """Prompt, tokens and text of each prompt, continued together."""
    with init_distributed("cpu") as device:
        model = open_language_model(folder, device, ParallelConfig(**layout), precision)
        starts = [model.begins(prompt) for prompt in prompts]
        texts = [Text(ids, min(tokens, model.config.context - len(ids)), model.tokenizer) for ids in starts]
        generator = TextGenerator(model.cache, options, model.ends, model.hidden, model.agree)
        for _ in generator.extend(texts, [text_generator(3, i) for i in range(len(texts))]):
            pass
        return [(list(text.prompt), text.tokens, text.text) for text in texts]


def of_transformers(folder: Path, prompt: list[int], dtype: torch.dtype, **options: Any) -> list[int]:
    # its fast implementation of experts has no float64
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").to(dtype)
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, **options)
    tokens: list[int] = found[0, len(prompt) :].tolist()
    end = model.generation_config.eos_token_id
    return tokens[: tokens.index(end)] if end in tokens else tokens


@pytest.mark.parametrize(("precision", "dtype"), [("fp64", torch.float64), ("fp32", torch.float32)])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(
    tmp_path: Path, checkpoint_of: Callable[[str], Path], name: str, precision: str, dtype: torch.dtype
) -> None:
    run = checkpoint_of(name)
    export_hf(run, tmp_path / "hf", run / "train")
    ours = written(run, precision)
    for prompt, tokens, _ in ours:
        assert tokens == of_transformers(tmp_path / "hf", prompt, dtype)
    assert max(len(tokens) for _, tokens, _ in ours) == TOKENS
    assert [found[:2] for found in written(tmp_path / "hf", precision)] == [found[:2] for found in ours]


def test_repeated_tokens_are_penalized_as_transformers_does(
    tmp_path: Path, checkpoint_of: Callable[[str], Path]
) -> None:
    run = checkpoint_of("llama")
    export_hf(run, tmp_path / "hf", run / "train")
    for prompt, tokens, _ in written(run, "fp64", SamplingOptions(0.0, repetition_penalty=1.7)):
        assert tokens == of_transformers(tmp_path / "hf", prompt, torch.float64, repetition_penalty=1.7)
        assert len(set(tokens)) > 1


@pytest.mark.parametrize(
    ("name", "ranks", "layout"),
    [
        ("llama, grouped", 2, {"tp": 2}),
        ("llama, grouped", 3, {}),
        ("bloom", 2, {"tp": 2}),
        ("gpt_oss", 2, {"tp": 2}),
        ("olmoe", 2, {"tp": 2}),
        ("olmoe", 2, {"ep": 2}),
        ("deepseek_v3", 2, {"tp": 2}),
        ("deepseek_v3", 4, {"tp": 2, "ep": 2}),
        ("llama, tied, biases", 2, {"pp": 2}),
        ("bloom", 4, {"tp": 2, "pp": 2}),
        ("deepseek_v3", 4, {"pp": 2, "ep": 2}),
    ],
)
@pytest.mark.parametrize("options", [SamplingOptions(0.0), SamplingOptions(1.0, top_k=20)])
def test_ranks_write_what_one_process_does(
    checkpoint_of: Callable[[str], Path],
    run_ranks: Callable[..., list[Any]],
    name: str,
    ranks: int,
    layout: dict[str, int],
    options: SamplingOptions,
) -> None:
    run = checkpoint_of(name)
    expected = written(run, "fp64", options)
    assert run_ranks(ranks, partial(written, **layout), run, "fp64", options) == [expected] * ranks


def test_a_hugging_face_model_is_divided_over_ranks(
    tmp_path: Path, checkpoint_of: Callable[[str], Path], run_ranks: Callable[..., list[Any]]
) -> None:
    run = checkpoint_of("deepseek_v3")
    export_hf(run, tmp_path / "hf", run / "train")
    expected = written(tmp_path / "hf", "fp64")
    assert run_ranks(2, partial(written, tp=2), tmp_path / "hf", "fp64") == [expected] * 2


def test_ranks_go_on_past_the_context_of_a_text_that_has_ended(
    checkpoint_of: Callable[[str], Path], run_ranks: Callable[..., list[Any]]
) -> None:
    """Learned positions end with the context: the longer text's steps are computed for the shorter one's rank, too."""
    run = checkpoint_of("gpt2")
    prompts = ["grain " * 15, "a mill"]
    expected = written(run, "fp64", prompts=prompts, tokens=60)
    assert len(expected[0][0]) + len(expected[0][1]) == 64 and len(expected[1][1]) > 40
    assert run_ranks(2, partial(written, prompts=prompts, tokens=60), run, "fp64") == [expected] * 2
