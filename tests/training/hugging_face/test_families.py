"""Each family beside transformers' own model, in float64: logits and every gradient, of configurations at random."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from gristmill_parity.reference_models import tensor_in_memory
from training.hugging_face.hf_config import read_hf_config
from training.hugging_face.hf_tensors import HFTensor, hf_tensors, parameters_of
from training.model.decoder import Decoder

LENGTH, VOCABULARY = 12, 50
# how far logits, and gradients, may be: BLOOM writes a constant of its GELU with eight digits
LIMITS = {"bloom": (1e-7, 1e-6)}


@contextmanager
def all_in_float64() -> Iterator[None]:
    """transformers computes rotary angles and norms in float32 whatever the model's dtype; here it does not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        yield


def llama_sizes(draw: random.Random) -> dict[str, Any]:
    heads = draw.choice([2, 4])
    return {
        "vocab_size": VOCABULARY, "num_attention_heads": heads, "num_key_value_heads": draw.choice([1, 2, heads]),
        "hidden_size": heads * draw.choice([4, 6]), "intermediate_size": draw.choice([20, 32]), "num_hidden_layers": 2,
        "max_position_embeddings": 16, "rms_norm_eps": draw.choice([1e-3, 1e-5]),
        "tie_word_embeddings": draw.random() < 0.5, "rope_parameters": rope(draw),
    }  # fmt: skip


def rope(draw: random.Random) -> dict[str, Any]:
    scaled = {"rope_theta": draw.choice([100.0, 10_000.0]), "factor": draw.choice([2.0, 8.0])}
    turning = scaled | {"original_max_position_embeddings": draw.choice([8, 64])}
    yarn = {"rope_type": "yarn", "beta_slow": 1.0, "beta_fast": draw.choice([4.0, 32.0])}
    return draw.choice([
        {"rope_theta": 500.0, "rope_type": "default"},
        scaled | {"rope_type": "linear"},
        turning | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        turning | yarn | {"truncate": draw.random() < 0.5},
    ])  # fmt: skip


def qwen_window(draw: random.Random) -> dict[str, Any]:
    return {"use_sliding_window": draw.random() < 0.5, "sliding_window": 5, "max_window_layers": 0}


def gpt2(draw: random.Random) -> transformers.PretrainedConfig:
    activation = draw.choice(["gelu_new", "gelu", "relu"])
    return transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=24, n_head=draw.choice([3, 4]), n_layer=2, n_positions=16,
        n_inner=draw.choice([None, 20]), activation_function=activation, tie_word_embeddings=draw.random() < 0.5,
        layer_norm_epsilon=draw.choice([1e-3, 1e-5]),
    )  # fmt: skip


def gpt_neox(draw: random.Random) -> transformers.PretrainedConfig:
    parameters = rope(draw) | {"partial_rotary_factor": draw.choice([0.25, 0.5, 1.0])}
    return transformers.GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=24, num_attention_heads=3, num_hidden_layers=2, intermediate_size=20,
        max_position_embeddings=16, rope_parameters=parameters, use_parallel_residual=draw.random() < 0.5,
        attention_bias=draw.random() < 0.5, hidden_act=draw.choice(["gelu", "gelu_fast", "relu"]),
        tie_word_embeddings=draw.random() < 0.5, layer_norm_eps=draw.choice([1e-3, 1e-5]),
    )  # fmt: skip


def bloom(draw: random.Random) -> transformers.PretrainedConfig:
    return transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=24, n_head=draw.choice([2, 3, 4, 6, 12]), n_layer=2,
        layer_norm_epsilon=draw.choice([1e-3, 1e-5]), tie_word_embeddings=draw.random() < 0.5, seq_length=16,
    )  # fmt: skip


def opt(draw: random.Random) -> transformers.PretrainedConfig:
    return transformers.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=24, num_attention_heads=draw.choice([3, 4]), num_hidden_layers=2,
        ffn_dim=20, max_position_embeddings=16, word_embed_proj_dim=24, pad_token_id=None, dropout=0.0,
        activation_function=draw.choice(["relu", "gelu"]), tie_word_embeddings=draw.random() < 0.5,
    )  # fmt: skip


def deepseek_v3(draw: random.Random) -> dict[str, Any]:
    mscale = {"mscale": draw.choice([0.7, 1.0]), "mscale_all_dim": draw.choice([0.5, 1.0])}
    plain, scaled = {"rope_type": "default", "rope_theta": 500.0}, {"rope_theta": 100.0, "factor": 8.0, **mscale}
    return {
        "q_lora_rank": draw.choice([None, 6]), "kv_lora_rank": 10, "qk_nope_head_dim": draw.choice([4, 6]),
        "qk_rope_head_dim": draw.choice([2, 6]), "v_head_dim": draw.choice([3, 6]), "moe_intermediate_size": 8,
        "n_routed_experts": 6, "n_shared_experts": draw.choice([1, 2]), "num_experts_per_tok": draw.choice([1, 3]),
        "n_group": draw.choice([1, 3]), "topk_group": 1, "first_k_dense_replace": draw.choice([0, 1]),
        "norm_topk_prob": draw.random() < 0.5, "routed_scaling_factor": draw.choice([1.0, 2.5]),
        "rope_parameters": draw.choice([plain, scaled | {"rope_type": "yarn", "original_max_position_embeddings": 8}]),
    }  # fmt: skip


