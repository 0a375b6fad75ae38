"""The planner's step times: of published runs, and how they follow from sizes."""

from dataclasses import replace

import pytest

from gristmill_planner.compute_time import Product, head_work, layer_work, model_flops, product_time, wave_share
from gristmill_planner.fitted_constants import Constants, fitted_constants
from gristmill_planner.hardware import Cluster, find_device
from gristmill_planner.planned_run import GRISTMILL, PlannedRun
from gristmill_planner.published_runs import (
    PublishedRun,
    divided_layers,
    narayanan_table_2,
    published_runs,
    sparse_runs,
)
from gristmill_planner.run_memory import megatron_memory
from gristmill_planner.step_time import rank_experts, rank_parameters, step_time
from training.experimental.parallel_config import ParallelConfig
from training.model.decoder import flops_per_token, meta_decoder
from training.model.model_config import ModelConfig
from training.parallel.parameter_shapes import stage_parameters
from training.presets.presets import PRESETS

RUNS = {each.name: each for each in published_runs()}
SMALL = ModelConfig(preset="llama-2-7b").resolve(1, 1)


@pytest.mark.parametrize("each", [each for each in RUNS.values() if each.measured], ids=lambda each: each.name)
def test_published_runs(each: PublishedRun) -> None:
    predicted = step_time(each.run, fitted_constants()).total
    assert predicted == pytest.approx(each.measured, rel=0.12)


@pytest.mark.parametrize("each", narayanan_table_2(), ids=lambda each: each.name)
def test_zero_3_beside_other_layouts(each: PublishedRun) -> None:
    predicted = step_time(each.run, fitted_constants()).total
    assert predicted == pytest.approx(each.measured, rel=0.13)  # planner-accuracy.md lists them
    assert megatron_memory(each.run).total < each.run.cluster.device.memory


@pytest.mark.parametrize("each", RUNS.values(), ids=RUNS.keys())
def test_published_runs_fit_their_cards(each: PublishedRun) -> None:
    assert megatron_memory(each.run).total < each.run.cluster.device.memory


@pytest.mark.parametrize("each", RUNS.values(), ids=RUNS.keys())
def test_published_runs_have_the_published_parameters(each: PublishedRun) -> None:
    preset, model = PRESETS[each.preset], each.run.model
    count = sum(p.numel for p in stage_parameters(model, range(model.layers), first=True, last=True))
    assert abs(count - preset.parameters) < preset.parameters / 100 + preset.rounded_to / 2
    assert model == ModelConfig(preset=each.preset).resolve(1, 1)  # one place has each model's facts
    assert each.run.batch == each.run.layout.dp * each.run.layout.micro_batches * each.run.micro_batch
    assert each.run.layout.dp * each.run.layout.tp * each.run.layout.pp == each.run.cluster.devices


