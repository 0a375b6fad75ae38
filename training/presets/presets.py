"""Presets: options of the decoder by name, for families of models and for published models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gristmill.arguments import one_of
from gristmill.errors import UsageError

_TURNS = ("rope_factor", "rope_original_context", "rope_low", "rope_high")
# Numbers that each kind of RoPE's scaling uses; yarn uses all
_SCALED_BY = {
    "linear": _TURNS[:1],
    "llama3": _TURNS,
    "yarn": (*_TURNS, "rope_attention_factor", "rope_mscale_all_dim", "rope_truncate"),
}


@dataclass(frozen=True)
class Preset:
    """Values of ModelConfig's fields that a run does not give itself."""

    options: Mapping[str, Any]
    parameters: int = 0
    """The published count; 0 for a family, whose sizes are ours."""
    source: str = ""
    """Where the sizes and the count are from."""
    rounded_to: int = 1
    """The published count is a multiple of this."""
    active: int = 0
    """The published count of parameters that a token uses, of a sparse model; a multiple of 100 million."""
    active_of: Literal["all", "all but the embedding"] = "all"
    """Parameters among which a token's are counted."""

    def options_given(self, rope_scaling: str | None, balance: str | None) -> dict[str, Any]:
        """Return the options, without those numbers for which a kind of RoPE's scaling, or of balance, has no use.

        Either takes the preset's place unless it is None.
        """
        left_out = {*_SCALED_BY["yarn"]} - {*_SCALED_BY.get(rope_scaling or "yarn", ())}
        left_out |= {"balance_loss", "balance_rate"} if balance else set()
        return {key: value for key, value in self.options.items() if key not in left_out}


def find_preset(name: str) -> Preset:
    """Return the preset of this name. Raises UsageError for an unknown one, naming the most similar."""
    if name not in PRESETS:
        raise UsageError(f"model.preset is {name!r}, but there is no such preset; {one_of(name, PRESETS)}")
    return PRESETS[name]


