"""Benchmark: `gristmill generate` beside transformers' `generate`, both greedy, in float32 and on one core.

    python benchmarks/bench_generation.py OUT/hf
    python benchmarks/bench_generation.py OUT/hf --families llama mixtral bloom …

OUT/hf is what `gristmill export_hf` writes, or another model of transformers with its tokenizer. Both continue the same
prompt, in turns and in one process, and count seconds of the CPU, which other programs on the machine do not change.
Ours makes text of the tokens, theirs does not. With --families small random models of these families are measured in
place of the model, all of one size and with its tokenizer.
"""

import json
import shutil
import sys
import tempfile
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
from training.hugging_face.families import FAMILIES
from training.hugging_face.hf_config import CONFIG_FILE, TOKEN_IDS
from training.language_model import LanguageModel, open_language_model

PROMPT = "The mill turns grain into flour"
HEAD = ("model", "texts together", "gristmill, tokens/s", "transformers, tokens/s", "times as fast", "same tokens")


def bench_generation(
    model: tyro.conf.Positional[Path],
    tokens: int = 80,
    batches: tuple[int, ...] = (1, 8),
    rounds: int = 5,
    families: tuple[str, ...] = (),
    width: int = 256,
) -> str:
    """Print tokens per second of both, and the median over the rounds of how much faster ours is.

    Args:
        model: Folder of a Hugging Face model.
        tokens: Tokens that follow the prompt.
        batches: Numbers of texts that are written together.
        rounds: How often each is measured.
        families: Measure random models of these families, with the model's tokenizer; all: every one.
        width: Of these models, which have 4 layers.
    """
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # of sizes that are small
    names = tuple(FAMILIES) if families == ("all",) else families
    rows = []
    with init_distributed("cpu") as device, tempfile.TemporaryDirectory() as folder:
        for name in names or (model.name,):
            measured = _random_model(name, model, Path(folder) / name, width) if names else model
            ours = open_language_model(measured, device)
            theirs = transformers.AutoModelForCausalLM.from_pretrained(measured, dtype=torch.float32)
            theirs.generation_config = transformers.GenerationConfig()  # the model's own hides tokens, and ends texts
            prompt = ours.begins(PROMPT)
            for size in batches:
                rows.append([name, str(size), *_compare(ours, theirs, [prompt] * size, tokens, rounds)])
    return markdown(f"{tokens} tokens after a prompt, on one core", HEAD, rows, [])


def _random_model(family: str, model: Path, folder: Path, width: int) -> Path:
    """Save a random model of a family, with the tokenizer of another model."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns(CONFIG_FILE, "*.safetensors", "*.index.json"))
    config = json.loads((model / CONFIG_FILE).read_text())
    sizes = _sizes(width) | {name: config[name] for name in ("vocab_size", *TOKEN_IDS)}
    known = {*FAMILIES[family].defaults, *FAMILIES[family].aliases, *TOKEN_IDS}
    chosen = {name: value for name, value in sizes.items() if name in known}
    torch.manual_seed(1)
    theirs = transformers.AutoConfig.for_model(family, **chosen)
    transformers.AutoModelForCausalLM.from_config(theirs).save_pretrained(folder)
    return folder


def _sizes(width: int) -> dict[str, int | float]:
    """Return sizes of a small model, by all names that a family has for them."""
    layers = dict.fromkeys(("num_hidden_layers", "n_layer"), 4)
    widths = dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), width)
    heads = dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads"), 4)
    of_head = dict.fromkeys(("head_dim", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"), width // 4)
    of_mlp = {"intermediate_size": 4 * width, "ffn_dim": 4 * width, "moe_intermediate_size": width // 2}
    experts = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 8)
    chosen = {"num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
    contexts = dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length"), 512)
    others = {"qk_rope_head_dim": width // 8, "sliding_window": 32, "initializer_range": 0.1, "init_std": 0.1}
    return layers | widths | heads | of_head | of_mlp | experts | chosen | contexts | others


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
