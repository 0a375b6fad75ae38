import pytest
import torch

import training.parallel.initialize
from training.kernels.keyed_random import keyed_normal, splitmix64
from training.model.decoder import Decoder
from training.model.model_config import ModelConfig
from training.parallel.initialize import init_shard
from training.sharding.shard_spec import ShardSpec


def build(seed: int = 1, layers: int = 2, **sizes: int | str) -> Decoder:
    model = Decoder(ModelConfig(layers=layers, width=64, heads=4, **sizes).resolve(100, 8))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            init_shard(parameter, name, ShardSpec.whole(tuple(parameter.shape)), model.config, seed)
    return model


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    torch.manual_seed(1)
    one = build().state_dict()
    torch.manual_seed(2)
    _ = build(seed=9)  # something else first
    other = build().state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(
        one["blocks.0.attention.q.weight"], build(seed=2).state_dict()["blocks.0.attention.q.weight"]
    )
    assert not torch.equal(one["blocks.0.attention.q.weight"], one["blocks.1.attention.q.weight"])
    wider = build(vocab_size=150).state_dict()["embed.tokens.weight"]
    assert torch.equal(wider[:100], one["embed.tokens.weight"])


@pytest.mark.parametrize("preset", ["llama", "glm"])
def test_a_shard_equals_its_slice_of_the_global_tensor(preset: str) -> None:
    model = build(preset=preset)
    for name, whole in model.named_parameters():
        spec = ShardSpec.whole(tuple(whole.shape)).shard(0, 3, 1).shard(whole.ndim - 1, 2, 1)
        values = torch.empty(spec.size)
        init_shard(values, name, spec, model.config, 1)
        assert torch.equal(values, whole[spec.slices]), name


def test_chunks_and_dtype_do_not_change_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, config = ShardSpec.whole((50, 30)).shard(1, 4, 3), build().config
    values = [torch.empty(spec.size, dtype=dtype) for dtype in (torch.float64, torch.float64, torch.float32)]
    init_shard(values[0], "head.weight", spec, config, 1)
    monkeypatch.setattr(training.parallel.initialize, "_CHUNK", 7)
    init_shard(values[1], "head.weight", spec, config, 1)
    init_shard(values[2], "head.weight", spec, config, 1)
    assert torch.equal(values[0], values[1]) and torch.equal(values[0].float(), values[2])


def test_initial_weights_are_normal_and_uncorrelated() -> None:
    x = keyed_normal(1, "embed.tokens.weight", torch.arange(200_000))
    assert abs(x.mean()) < 0.01 and abs(x.std() - 1) < 0.01 and abs((x**4).mean() - 3) < 0.1
    y = keyed_normal(2, "embed.tokens.weight", torch.arange(200_000))
    assert abs((x * y).mean()) < 0.01 and abs((x[1:] * x[:-1]).mean()) < 0.01


def test_splitmix64_equals_the_published_values() -> None:
    # the first outputs of the reference implementation from state 1234567
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [int(v) % 2**64 for v in splitmix64(torch.arange(1, 4), 1234567)] == expected


def test_standard_deviations() -> None:
    parameters = dict(build(layers=8).named_parameters())
    assert abs(parameters["blocks.3.mlp.up.weight"].std() / 0.02 - 1) < 0.05
    assert abs(parameters["blocks.3.mlp.down.weight"].std() / (0.02 / 4) - 1) < 0.05
    assert torch.equal(parameters["norm.weight"], torch.ones(64))


def test_standard_deviations_with_deepnorm() -> None:
    """Xavier's, and times (2 layers)^-1/2 those of the MLP, the values and attention's output, as GLM-130B has it."""
    parameters = dict(build(layers=8, preset="glm", ffn_width=192).named_parameters())
    square, ffn = (2 / (64 + 64)) ** 0.5, (2 / (64 + 192)) ** 0.5
    wanted = {"attention.q": square, "attention.k": square, "attention.v": square / 4, "attention.o": square / 4}
    wanted |= dict.fromkeys(("mlp.gate", "mlp.up", "mlp.down"), ffn / 4)
    for name, deviation in wanted.items():
        assert abs(parameters[f"blocks.3.{name}.weight"].std() / deviation - 1) < 0.05, name
        assert not parameters[f"blocks.3.{name}.bias"].any()
    assert abs(parameters["embed.tokens.weight"].std() / 0.02 - 1) < 0.05
