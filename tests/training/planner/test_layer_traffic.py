"""Communication within layers on grids and between ranks that share sequences, in the planner's model."""

from dataclasses import replace

import pytest

from gristmill_planner.break_even import layer_seconds
from gristmill_planner.communication_time import Seconds, collective_time, layer_collectives
from gristmill_planner.compute_time import head_of_rank, layer_of_rank
from gristmill_planner.fitted_constants import Constants
from gristmill_planner.hardware import Cluster, find_device
from gristmill_planner.planned_run import PlannedRun, RankAxis
from training.experimental.parallel_config import ParallelConfig
from training.model.model_config import ModelConfig

MODEL = ModelConfig(preset="llama", layers=8, width=1024, heads=16, kv_heads=16, ffn_width=3072).resolve(32_000, 8192)
EXACT = Constants(link_share=1.0, network_share=1.0, collective_latency=0.0)
DEVICE = replace(find_device("h100"), overlaps=False)
NOTHING = Seconds(0.0, 0.0)


def run(sequences: int = 8, **options: object) -> PlannedRun:
    layout = ParallelConfig(dp=1, zero_group=1, virtual_stages=1, micro_batches=1, **options)  # type: ignore[arg-type]
    return PlannedRun(MODEL, layout, sequences, 8192, Cluster(DEVICE, layout.processes))


def test_summa_takes_the_papers_elements_and_what_a_round_hides() -> None:
    """Of X (n x h) and W (h x h') a rank broadcasts q blocks each, n h / q^2 and h h' / q^2 (Xu et al. 2021)."""
    one, n, h, f = run(tp=4, tensor="2d"), 8 * 8192, 1024, 3072
    elements = sum(n * x + x * y for x, y in ((h, 3 * h), (h, h), (h, 2 * f), (f, h))) / 2
    statistics = 2 * 4 * n / 2  # two norms, an all-reduce of 2 ranks
    found = layer_collectives(one, EXACT, NOTHING, NOTHING)
    assert found.forward == pytest.approx((2 * elements + statistics) / DEVICE.link)
    assert found.backward == pytest.approx((4 * elements + statistics) / DEVICE.link)
    hides = replace(one, cluster=Cluster(replace(DEVICE, overlaps=True), 4))
    hidden = layer_collectives(hides, EXACT, Seconds(1.0, 1.0), NOTHING)
    assert hidden.forward == pytest.approx(found.forward / 2)  # all rounds but the first


def test_a_ring_hides_behind_attention_and_ulysses_shrinks_with_its_ranks() -> None:
    tokens, kv = 8 * 8192, 1024
    ring = layer_collectives(run(cp=4), EXACT, NOTHING, NOTHING)
    assert ring.forward == pytest.approx(3 * 2 * tokens / 4 * kv * 2 / DEVICE.link)  # bf16
    assert ring.backward == pytest.approx(3 * 2 * tokens / 4 * kv * (2 + 4) / DEVICE.link)  # gradients in float32
    hides = replace(run(cp=4), cluster=Cluster(replace(DEVICE, overlaps=True), 4))
    assert layer_collectives(hides, EXACT, NOTHING, Seconds(1.0, 1.0)) == NOTHING
    four, eight = (layer_collectives(run(cp=n, context="ulysses"), EXACT, NOTHING, NOTHING) for n in (4, 8))
    assert four.forward == pytest.approx(3 / 4 * tokens / 4 * 4 * kv * 2 / DEVICE.link)
    assert eight.forward == pytest.approx(four.forward * (7 / 8 / 8) / (3 / 4 / 4))


def test_rings_share_the_cards_of_a_node() -> None:
    cluster, size = Cluster(DEVICE, 64), 1e9
    rows = collective_time(cluster, EXACT, RankAxis(8, 8), "broadcast", 1, size)  # each rank of a node in another group
    columns = collective_time(cluster, EXACT, RankAxis(64, 1), "broadcast", 1, size)  # all in one
    assert rows == pytest.approx(size / DEVICE.network) and columns == pytest.approx(
        max(size / DEVICE.link, size / DEVICE.network / 8)
    )
    assert collective_time(cluster, EXACT, RankAxis(8, 1), "receive", 1, size) == 0


@pytest.mark.parametrize(
    "options",
    [{"tp": 4, "tensor": "2d"}, {"tp": 8, "tensor": "2.5d", "depth": 2}, {"tp": 8, "tensor": "3d"}, {"cp": 8}],
)
def test_work_is_divided_over_all_ranks(options: dict[str, object]) -> None:
    whole, part = run(), run(**options)
    for work in (layer_of_rank, head_of_rank):
        assert part.layout.processes * work(part).flops == pytest.approx(work(whole).flops)


def test_divisions_cross() -> None:
    """1D is faster than 2D on 4 ranks, and slower than 2.5D on 64, half of whose time is collectives in 1D."""
    model = replace(MODEL, width=8192, heads=64, kv_heads=64, ffn_width=28_672)
    few, many = (layer_seconds(model, find_device("h100"), n, 16, 4096, Constants()) for n in (4, 64))
    assert few["1D"] < few["2D"] and many["2.5D"] < many["1D"] and many["Ulysses"] < many["2.5D"]
    assert many["1D"][1] > many["1D"][0] / 2 and set(many) == {"1D", "2D", "2.5D", "3D", "ring", "Ulysses"}
