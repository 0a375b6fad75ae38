"""lm_eval gets the same of a checkpoint as of its export by lm_eval's own backend for transformers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedTokenizerFast

from gristmill.errors import UsageError
from tests.training.hugging_face.test_generation import GENERATED
from training.distributed.process_group import init_distributed
from training.experimental.parallel_config import ParallelConfig
from training.hugging_face.export_hf import export_hf
from training.language_model import open_language_model
from training.tasks.lm_eval_model import GristmillLM

PAIRS = [
    ("the miller", " carries grain"),
    ("the miller", " sells a fine bread 水"),
    ("a slow wheel ", "turns"),
    ("", "the stone"),
    ("grain " * 40, "the mill"),
    ("water", " "),
]
TEXTS = ["the miller carries water", "a river " * 60, "水"]
PROMPTS = ["the miller", "a slow wheel turns", "grain " * 60]
GREEDY = {"until": ["\n\n", "grain"], "max_gen_toks": 12}
SAMPLED = {"until": "t", "do_sample": True, "temperature": 0.9, "top_k": 20, "max_gen_toks": 6}


def requests(kind: Any, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]


def answers(model: Any) -> tuple[list[tuple[float, bool]], list[float], list[str]]:
    return (
        model.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True),
        model.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in TEXTS]), disable_tqdm=True),
        model.generate_until(requests("generate_until", [(prompt, GREEDY) for prompt in PROMPTS]), disable_tqdm=True),
    )


def ours(folder: Path, batch_size: int = 4, **layout: int) -> tuple[list[tuple[float, bool]], list[float], list[str]]:
    with init_distributed("cpu") as device:
        return answers(GristmillLM(open_language_model(folder, device, ParallelConfig(**layout)), batch_size))


def assert_equal(found: Any, expected: Any, tolerance: float) -> None:
    assert [value for value, _ in found[0]] == pytest.approx([value for value, _ in expected[0]], abs=tolerance)
    assert [greedy for _, greedy in found[0]] == [greedy for _, greedy in expected[0]]
    assert found[1] == pytest.approx(expected[1], rel=1e-6, abs=tolerance)
    # SentencePiece writes unknown tokens, and transformers leaves them out
    assert [text.replace(" ⁇ ", "") for text in found[2]] == [text.replace(" ⁇ ", "") for text in expected[2]]


@pytest.mark.parametrize("name", GENERATED)
def test_answers_are_those_of_lm_eval_s_own_backend(
    tmp_path: Path, checkpoint_of: Callable[[str], Path], name: str
) -> None:
    run = checkpoint_of(name)
    export_hf(run, tmp_path / "hf", run / "train")
    found = ours(run)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf")  # AutoTokenizer has Qwen2's own one
    theirs = HFLM(str(tmp_path / "hf"), tokenizer=tokenizer, device="cpu", dtype="float32", batch_size=2)
    assert_equal(found, answers(theirs), 1e-5)
    assert any(text for text in found[2]) and len({value for value, _ in found[0]}) == len(PAIRS)


@pytest.mark.parametrize(
    ("name", "ranks", "layout"),
    [
        ("llama, yarn", 2, {"tp": 2}),
        ("bloom, 3 heads", 2, {"pp": 2}),
        ("gpt_oss", 2, {"ep": 1}),
        ("deepseek_v3", 4, {"tp": 2, "pp": 2}),
    ],
)
def test_answers_do_not_depend_on_ranks_or_batches(
    checkpoint_of: Callable[[str], Path],
    run_ranks: Callable[..., list[Any]],
    name: str,
    ranks: int,
    layout: dict[str, int],
) -> None:
    run = checkpoint_of(name)
    expected = ours(run)
    assert_equal(ours(run, batch_size=1), expected, 1e-5)
    for found in run_ranks(ranks, partial(ours, **layout), run):
        assert_equal(found, expected, 1e-5)


def test_options_of_a_task_are_those_of_sampling(checkpoint_of: Callable[[str], Path]) -> None:
    with init_distributed("cpu") as device:
        model = GristmillLM(open_language_model(checkpoint_of("llama, yarn"), device))
        sampled = model.generate_until(requests("generate_until", [(prompt, SAMPLED) for prompt in PROMPTS]))
        again = model.generate_until(requests("generate_until", [(prompt, SAMPLED) for prompt in PROMPTS]))
        greedy = {**SAMPLED, "do_sample": False}
        assert (
            sampled
            == again
            != model.generate_until(requests("generate_until", [(prompt, greedy) for prompt in PROMPTS]))
        )
        assert not any("t" in text for text in sampled)
        with pytest.raises(UsageError, match=r"num_beams.*which is not known here"):
            model.generate_until(requests("generate_until", [("a", {"num_beams": 3})]))
        with pytest.raises(UsageError, match=r"a task's answer has 80 tokens, and the model's context is 64"):
            model.loglikelihood(requests("loglikelihood", [("a", " grain" * 80)]), disable_tqdm=True)
