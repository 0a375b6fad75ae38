"""The placement table: what the papers say of each parameter, in every kind of layout."""

from typing import Any

import pytest
import torch
from torch import nn

from training.experimental.grids.placements import cube_table, grid_table
from training.experimental.parallel_config import ParallelConfig
from training.model.decoder import Decoder
from training.model.model_config import ModelConfig
from training.parallel.placement_table import placement_table
from training.parallel.tensor.placements import tensor_parallel_table
from training.sharding.placement import Placement

DATA = ("replicate", "shard")


def decoder(preset: Any, **options: Any) -> Decoder:
    with torch.device("meta"):
        sizes = {"layers": 2, "width": 32, "heads": 8, "kv_heads": 4}
        return Decoder(ModelConfig(preset=preset, **(sizes | options)).resolve(67, 16))


def table_of(preset: str, **layout: Any) -> dict[str, Placement]:
    model = decoder(preset)
    asked = ParallelConfig(**layout)
    return placement_table(model, asked.resolve((asked.dp or 1) * asked.tp * asked.pp, model.config, 16))


@pytest.mark.parametrize("preset", ["llama", "gpt2"])
def test_the_table_is_the_papers(preset: str) -> None:
    """Shoeybi et al. 2019, section 3: first matrices column-parallel, second ones row-parallel."""
    table = table_of(preset, tp=2)
    for name, p in decoder(preset).named_parameters():
        dim = table[name].shard.get("tp")
        if name.startswith("blocks.") and p.ndim == 2:
            assert dim == (1 if name.endswith(("attention.o.weight", "mlp.down.weight")) else 0), name
        elif name in ("embed.tokens.weight", "head.weight"):
            assert dim == 0
        elif "norm" in name or "positions" in name or name.endswith(("attention.o.bias", "mlp.down.bias")):
            assert dim is None and "tp" in table[name].replicated, name
        else:
            assert dim == 0 and name.endswith("bias"), name


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norms_of_heads_sum_the_terms_of_the_ranks_heads(sequence_parallel: bool) -> None:
    layout = ParallelConfig(tp=2, sequence_parallel=sequence_parallel)
    table = placement_table(decoder("llama", qk_norm=True), layout)
    for name in ("q_norm", "k_norm"):
        placement = table[f"blocks.1.attention.{name}.weight"]
        assert "tp" in placement.replicated and "tp" in placement.gradient_sum


def test_ranks_beyond_the_heads_of_keys_and_values_have_copies_and_sum_their_terms() -> None:
    table = table_of("llama", tp=8, sequence_parallel=True)  # of 4 heads
    copied = {name for name, placement in table.items() if "kv" in placement.replicated}
    assert copied == {f"blocks.{layer}.attention.{name}.weight" for layer in (0, 1) for name in "kv"}
    for name in copied:
        assert table[name].repeat == {"tp": 2} and table[name].gradient_sum == ("kv", *DATA)
    assert not any("kv" in placement.replicated for placement in table_of("llama", tp=4).values())


@pytest.mark.parametrize("preset", ["llama", "gpt2"])
def test_a_grid_holds_a_block_of_every_matrix_and_a_part_of_every_vector(preset: str) -> None:
    """Xu et al. 2021, section 3; Wang et al. 2021, section 3.1."""
    table = table_of(preset, tp=8, tensor="2.5d", depth=2)
    for name, p in decoder(preset).named_parameters():
        grid = {axis: dim for axis, dim in table[name].shard.items() if axis not in DATA}
        matrix = p.ndim == 2 and "positions" not in name
        every = ("depth",) if matrix else ("depth", "row")
        assert grid == ({"column": 0, "row": 1} if matrix else {"column": p.ndim - 1})
        assert table[name].replicated == (*every, "replicate") and table[name].gradient_sum == (*every, *DATA)


def test_layers_of_a_cube_divide_the_inputs_of_matrices_and_its_first_products_are_turned() -> None:
    """Bian et al. 2021, section 3."""
    table = table_of("gpt2", tp=8, tensor="3d")
    for name, p in decoder("gpt2").named_parameters():
        cube = {axis: dim for axis, dim in table[name].shard.items() if axis not in DATA}
        inner = name.split(".")[-2] in ("q", "k", "v", "up", "tokens")
        out, into = ("row", "column") if inner else ("column", "row")
        if p.ndim == 2 and "positions" not in name:
            assert cube == {out: 0, into: 1, "depth": 1} and not {"depth", "row"} & {*table[name].gradient_sum}, name
        else:
            assert cube == {out: p.ndim - 1} and table[name].gradient_sum == ("depth", into, *DATA), name


def test_every_row_is_used() -> None:
    options = [("llama", {"bias": True}), ("gpt2", {"qk_norm": True, "tied": False}), ("bloom", {}), ("codegeex", {})]
    options.append(("llama", {"experts": 2, "shared_experts": 1}))
    options.append(("llama", {"q_lora_rank": 8, "kv_lora_rank": 8, "kv_heads": 8}))
    options.append(("llama", {"sinks": True, "experts": 2, "router_bias": True, "mlp_bias": True}))
    names = {f".{n}" for preset, more in options for n, _ in decoder(preset, **more).named_parameters()}
    for table in (tensor_parallel_table(False), grid_table(), cube_table()):
        assert all(any(name.endswith(f".{end}") for name in names) for end in table)


def test_gradients_are_summed_over_the_axes_whose_ranks_see_other_tokens() -> None:
    for preset in ("llama", "gpt2"):
        assert {p.gradient_sum for p in table_of(preset, tp=2, dp=2, zero=2).values()} == {DATA}
        for name, placement in table_of(preset, tp=2, sequence_parallel=True).items():
            outside = "tp" in placement.replicated
            assert placement.gradient_sum == (("tp", *DATA) if outside else DATA), name


def test_a_tied_matrix_is_on_both_ends_of_a_pipeline() -> None:
    ends = {name for name, p in table_of("gpt2", pp=2).items() if "tied" in p.replicated and "tied" in p.gradient_sum}
    assert ends == {"embed.tokens.weight", "head.weight"}
    for table in (table_of("gpt2", tp=2), table_of("llama", pp=2)):
        assert not any("tied" in p.replicated for p in table.values())


def test_a_parameter_without_a_row_is_refused() -> None:
    model = decoder("llama")
    model.blocks["1"].register_parameter("scale", nn.Parameter(torch.empty(3, device="meta")))
    with pytest.raises(AssertionError, match=r"blocks\.1\.scale has 0 rows in the placement table"):
        placement_table(model, ParallelConfig().resolve(1, model.config, 16))
