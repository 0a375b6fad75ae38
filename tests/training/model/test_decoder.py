import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from training.model.decoder import Decoder, flops_per_token
from training.model.model_config import ModelConfig
from training.parallel.initialize import init_shard
from training.sharding.shard_spec import ShardSpec

SIZES = ModelConfig(layers=2, width=24, heads=4, kv_heads=2, init_std=0.3)


def build(config: ModelConfig, vocabulary: int = 50, seq_len: int = 12) -> Decoder:
    """A model in float64 whose norms and biases are not the trivial ones they begin with."""
    model = Decoder(config.resolve(vocabulary, seq_len)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            init_shard(parameter, name, ShardSpec.whole(tuple(parameter.shape)), model.config, 1)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def ids(rows: int = 2, length: int = 12, vocabulary: int = 50) -> Tensor:
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(3))


def reference(model: Decoder, row: Tensor) -> Tensor:
    """The logits of one row of ids, written from the papers' formulas, position by position and head by head."""
    config, w = model.config, dict(model.named_parameters(remove_duplicate=False))
    llama, size = config.norm == "rms", config.width // config.heads

    def norm(x: Tensor, name: str) -> Tensor:
        if llama:
            return x / torch.sqrt((x * x).mean() + config.norm_eps) * w[f"{name}.weight"]
        centred = x - x.mean()
        return centred / torch.sqrt((centred**2).mean() + config.norm_eps) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return w[f"{name}.weight"] @ x + (w[f"{name}.bias"] if config.bias else 0)

    def turn(x: Tensor, position: int) -> Tensor:
        if not llama:
            return x
        pairs = [
            torch.view_as_complex(torch.stack((x[i], x[i + size // 2])))
            * torch.polar(*torch.tensor([1, position * 10000 ** (-2 * i / size)], dtype=torch.float64))
            for i in range(size // 2)
        ]
        return torch.stack([p.real for p in pairs] + [p.imag for p in pairs])

    xs = [w["embed.tokens.weight"][token] for token in row]
    if not llama:
        xs = [x + w["embed.positions.weight"][t] for t, x in enumerate(xs)]
    for layer in range(config.layers):
        name = f"blocks.{layer}."
        normed = [norm(x, name + "attention_norm") for x in xs]
        q, k, v = ([linear(x, f"{name}attention.{part}").split(size) for x in normed] for part in "qkv")
        for t in range(len(xs)):
            heads = []
            for h in range(config.heads):
                shared = h * config.kv_heads // config.heads
                scores = torch.stack([turn(q[t][h], t) @ turn(k[s][shared], s) / math.sqrt(size) for s in range(t + 1)])
                heads.append(sum(p * v[s][shared] for s, p in enumerate(scores.softmax(0))))
            xs[t] = xs[t] + linear(torch.cat(heads), name + "attention.o")
        for t, x in enumerate(xs):
            y, mlp = norm(x, name + "mlp_norm"), name + "mlp."
            if llama:
                gate = linear(y, mlp + "gate")
                inner = gate * torch.sigmoid(gate) * linear(y, mlp + "up")
            else:
                u = linear(y, mlp + "up")
                inner = 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
            xs[t] = x + linear(inner, mlp + "down")
    return torch.stack([w["head.weight"] @ norm(x, "norm") for x in xs])


@pytest.mark.parametrize("preset", ["llama", "gpt2"])
def test_model_equals_a_reference_written_from_the_formulas(preset: str) -> None:
    model = build(replace(SIZES, preset=preset))
    logits = model(ids())
    assert logits.shape == (2, 12, 50)
    torch.testing.assert_close(logits[1], reference(model, ids()[1]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("preset", ["llama", "gpt2"])
def test_later_tokens_do_not_change_earlier_logits(preset: str) -> None:
    model, before = build(replace(SIZES, preset=preset)), ids()
    after = before.clone()
    after[:, 7] = (after[:, 7] + 1) % 50
    changed = (model(after) - model(before)).abs().amax(dim=(0, 2))
    assert changed[:7].max() == 0 and changed[7:].min() > 1e-6


def test_presets_fill_in_what_is_not_configured() -> None:
    llama, gpt2 = build(SIZES), build(replace(SIZES, preset="gpt2"))
    assert llama.head.weight is not llama.embed.tokens.weight and gpt2.head.weight is gpt2.embed.tokens.weight
    assert not [name for name, _ in llama.named_parameters() if "bias" in name]
    mixed = build(replace(SIZES, preset="gpt2", positions="rope", tied=False, bias=False, norm="rms", mlp="swiglu"))
    assert [name for name, _ in mixed.named_parameters()] == [name for name, _ in llama.named_parameters()]


def test_gradients_reach_every_parameter() -> None:
    for preset in ("llama", "gpt2"):
        model = build(replace(SIZES, preset=preset))
        model(ids(), ids()).backward()
        assert all(
            p.grad is not None and p.grad.abs().sum() > 0
            for name, p in model.named_parameters()
            if ".k.bias" not in name
        )


def test_with_targets_the_loss_is_returned() -> None:
    model = build(SIZES)
    logits = model(ids()).log_softmax(-1)
    expected = -logits.gather(-1, ids(2, 12).roll(1, 1)[..., None]).sum()
    torch.testing.assert_close(model(ids(), ids().roll(1, 1))[0], expected)


@pytest.mark.parametrize(("kv_heads", "window"), [(4, 0), (2, 0), (2, 5)])
def test_attention_with_dropout_equals_the_fused_kernel_if_nothing_is_dropped(kv_heads: int, window: int) -> None:
    """Whose weights it has in memory, and whose groups of heads it makes itself."""
    model = build(replace(SIZES, kv_heads=kv_heads, dropout=1e-12, window=window))
    sample_ids = torch.arange(2)
    assert torch.allclose(model(ids(), sample_ids=sample_ids), model.eval()(ids()), rtol=0, atol=1e-9)


def test_dropout_acts_in_training_only_and_by_sample_id() -> None:
    model = build(replace(SIZES, dropout=0.2))
    first, second = (model(ids(), sample_ids=torch.tensor(numbers)) for numbers in ([0, 1], [0, 2]))
    assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])
    model.eval()
    assert torch.equal(model(ids()), model(ids()))


def test_flops_per_token_equal_a_hand_count() -> None:
    config = ModelConfig(layers=1, width=8, heads=2, ffn_width=16)
    attention, mlp, norms, head = 4 * 8 * 8, 3 * 8 * 16, 3 * 8, 50 * 8
    expected = 6 * (attention + mlp + norms + head) + 12 * 1 * 8 * 12
    assert flops_per_token(build(config), 12) == expected
    tied = flops_per_token(build(replace(config, tied=True)), 12)
    assert tied == expected
    wide = flops_per_token(build(replace(config, head_dim=6, window=3)), 12)  # of a window twice its tokens
    assert wide == expected - 12 * 1 * 8 * 12 + 6 * 4 * 8 * 4 + 12 * 1 * 12 * 6


def test_torch_s_compiler_is_not_imported_to_build_one() -> None:
    """Every rank would wait for it."""
    code = (
        "import sys; from training.model.decoder import meta_decoder as build; "
        "from training.model.model_config import ModelConfig; "
        "build(ModelConfig(preset='gpt2', layers=1).resolve(50, 12)); print('torch._dynamo' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