SPARSE = replace(SMALL, experts=8, experts_per_token=2, expert_width=SMALL.ffn_width // 2)


def test_a_sparse_layer_computes_as_much_as_a_dense_one_of_its_active_width() -> None:
    dense, sparse = (layer_work(model, 2, 1024) for model in (SMALL, SPARSE))
    router = 2 * 2048 * 8 * SMALL.width
    assert sparse.flops == pytest.approx(dense.flops + router)
    assert sparse.traffic > dense.traffic
    half = layer_work(replace(SPARSE, dense_layers=SMALL.layers // 2, shared_experts=1), 2, 1024)
    shared = 3 * 2 * 2048 * SMALL.width * SMALL.ffn_width // 2
    assert half.flops == pytest.approx(dense.flops + (router + shared) / 2)


def test_latent_attention_has_the_products_of_its_matrices() -> None:
    model = ModelConfig(preset="deepseek-v3").resolve(1, 4096)
    layers = range(model.layers)
    numel = sum(p.numel for p in stage_parameters(model, layers, False, False) if ".attention." in p.name)
    products = layer_work(replace(model, experts=0), 1, 4096).products
    matrices = [p for p in products if p.count == 1.0][:4]  # the last two are of the MLP
    norms = model.q_lora_rank + model.kv_lora_rank
    assert sum(p.n * p.k for p in matrices) == numel / model.layers - norms


def test_a_window_bounds_the_attention_of_its_layers_and_sinks_pass_their_scores_through_memory() -> None:
    model = ModelConfig(preset="gpt-oss-20b").resolve(1, 4096)
    plain = replace(model, window=0, full_attention_every=0, sinks=False)
    found, whole = layer_work(model, 1, 4096), layer_work(plain, 1, 4096)
    products = 2 * 2 * 4096 * model.q_width  # of a token with a key, and with its value
    assert whole.flops - found.flops == pytest.approx(products * (4096 - 2 * 128) / 2)  # every second layer
    passes = found.traffic - whole.traffic
    assert passes == pytest.approx(4 * 8 * 64 * 4096 * (4096 / 2 + 2 * 128) / 2)
    in_ring = layer_work(model, 0.25, 4096, ring=4).traffic - layer_work(plain, 0.25, 4096).traffic
    assert in_ring == pytest.approx(4 * 8 * 64 * 1024 * (4096 * 9 / 16 + 2 * 512) / 2)  # chunks of 512 tokens


@pytest.mark.parametrize("preset", ["gpt-oss-20b", "mistral-7b", "llama-2-7b"])
def test_flops_are_those_of_the_trainer_s_meter(preset: str) -> None:
    model = ModelConfig(preset=preset, context=32768).resolve(1, 32768)
    assert model_flops(model, 1, 32768) / 32768 == pytest.approx(flops_per_token(meta_decoder(model), 32768), rel=0.002)


def test_experts_of_several_ranks_are_sent_tokens_and_sum_fewer_gradients() -> None:
    h100 = Cluster(find_device("h100"), 16)
    layouts = [
        ParallelConfig(dp=16, ep=ep, zero=1, zero_group=16, micro_batches=1, virtual_stages=1) for ep in (1, 8, 16)
    ]
    runs = [PlannedRun(SPARSE, layout, 64, 1024, h100) for layout in layouts]
    times = [step_time(run, fitted_constants()) for run in runs]
    assert times[0].tensor == 0 < times[1].tensor < times[2].tensor  # in a node, and between two
    assert times[0].data > times[1].data > times[2].data
    assert rank_parameters(runs[0]) - rank_parameters(runs[1]) == rank_experts(runs[0]) * 7 / 8


def test_published_steps_of_a_sparse_model_are_listed_with_their_error() -> None:
    errors = [step_time(each.run, fitted_constants()).total / (each.measured or 1) - 1 for each in sparse_runs()]
    # docs/reference/planner-accuracy.md says why: there a token is sent once to a node
    assert errors == pytest.approx([0.21, 1.91, 2.44, 2.75], abs=0.02)


def test_flops_are_those_of_the_paper() -> None:
    for each in RUNS.values():
        model, run = each.run.model, each.run
        if not each.name.startswith("Megatron "):
            continue
        b, s, layers, h, v = run.batch, run.seq_len, model.layers, model.width, model.vocab_size
        expected = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))  # equation 3
        assert model_flops(model, b, s, "full") == pytest.approx(expected, rel=1e-9)


def test_work_is_divided_by_tensor_parallelism() -> None:
    model = RUNS["Megatron 18.4B"].run.model
    whole, part = layer_work(model, 2, 2048, 1, 1, False), layer_work(model, 2, 2048, 8, 8, False)
    assert part.flops == pytest.approx(whole.flops / 8)
    assert part.traffic == pytest.approx(whole.traffic / 8)
    assert head_work(model, 2, 2048, 8).flops == pytest.approx(head_work(model, 2, 2048, 1).flops / 8)


def test_products_saturate_with_size() -> None:
    device, constants = RUNS["BLOOM-176B"].run.cluster.device, fitted_constants()
    rates = [Product(n, n, n).flops / product_time(Product(n, n, n), device, constants) for n in (512, 2048, 8192)]
    assert rates == sorted(rates)
    assert rates[-1] < constants.product_share * device.flops
    odd = Product(2048, 2048, 108)  # in BigScience's sweep, heads of 108 features are slow
    assert product_time(odd, device, constants) > 3 * product_time(Product(2048, 2048, 112), device, constants)


def test_the_last_wave_of_tiles_is_not_full() -> None:
    """An A100 has 108 multiprocessors: 108 tiles of 256 x 128 fill one wave, and one tile more takes a second one."""
    device, constants = RUNS["BLOOM-176B"].run.cluster.device, fitted_constants()
    full, more = Product(27 * 256, 4 * 128, 8192), Product(28 * 256, 4 * 128, 8192)
    assert wave_share(full, device) == 1.0
    assert wave_share(more, device) < 0.9  # smaller tiles fill a last wave better, at a lower rate
    rates = [each.flops / product_time(each, device, constants) for each in (full, more)]
    assert rates[1] < 0.9 * rates[0]
    assert wave_share(more, replace(device, processors=0)) == 1.0


def test_a_step_is_its_parts_and_grows_with_each() -> None:
    run, constants = RUNS["BLOOM-176B"].run, fitted_constants()
    first = step_time(run, constants)
    assert first.total == pytest.approx(sum(vars(first).values()))
    assert step_time(replace(run, recompute="none"), constants).compute < first.compute
    slow = replace(run, cluster=run.cluster.with_network(5e9))
    assert step_time(slow, constants).data > 5 * first.data
    more = replace(run, layout=replace(run.layout, micro_batches=256), batch=2 * run.batch)
    assert step_time(more, constants).bubble == pytest.approx(first.bubble)


def test_constants_are_of_possible_sizes() -> None:
    constants = fitted_constants()
    for name in ("product_share", "traffic_share", "link_share", "network_share", "lone_reduction_share"):
        assert 0.2 < getattr(constants, name) <= 1.0
    assert vars(constants).keys() == vars(Constants()).keys()


def test_gradients_of_one_rank_a_node_are_summed_faster() -> None:
    """As measured: with as many parameters on each, ranks of tp 8 wait less for sums than those of tp 4."""
    run, constants = RUNS["Megatron 18.4B"].run, fitted_constants()
    halves = replace(run, layout=replace(run.layout, tp=4, pp=2), stage_layers=())
    assert step_time(run, constants).data < step_time(halves, constants).data


def test_groups_of_zero_gather_within_themselves_and_sum_between() -> None:
    """Hybrid sharding over the 8 GPUs of a node: the network carries an eighth of the gradients, and no weights."""
    model, constants, cluster = SMALL, fitted_constants(), Cluster(find_device("h100"), 64)
    whole = ParallelConfig(zero=3, micro_batches=2).resolve(64, model, 4096)
    shows_all = replace(GRISTMILL, hidden=0.0)
    run = PlannedRun(model, replace(whole, zero_group=8), 128, 4096, cluster, software=shows_all)
    size, device = rank_parameters(run), cluster.device
    in_node = 7 / 8 * (4 * 2 + 2 * 4) * size / (constants.link_share * device.link)
    between = 2 * 2 * 7 / 8 * (4 * size / 8) / (constants.lone_reduction_share * device.network)
    assert step_time(run, constants).data == pytest.approx(in_node + between)
    assert step_time(replace(run, layout=whole), constants).data > 1.9 * (in_node + between)


def test_gradients_in_bf16_take_half_as_long() -> None:
    model, constants = SMALL, fitted_constants()
    layout = ParallelConfig().resolve(16, model, 4096)
    run = PlannedRun(model, layout, 16, 4096, Cluster(find_device("h100"), 16), software=replace(GRISTMILL, hidden=0.0))
    halved = replace(run, layout=replace(layout, reduce_bf16=True))
    assert step_time(halved, constants).data == pytest.approx(step_time(run, constants).data / 2)


def test_layers_are_divided_evenly() -> None:
    assert divided_layers(10, 4) == (3, 3, 2, 2)
    assert divided_layers(70, 12, ends=1) == (5, *[6] * 10, 5)
