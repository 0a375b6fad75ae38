"""Each family beside transformers' own model, in float64: logits and every gradient, of configurations at random."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from training.hugging_face.hf_config import read_hf_config
from training.hugging_face.hf_tensors import hf_tensors
from training.model.decoder import Decoder

LENGTH, VOCABULARY = 12, 50


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
    return draw.choice([
        {"rope_theta": 500.0, "rope_type": "default"},
        scaled | {"rope_type": "linear"},
        turning | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        turning | {"rope_type": "yarn", "beta_slow": 1.0, "beta_fast": draw.choice([4.0, 32.0])},
    ])  # fmt: skip


def qwen_window(draw: random.Random) -> dict[str, Any]:
    return {"use_sliding_window": draw.random() < 0.5, "sliding_window": 5, "max_window_layers": 0}


def at_random(name: str, seed: int) -> transformers.PretrainedConfig:
    draw = random.Random(f"{name} {seed}")
    sizes, bias = llama_sizes(draw), draw.random() < 0.5
    head_dim = {"head_dim": draw.choice([4, 8])}
    if name == "llama":
        return transformers.LlamaConfig(**sizes, **head_dim, attention_bias=bias, mlp_bias=draw.random() < 0.5)
    if name == "mistral":
        return transformers.MistralConfig(**sizes, **head_dim, sliding_window=draw.choice([None, 1, 3, 5, 11, 12]))
    if name == "qwen2":
        return transformers.Qwen2Config(**sizes, **qwen_window(draw))
    return transformers.Qwen3Config(**sizes, **head_dim, **qwen_window(draw), attention_bias=bias)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_and_every_gradient_are_those_of_transformers(name: str, seed: int) -> None:
    config = at_random(name, seed)
    family, model = read_hf_config(config.to_dict())
    assert family.model_type == name
    torch.manual_seed(seed)
    ids, targets = torch.randint(VOCABULARY, (2, 3, LENGTH))
    with all_in_float64():
        theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
        tensors = {tensor.name: tensor for tensor in hf_tensors(family, model)}
        parameters = dict(theirs.named_parameters())
        for parameter in parameters.values():
            parameter.data += 0.3 * torch.randn_like(parameter)
        wanted = theirs(ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(wanted.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    ours = Decoder(model).double()
    with torch.no_grad():
        for name_, tensor in tensors.items():
            for part, values in tensor.parameters_of(parameters[name_].data).items():
                ours.get_parameter(part).copy_(values)
    torch.testing.assert_close(ours(ids), wanted, rtol=0, atol=1e-11)
    ours(ids, targets).backward()
    assert parameters.keys() == tensors.keys()
    for name_, tensor in tensors.items():
        for part, gradient in tensor.parameters_of(parameters[name_].grad).items():
            torch.testing.assert_close(ours.get_parameter(part).grad, gradient, rtol=1e-9, atol=1e-10, msg=part)