_SIZES = {"layers": 4, "width": 256, "heads": 4, "rope_base": 10_000.0, "norm_eps": 1e-5, "init_std": 0.02}
# Touvron et al. 2023, "LLaMA", section 2.2
LLAMA = {**_SIZES, "norm": "rms", "positions": "rope", "mlp": "swiglu", "bias": False, "tied": False}
# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3
GPT2 = {**_SIZES, "norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True, "tied": True}
# Llama team 2024, "The Llama 3 herd of models", section 3.2; the scaling of RoPE is in its published code
LLAMA3 = {
    **LLAMA, "vocab_size": 128_256, "context": 131_072, "rope_base": 500_000.0, "rope_scaling": "llama3",
    "rope_original_context": 8192,
}  # fmt: skip
# Qwen team 2024, "Qwen2 technical report", section 2.2.1
QWEN = {**LLAMA, "vocab_size": 151_936, "rope_base": 1_000_000.0, "norm_eps": 1e-6, "tied": True}
# Black et al. 2022, "GPT-NeoX-20B", section 2.1
GPT_NEOX = {
    **_SIZES, "norm": "layer", "positions": "rope", "rope_fraction": 0.25, "residual": "parallel", "mlp": "gelu-exact",
    "bias": True, "tied": False,
}  # fmt: skip
# BigScience 2022, "BLOOM", section 3.2
BLOOM = {**GPT2, "positions": "alibi", "embed_norm": True}
# Zhang et al. 2022, "OPT", section 2.1; the offset is in its published code
OPT = {**GPT2, "position_offset": 2, "mlp": "relu"}
# Zeng et al. 2022, "GLM-130B", section 2.1; here without its bidirectional prefix
GLM = {**GPT2, "positions": "rope", "residual": "deepnorm", "mlp": "geglu"}
# Zheng et al. 2023, "CodeGeeX", section 2.1
CODEGEEX = {**GPT2, "query_layer": True, "mlp": "gelu-fast"}

PRESETS: dict[str, Preset] = {
    "llama": Preset(LLAMA),
    "gpt2": Preset(GPT2),
    "gpt-neox": Preset(GPT_NEOX),
    "bloom": Preset(BLOOM),
    "opt": Preset(OPT),
    "glm": Preset(GLM),
    "codegeex": Preset(CODEGEEX),
    "gpt2-124m": Preset(
        {**GPT2, "layers": 12, "width": 768, "heads": 12, "vocab_size": 50_257, "context": 1024},
        124_439_808,
        "config.json of openai-community/gpt2",
    ),
    "llama-2-7b": Preset(
        {
            **LLAMA, "layers": 32, "width": 4096, "heads": 32, "ffn_width": 11_008, "vocab_size": 32_000,
            "context": 4096,
        },
        6_738_415_616,
        "config.json of meta-llama/Llama-2-7b-hf",
    ),
    "llama-3.1-8b": Preset(
        {
            **LLAMA3, "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "ffn_width": 14_336, "rope_factor": 8.0,
        },
        8_030_261_248,
        "config.json of meta-llama/Llama-3.1-8B",
    ),
    "llama-3.2-1b": Preset(
        {
            **LLAMA3, "layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "ffn_width": 8192, "rope_factor": 32.0,
            "tied": True,
        },
        1_235_814_400,
        "config.json of meta-llama/Llama-3.2-1B",
    ),
    "mistral-7b": Preset(
        {
            **LLAMA, "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "ffn_width": 14_336,
            "vocab_size": 32_000, "context": 32_768, "window": 4096,
        },
        7_241_732_096,
        "config.json of mistralai/Mistral-7B-v0.1",
    ),
    "qwen2.5-0.5b": Preset(
        {
            **QWEN, "layers": 24, "width": 896, "heads": 14, "kv_heads": 2, "ffn_width": 4864, "context": 32_768,
            "qkv_bias": True,
        },
        494_032_768,
        "config.json of Qwen/Qwen2.5-0.5B",
    ),
    "qwen3-0.6b": Preset(
        {
            **QWEN, "layers": 28, "width": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn_width": 3072,
            "context": 40_960, "qk_norm": True,
        },
        596_049_920,
        "config.json of Qwen/Qwen3-0.6B",
    ),
    "mixtral-8x7b": Preset(
        {
            **LLAMA, "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "ffn_width": 14_336, "experts": 8,
            "experts_per_token": 2, "vocab_size": 32_000, "context": 32_768, "rope_base": 1_000_000.0,
        },
        46_700_000_000,
        "config.json of mistralai/Mixtral-8x7B-v0.1; counts of Mistral AI 2023, \"Mixtral of experts\"",
        10**8,
        12_900_000_000,
    ),
    "qwen3-30b-a3b": Preset(
        {
            **QWEN, "layers": 48, "width": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "ffn_width": 6144,
            "experts": 128, "experts_per_token": 8, "expert_width": 768, "context": 40_960, "qk_norm": True,
            "tied": False,
        },
        30_500_000_000,
        "config.json and model card of Qwen/Qwen3-30B-A3B",
        10**8,
        3_300_000_000,
    ),
    "olmoe-1b-7b": Preset(
        {
            **LLAMA, "layers": 16, "width": 2048, "heads": 16, "ffn_width": 1024, "experts": 64,
            "experts_per_token": 8, "router_normalize": False, "vocab_size": 50_304, "context": 4096,
            "qk_norm": True, "qk_norm_joint": True,
        },
        6_900_000_000,
        "config.json of allenai/OLMoE-1B-7B-0924; counts of Muennighoff et al. 2024, table 1",
        10**8,
        1_300_000_000,
    ),
    "deepseek-v3": Preset(
        {
            **LLAMA, "layers": 61, "width": 7168, "heads": 128, "ffn_width": 18_432, "vocab_size": 129_280,
            "context": 163_840, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "experts": 256, "experts_per_token": 8, "expert_width": 2048,
            "shared_experts": 1, "dense_layers": 3, "router": "sigmoid", "router_scale": 2.5, "expert_groups": 8,
            "groups_per_token": 4, "balance": "bias", "balance_loss": 0.0001, "norm_eps": 1e-6,
            "rope_scaling": "yarn", "rope_factor": 40.0, "rope_original_context": 4096, "rope_attention_factor": 1.0,
            "rope_mscale_all_dim": 1.0,
        },
        671 * 10**9,
        "config.json of deepseek-ai/DeepSeek-V3; counts of its README_WEIGHTS.md, without the MTP module",
        10**9,
        36_700_000_000,
        "all but the embedding",
    ),
    "gpt-oss-20b": Preset(
        {
            **LLAMA, "layers": 24, "width": 2880, "heads": 64, "kv_heads": 8, "head_dim": 64, "ffn_width": 2880,
            "vocab_size": 201_088, "context": 131_072, "qkv_bias": True, "out_bias": True, "mlp_bias": True,
            "sinks": True, "window": 128, "full_attention_every": 2, "mlp": "swiglu-clamped", "experts": 32,
            "experts_per_token": 4, "router_bias": True, "rope_base": 150_000.0, "rope_scaling": "yarn",
            "rope_factor": 32.0, "rope_original_context": 4096, "rope_truncate": False,
        },
        20_910_000_000,
        "config.json of openai/gpt-oss-20b; counts of OpenAI 2025, arXiv 2508.10925, table 1",
        10**7,
        3_610_000_000,
        "all but the embedding",
    ),
    "gpt-neox-20b": Preset(
        {
            **GPT_NEOX, "layers": 44, "width": 6144, "heads": 64, "vocab_size": 50_432, "context": 2048, "mlp": "gelu",
        },
        20_554_567_680,
        "config.json of EleutherAI/gpt-neox-20b",
    ),
    "pythia-160m": Preset(
        {**GPT_NEOX, "layers": 12, "width": 768, "heads": 12, "vocab_size": 50_304, "context": 2048},
        162_322_944,
        "config.json of EleutherAI/pythia-160m",
    ),
    "bloom-560m": Preset(
        {**BLOOM, "layers": 24, "width": 1024, "heads": 16, "vocab_size": 250_880, "context": 2048},
        559_214_592,
        "config.json of bigscience/bloom-560m",
    ),
    "bloom-176b": Preset(
        {**BLOOM, "layers": 70, "width": 14_336, "heads": 112, "vocab_size": 250_880, "context": 2048},
        176_247_271_424,
        "config.json of bigscience/bloom",
    ),
    "opt-125m": Preset(
        {**OPT, "layers": 12, "width": 768, "heads": 12, "vocab_size": 50_272, "context": 2048},
        125_239_296,
        "config.json of facebook/opt-125m",
    ),
    "opt-175b": Preset(
        {**OPT, "layers": 96, "width": 12_288, "heads": 96, "vocab_size": 50_272, "context": 2048},
        175 * 10**9,
        "Zhang et al. 2022, table 1",
        10**9,
    ),
    "glm-130b": Preset(
        {
            **GLM, "layers": 70, "width": 12_288, "heads": 96, "ffn_width": 32_768, "vocab_size": 150_528,
            "context": 2048,
        },
        130 * 10**9,
        "Zeng et al. 2022, table 11",
        10**9,
    ),
    "codegeex-13b": Preset(
        {**CODEGEEX, "layers": 40, "width": 5120, "heads": 40, "vocab_size": 52_224, "context": 2048},
        13 * 10**9,
        "Zheng et al. 2023, table 2",
        10**9,
    ),
    "mt-nlg-530b": Preset(
        {**GPT2, "layers": 105, "width": 20_480, "heads": 128, "vocab_size": 51_200, "context": 2048},
        530 * 10**9,
        "Smith et al. 2022, section 2.1; the vocabulary is padded",
        10**9,
    ),
}  # fmt: skip

# Narayanan et al. 2021, table 1: billions of parameters, width, layers, heads; the vocabulary is padded
_MEGATRON = (
    (1.7, 2304, 24, 24), (3.6, 3072, 30, 32), (7.5, 4096, 36, 32), (18.4, 6144, 40, 48), (39.1, 8192, 48, 64),
    (76.1, 10_240, 60, 80), (145.6, 12_288, 80, 96), (310.1, 16_384, 96, 128), (529.6, 20_480, 105, 128),
    (1008, 25_600, 128, 160),
)  # fmt: skip
PRESETS |= {
    f"megatron-{billions:g}b": Preset(
        {**GPT2, "layers": layers, "width": width, "heads": heads, "vocab_size": 51_200, "context": 2048},
        round(billions * 10**9),
        "Narayanan et al. 2021, table 1",
        10**8,
    )
    for billions, width, layers, heads in _MEGATRON
}
