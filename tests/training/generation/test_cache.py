"""A decoder with a key-value cache computes the logits that it computes without one, for every kind of layer."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.training.hf_models import MODELS, SIZES, build, ids
from training.generation.cache import KeyValueCache, LatentLayerCache
from training.model.decoder import Decoder
from training.model.model_config import ModelConfig

# every family that is exported, and the residual streams and the query layer that none of them has
VARIANTS = MODELS | {
    "deepnorm": replace(SIZES, preset="glm"),
    "query layer": replace(SIZES, preset="gpt2", query_layer=True),
    "all layers with sinks": replace(SIZES, sinks=True, kv_heads=2),
}
LENGTHS = [3, 7, 5]
STEPS = 5


def logits_with_cache(model: Decoder, tokens: Tensor) -> list[list[Tensor]]:
    """Of each text the logits after its prompt and after each further token; the second text ends early."""
    cache = KeyValueCache(model)
    longest = max(LENGTHS)
    prompts = torch.zeros(len(LENGTHS), longest, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        prompts[row, longest - length :] = tokens[row, :length]
    cache.begin(longest - torch.tensor(LENGTHS), longest + STEPS)
    logits = cache.logits(prompts)[:, 0]
    rows = list(range(len(LENGTHS)))
    found: list[list[Tensor]] = [[row] for row in logits]
    for step in range(STEPS):
        if step == 2:
            cache.keep(torch.tensor([0, 2]))
            rows = [0, 2]
        further = torch.stack([tokens[row, LENGTHS[row] + step] for row in rows])
        for row, values in zip(rows, cache.logits(further[:, None])[:, 0], strict=True):
            found[row].append(values)
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_without_a_cache(name: str, dtype: torch.dtype, tolerance: float) -> None:
    model = build(VARIANTS[name]).to(dtype)
    tokens = ids(len(LENGTHS))
    with torch.no_grad():
        expected = model(tokens)
    for row, found in enumerate(logits_with_cache(model, tokens)):
        for step, values in enumerate(found):
            difference = (values - expected[row, LENGTHS[row] - 1 + step]).abs().max()
            assert difference < tolerance * expected.abs().max().clamp(min=1), (name, row, step)


def kept_features(config: ModelConfig, tokens: int) -> list[int]:
    """Numbers that each layer keeps of one text of so many tokens."""
    model = build(config)
    cache = KeyValueCache(model)
    cache.begin(torch.tensor([0]), tokens)
    cache.logits(ids(1, tokens - 3))
    for token in ids(1, 3)[0]:
        cache.logits(token[None, None])
    return [sum(buffer.kept.numel() for buffer in layer.buffers if buffer.kept is not None) for layer in cache.layers]


def test_a_window_keeps_no_more_tokens_than_it_sees() -> None:
    config = replace(SIZES, kv_heads=2, window=4, full_attention_every=2)
    per_token = 2 * 2 * 6  # keys and values of two heads of six features
    assert kept_features(config, 12) == [4 * per_token, 12 * per_token]


def test_latent_attention_keeps_one_vector_a_token_for_all_heads() -> None:
    config = MODELS["deepseek_v3"]
    vector = config.kv_lora_rank + config.qk_rope_head_dim
    assert kept_features(config, 12) == [12 * vector, 12 * vector]
    assert all(isinstance(layer, LatentLayerCache) for layer in KeyValueCache(build(config)).layers)


def test_only_new_tokens_are_computed() -> None:
    model = build(MODELS["llama"])
    cache = KeyValueCache(model)
    shapes: list[tuple[int, ...]] = []
    model.blocks["1"].register_forward_pre_hook(lambda _, arguments: shapes.append(tuple(arguments[0].shape)))
    cache.begin(torch.tensor([0, 2]), 8)
    cache.logits(ids(2, 4))
    cache.logits(ids(2, 1))
    assert shapes == [(2, 4, 24), (2, 1, 24)]


def test_logits_of_several_tokens_are_those_of_each() -> None:
    model = build(MODELS["gpt_oss"]).double()
    with torch.no_grad():
        expected = model(ids(2))
    cache = KeyValueCache(model)
    cache.begin(torch.tensor([0, 0]), 12)
    cache.logits(ids(2)[:, :4])
    torch.testing.assert_close(cache.logits(ids(2)[:, 4:], 5), expected[:, 7:], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["llama, grouped", "mistral", "deepseek_v3", "gpt_oss", "bloom"])
def test_texts_of_one_length_need_no_padding(name: str) -> None:
    model = build(MODELS[name]).double()
    with torch.no_grad():
        expected = model(ids(2))
    cache = KeyValueCache(model)
    cache.begin(torch.tensor([0, 0]), 12)
    torch.testing.assert_close(cache.logits(ids(2), 12), expected, atol=1e-12, rtol=0)