OTHERS = {"gpt2": gpt2, "gpt_neox": gpt_neox, "bloom": bloom, "opt": opt}
FAMILY_NAMES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "deepseek_v3",
    "gpt_oss",
    *OTHERS,
]


def at_random(name: str, seed: int) -> transformers.PretrainedConfig:
    draw = random.Random(f"{name} {seed}")
    if name in OTHERS:
        return OTHERS[name](draw)
    sizes, bias = llama_sizes(draw), draw.random() < 0.5
    head_dim = {"head_dim": draw.choice([4, 8])}
    if name == "llama":
        return transformers.LlamaConfig(**sizes, **head_dim, attention_bias=bias, mlp_bias=draw.random() < 0.5)
    if name == "mistral":
        return transformers.MistralConfig(**sizes, **head_dim, sliding_window=draw.choice([None, 1, 3, 5, 11, 12]))
    if name == "gpt_oss":
        kinds = draw.choice([["full_attention"], ["sliding_attention"], ["sliding_attention", "full_attention"]]) * 2
        layers = {"layer_types": kinds[:2], "sliding_window": draw.choice([1, 5]), "attention_bias": bias}
        return transformers.GptOssConfig(**sizes, **head_dim, num_local_experts=4, num_experts_per_tok=2, **layers)
    if name == "mixtral":
        experts = {"num_local_experts": draw.choice([2, 5]), "num_experts_per_tok": draw.choice([1, 2])}
        return transformers.MixtralConfig(**sizes, **head_dim, **experts, sliding_window=draw.choice([None, 5]))
    if name == "deepseek_v3":
        own = deepseek_v3(draw)
        own["num_experts_per_tok"] = min(own["num_experts_per_tok"], 6 // own["n_group"])
        return transformers.DeepseekV3Config(**sizes | own | {"num_key_value_heads": sizes["num_attention_heads"]})
    experts = {"num_experts": draw.choice([3, 6]), "num_experts_per_tok": 2, "norm_topk_prob": draw.random() < 0.5}
    if name == "olmoe":
        return transformers.OlmoeConfig(**sizes, **experts, attention_bias=bias, pad_token_id=None)
    if name == "qwen3_moe":
        layers = {"mlp_only_layers": draw.choice([[], [0]]), "decoder_sparse_step": draw.choice([1, 2])}
        experts |= {"moe_intermediate_size": draw.choice([8, 12]), **head_dim, **layers, "attention_bias": bias}
        return transformers.Qwen3MoeConfig(**sizes, **experts, **qwen_window(draw))
    if name == "qwen2":
        return transformers.Qwen2Config(**sizes, **qwen_window(draw))
    return transformers.Qwen3Config(**sizes, **head_dim, **qwen_window(draw), attention_bias=bias)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_logits_and_every_gradient_are_those_of_transformers(name: str, seed: int) -> None:
    config = at_random(name, seed)
    family, model = read_hf_config(config.to_dict())
    assert family.model_type == name
    torch.manual_seed(seed)
    ids, targets = torch.randint(VOCABULARY, (2, 3, LENGTH))
    with all_in_float64():
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        theirs = transformers.AutoModelForCausalLM.from_config(config, **plain).double().eval()
        tensors = hf_tensors(family, model)
        for parameter in theirs.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
        for tensor in (tensor for tensor in tensors if tensor.layout == "buffer"):
            theirs.get_buffer(tensor.name).normal_(0, 0.1)
        wanted = theirs(ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(wanted.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    ours = Decoder(model).double()
    with torch.no_grad():
        for part, values in parameters_of(in_files(theirs, tensors, family.head, "data")).items():
            ours.get_parameter(part).copy_(values)
        for tensor in (tensor for tensor in tensors if tensor.layout == "buffer"):
            ours.get_buffer(tensor.parameters[0]).copy_(theirs.get_buffer(tensor.name))
    of_logits, of_gradients = LIMITS.get(name, (1e-11, 1e-10))
    torch.testing.assert_close(ours(ids), wanted, rtol=0, atol=of_logits)
    ours(ids, targets).backward()
    count = sum(parameter.numel() for parameter in theirs.parameters())
    gradients = parameters_of(in_files(theirs, tensors, family.head, "grad"))
    assert (
        count == sum(map(Tensor.numel, gradients.values())) and gradients.keys() == dict(ours.named_parameters()).keys()
    )
    for part, gradient in gradients.items():
        torch.testing.assert_close(ours.get_parameter(part).grad, gradient, rtol=1e-9, atol=of_gradients, msg=part)


def in_files(
    theirs: transformers.PreTrainedModel, tensors: list[HFTensor], head: str, kind: str
) -> list[tuple[HFTensor, Tensor]]:
    """The "data" or "grad" of transformers' model, tensor by tensor of its files."""
    return [
        (tensor, tensor_in_memory(theirs, tensor.name, head, kind)) for tensor in tensors if tensor.layout != "buffer"
    ]
