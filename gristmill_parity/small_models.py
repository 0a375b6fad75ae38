"""Small models of the parity certificate: what a published model's preset becomes in one that trains in a second."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from training.model.model_config import ModelConfig
from training.presets.presets import find_preset

VOCAB_SIZE = 67  # a prime: never divisible by the number of processes
SEQ_LEN = 24
Preset = str  # of the model


@dataclass(frozen=True)
class Shrunk:
    """What a published model's preset becomes in a small model, beside the sizes of all of them."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Values of ModelConfig's fields: small enough that its parts do something in a sequence of SEQ_LEN tokens."""
    in_transformers: bool = True
    """True if transformers has the model."""
    has_own_parts: bool = True
    """False if another preset has its parts; it is then only in the full certificate."""


SHRUNK = {
    "llama-3.2-1b": Shrunk({"rope_original_context": 64}),
    "mistral-7b": Shrunk({"window": 7}),
    "qwen2.5-0.5b": Shrunk(),
    "qwen3-0.6b": Shrunk({"head_dim": 20}),
    "gpt-neox-20b": Shrunk({"rope_fraction": 0.34}),
    "bloom-176b": Shrunk({"ffn_width": 384, "heads": 6, "kv_heads": 6}),  # 112 heads are no power of two
    "opt-175b": Shrunk({"init_std": 0.05}),  # with larger ones rounding moves an input across ReLU's kink in 50 steps
    "glm-130b": Shrunk(in_transformers=False),
    "codegeex-13b": Shrunk(in_transformers=False),
    "llama-2-7b": Shrunk(has_own_parts=False),
    "llama-3.1-8b": Shrunk({"rope_original_context": 64}, has_own_parts=False),
    "gpt2-124m": Shrunk(has_own_parts=False),
    "mt-nlg-530b": Shrunk(has_own_parts=False),
    "pythia-160m": Shrunk({"rope_fraction": 0.34}, has_own_parts=False),
    "bloom-560m": Shrunk({"ffn_width": 384}, has_own_parts=False),
    "opt-125m": Shrunk({"init_std": 0.05}, has_own_parts=False),
}


def small_model(
    preset: Preset, layers: int, heads: int = 48, dropout: float = 0.0, init_std: float = 0.2
) -> ModelConfig:
    """Configuration of a small model; its default number of heads is divisible by 2, 3, 4, 6 and 8.

    The default initial weights are large enough that every gradient matters.
    """
    sizes = {"layers": layers, "width": 96, "heads": heads, "ffn_width": 96, "dropout": dropout, "init_std": init_std}
    grouped = preset == "llama" or "kv_heads" in find_preset(preset).options
    sizes |= {"kv_heads": heads // 2 if grouped else heads, "vocab_size": VOCAB_SIZE, "context": SEQ_LEN}
    options = SHRUNK[preset].options if preset in SHRUNK else {}
    return ModelConfig(preset=preset, **{**sizes, **options}).resolve(VOCAB_SIZE, SEQ_LEN)
