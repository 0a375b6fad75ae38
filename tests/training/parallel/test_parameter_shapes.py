"""Parameter shapes beside the decoder's own."""

from dataclasses import replace

import pytest

from training.experimental.parallel_config import ParallelConfig
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig
from training.parallel.parameter_shapes import stage_parameters
from training.parallel.placement_table import placement_table
from training.sharding.axis import Axis

SIZES = ModelConfig(layers=3, width=64, heads=4, kv_heads=2, bias=True)
MODELS = {
    "llama": SIZES,
    "gpt2": replace(SIZES, preset="gpt2"),
    "wide heads": replace(SIZES, head_dim=24, out_bias=False),
    "norms of heads": replace(SIZES, qk_norm=True, mlp_bias=False),
    **{
        name: replace(SIZES, preset=name, kv_heads=4, bias=None)
        for name in ("gpt-neox", "bloom", "opt", "glm", "codegeex")
    },
    "a head of keys": replace(SIZES, kv_heads=1, qk_norm=True),
    "latent": replace(SIZES, kv_heads=4, bias=False, q_lora_rank=20, kv_lora_rank=12, v_head_dim=6, mlp_bias=True),
    "latent, without a vector of queries": replace(SIZES, kv_heads=4, bias=False, kv_lora_rank=12),
    "sinks": replace(SIZES, sinks=True, experts=4, router_bias=True, expert_width=8),
    "norms of heads with biases": replace(SIZES, preset="gpt2", qk_norm=True),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_shapes_are_those_of_the_decoder(name: str, tp: int, rank: int) -> None:
    model = MODELS[name].resolve(511, 32)
    decoder = meta_decoder(model)
    table = placement_table(decoder, ParallelConfig(tp=tp))
    axes = {"tp": Axis("tp", tp, rank, None), "ep": Axis("ep", 1, 0, None)}
    shards = {name: table[name].without("shard").without("expert_shard") for name, _ in decoder.named_parameters()}
    expected = [
        (name, shards[name].piece(tuple(p.shape), axes).size, tp > 1 and "tp" in shards[name].shard)
        for name, p in decoder.named_parameters()
    ]
    found = stage_parameters(model, range(3), first=True, last=True, tp=tp, tp_rank=rank)
    assert [(p.name, p.shape, p.divided) for p in found] == expected


def test_a_stage_has_its_layers_and_ends() -> None:
    model = ModelConfig(preset="gpt2", layers=3, width=64, heads=4).resolve(511, 32)
    names = [p.name for p in stage_parameters(model, range(2, 3), first=False, last=True)]
    assert names[0] == "blocks.2.attention_norm.weight" and names[-1] == "head.weight"
    assert {p.unit for p in stage_parameters(model, range(2), first=True, last=False)} == {"embed", "0", "1"}
