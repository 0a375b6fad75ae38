"""Benchmark: `gristmill generate` beside transformers' `generate`, both greedy, in float32 and on one core.

    python benchmarks/bench_generation.py OUT/hf

OUT/hf is what `gristmill export_hf` writes, or another model of transformers with its tokenizer. Both continue the same
prompt, in turns and in one process, and count seconds of the CPU, which other programs on the machine do not change.
Ours makes text of the tokens, theirs does not.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import torch
import transformers
import tyro

from benchmarks.dedup_tables import markdown
from gristmill.command import run_with_exit_code
from training.distributed.process_group import init_distributed
from training.generation.loop import TextGenerator
from training.generation.sampling import SamplingOptions, text_generator
from training.generation.text import Text
from training.language_model import LanguageModel, open_language_model

PROMPT = "The mill turns grain into flour"


def bench_generation(
    model: tyro.conf.Positional[Path], tokens: int = 80, batches: tuple[int, ...] = (1, 8), rounds: int = 5
) -> str:
    """Print tokens per second of both, and the median over the rounds of how much faster ours is.

    Args:
        model: Folder of a Hugging Face model.
        tokens: Tokens that follow the prompt.
        batches: Numbers of texts that are written together.
        rounds: How often each is measured.
    """
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    rows = []
    with init_distributed("cpu") as device:
        ours = open_language_model(model, device)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        prompt = ours.begins(PROMPT)
        for size in batches:
            prompts = [prompt] * size
            rows.append([str(size), *_compare(ours, theirs, prompts, tokens, rounds)])
    head = ("texts together", "gristmill, tokens/s", "transformers, tokens/s", "times as fast", "same tokens")
    return markdown(f"{model.name}, {tokens} tokens after {len(prompt)}", head, rows, [])


def _compare(
    ours: LanguageModel, theirs: transformers.PreTrainedModel, prompts: list[list[int]], tokens: int, rounds: int
) -> list[str]:
    """Return the cells of one row."""

    def write_ours() -> list[list[int]]:
        return _write_ours(ours, prompts, tokens)

    def write_theirs() -> list[list[int]]:
        return _write_theirs(theirs, prompts, tokens)

    is_same = write_ours() == write_theirs()  # and both are warm
    times = [(_cpu_seconds(write_ours), _cpu_seconds(write_theirs)) for _ in range(rounds)]
    count = len(prompts) * tokens
    our_rate = count / min(mine for mine, _ in times)
    their_rate = count / min(other for _, other in times)
    ratio = median(other / mine for mine, other in times)
    return [f"{our_rate:,.0f}", f"{their_rate:,.0f}", f"{ratio:.2f}", "yes" if is_same else "no"]


def _write_ours(model: LanguageModel, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    texts = [Text(prompt, tokens, model.tokenizer) for prompt in prompts]
    nothing_hidden = torch.zeros_like(model.hidden)
    generator = TextGenerator(model.cache, SamplingOptions(temperature=0.0), frozenset(), nothing_hidden)
    for _ in generator.extend(texts, [text_generator(0, number) for number in range(len(texts))]):
        pass
    return [text.tokens for text in texts]


def _write_theirs(model: transformers.PreTrainedModel, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    ids = torch.tensor(prompts)
    options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with_prompts = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    written: list[list[int]] = with_prompts[:, ids.shape[1] :].tolist()
    return written


def _cpu_seconds(action: Callable[[], object]) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: print(tyro.cli(bench_generation))))
