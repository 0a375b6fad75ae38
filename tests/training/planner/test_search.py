"""The planner's search: its layouts are those that the trainer accepts, they fit, and the best is the fastest."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any

import pytest

import gristmill_planner.search as search_module
from gristmill.errors import UsageError
from gristmill_planner.candidates import candidates
from gristmill_planner.fitted_constants import fitted_constants
from gristmill_planner.hardware import Cluster, find_device
from gristmill_planner.planned_run import PlannedRun, PlanRequest
from gristmill_planner.published_runs import PublishedRun, published_runs
from gristmill_planner.run_memory import RESERVE, run_memory
from gristmill_planner.search import search
from gristmill_planner.step_time import divided_by_time, step_time
from training.experimental.parallel_config import ParallelConfig
from training.model.model_config import ModelConfig
from training.parallel.pipeline.stage_layers import divide_layers

MODEL = ModelConfig(preset="gpt2", layers=8, width=512, heads=8).resolve(32_000, 512)
REQUEST = PlanRequest(MODEL, 64, 512, Cluster(find_device("a100-40gb"), 16))

LONG = replace(
    REQUEST, model=ModelConfig(preset="llama", layers=8, width=512, heads=8).resolve(32_000, 8192), seq_len=8192
)


def test_the_trainer_accepts_every_candidate() -> None:
    runs = list(candidates(REQUEST))
    assert len(runs) > 500
    for run in runs:
        layout = run.layout
        given = ParallelConfig(
            zero=layout.zero, tp=layout.tp, sequence_parallel=layout.sequence_parallel, pp=layout.pp,
            schedule=layout.schedule, virtual_stages=layout.virtual_stages, micro_batches=layout.micro_batches,
            tensor=layout.tensor, depth=layout.depth,
        )  # fmt: skip
        assert given.resolve(16, MODEL, 512) == layout
        assert layout.dp * layout.micro_batches * run.micro_batch == 64
        assert run.micro_batch % layout.batch_shards == 0
        assert sum(run.layers) == 8
    assert {run.layout.tensor for run in runs} == {"1d", "2d", "2.5d", "3d"}


def test_long_sequences_are_divided_where_the_trainer_can() -> None:
    model = ModelConfig(preset="llama", layers=8, width=512, heads=8, kv_heads=2).resolve(32_000, 8192)
    request = replace(REQUEST, model=model, seq_len=8192)
    runs = [run for run in candidates(request) if run.layout.cp > 1]
    assert {(run.layout.cp, run.layout.context) for run in runs} == {
        (2, "ring"), (4, "ring"), (8, "ring"), (2, "ulysses"),  # of two heads of keys
    }  # fmt: skip
    for run in runs:
        run.layout.check(16, model, 8192)
        assert (run.layout.context, run.recompute) != ("ring", "selective")
    compiled = [run for run in candidates(replace(request, compiled=True)) if run.layout.cp > 1]
    assert {(run.layout.context, run.recompute) for run in compiled} == {("ring", "none")}
    other = replace(request, model=replace(model, query_layer=True))
    assert not any(run.layout.cp > 1 for run in candidates(other))


def test_of_thousands_of_gpus_a_part_of_the_layouts_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what decides how long a plan takes: some 0.1 ms each."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(search_module, name)

        def call(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return call

    for name in ("step_time", "run_memory"):
        monkeypatch.setattr(search_module, name, counted(name))
    run = next(each.run for each in published_runs() if each.name == "Megatron 145.6B")
    result = search(PlanRequest(run.model, run.batch, run.seq_len, run.cluster), fitted_constants(), 5)
    assert (run.cluster.devices, result.considered) == (1536, 50_031)
    assert calls["run_memory"] < 20_000 and calls["step_time"] < 3_000
    assert len(result.choices) == 5


def test_what_fits_is_found_behind_many_that_do_not() -> None:
    """Of a million tokens the fastest layouts do not fit, nor those with the least memory beat what does."""
    model = ModelConfig(preset="llama-3.1-8b", context=1 << 20).resolve(128_256, 1 << 20)
    request = PlanRequest(model, 4, 1 << 20, Cluster(find_device("h100"), 64))
    (first,) = search(request, fitted_constants(), 1).choices
    assert first.run.layout.context != "ring" or first.run.layout.cp == 1


def test_a_long_sequence_is_planned_over_several_ranks() -> None:
    """64 H100 have 64 sequences of 65,536 tokens a step."""
    model = ModelConfig(preset="llama-3.1-8b").resolve(128_256, 65_536)
    found = search(PlanRequest(model, 64, 65_536, Cluster(find_device("h100"), 64)), fitted_constants(), 3).choices
    assert all(each.run.layout.cp > 1 and each.run.layout.context == "ulysses" for each in found)


def test_the_best_is_the_fastest_that_fits() -> None:
    request = replace(REQUEST, batch=4, cluster=Cluster(find_device("a100-40gb"), 4))
    runs = list(candidates(request))
    totals = [run_memory(run).total for run in runs]
    for memory in (median(totals), sorted(totals)[len(totals) // 5]):
        tight = replace(request.cluster.device, memory=memory)
        result = search(replace(request, cluster=Cluster(tight, 4)), fitted_constants(), 3)
        times = [choice.time.total for choice in result.choices]
        assert times == sorted(times)
        fitting = [run for run, total in zip(runs, totals, strict=True) if total <= memory]
        assert times[0] == pytest.approx(min(step_time(run, fitted_constants()).total for run in fitting))


def test_memory_of_many_micro_batches_grows_by_their_buffers() -> None:
    for schedule, virtual in (("1f1b", 1), ("interleaved-1f1b", 2), ("zero-bubble", 2)):
        layout = ParallelConfig(dp=1, zero_group=1, pp=4, schedule=schedule, virtual_stages=virtual, micro_batches=24)  # type: ignore[arg-type]
        run = PlannedRun(MODEL, layout, 48, 512, Cluster(find_device("a100-40gb"), 4))
        few = replace(run, layout=replace(layout, micro_batches=16), batch=32)
        more, less = run_memory(run), run_memory(few)
        received = 2 * 512 * 512 * 2 * (1 if virtual == 1 else 3)  # a micro-batch's hidden states, by neighbours
        assert more.total - less.total == 8 * received
        assert less.kinds["other"] == RESERVE


def test_a_cpu_needs_no_memory_for_cuda() -> None:
    cpu = replace(find_device("a100-80gb"), element_bytes=4)
    run = PlannedRun(MODEL, ParallelConfig().resolve(1, MODEL, 512), 2, 512, Cluster(cpu, 1))
    assert run_memory(replace(run, precision="fp32")).kinds["other"] == 0


def test_compiled_blocks_have_no_split_backward_pass() -> None:
    schedules = {run.layout.schedule for run in candidates(REQUEST)}
    compiled = {run.layout.schedule for run in candidates(replace(REQUEST, compiled=True))}
    assert schedules - compiled == {"zero-bubble", "zbv"} and compiled


def test_no_layout_divides() -> None:
    with pytest.raises(UsageError, match=r"no layout divides 104 GPUs.*batch_size 64.*try --gpus \d+"):
        search(replace(REQUEST, cluster=Cluster(find_device("h100"), 104)), fitted_constants())


@pytest.mark.parametrize(("layers", "batch", "gpus", "per_node"), [(48, 1, 64, 2), (2, 256, 24, 8), (2, 256, 5, 8)])
def test_advice_where_no_layout_divides(layers: int, batch: int, gpus: int, per_node: int) -> None:
    model = ModelConfig(preset="llama", layers=layers, width=192, heads=12, kv_heads=12).resolve(32_000, 512)
    request = PlanRequest(model, batch, 512, Cluster(find_device("a100-80gb"), gpus, per_node))
    with pytest.raises(UsageError, match=r"no layout divides") as refused:
        search(request, fitted_constants(), 1)
    near, larger = map(int, re.search(r"try --gpus (\d+), or a batch_size of (\d+)$", str(refused.value)).groups())
    fewer = replace(request, cluster=replace(request.cluster, devices=near))
    assert near < gpus and (near < per_node or near % per_node == 0)
    assert search(fewer, fitted_constants(), 1).choices
    assert search(replace(request, batch=larger), fitted_constants(), 1).choices


def test_advice_where_nothing_fits_fills_nodes() -> None:
    request = replace(REQUEST, batch=96, cluster=Cluster(replace(find_device("v100"), memory=3.4e9), 3, 8))
    with pytest.raises(UsageError, match=r"try --gpus 24,"):  # 12 would fit, and leave half a node idle
        search(request, fitted_constants(), 1)


@pytest.mark.parametrize("each", published_runs(), ids=lambda each: each.name)
def test_the_best_is_at_least_as_fast_as_the_published_layout(each: PublishedRun) -> None:
    run = each.run
    request = PlanRequest(run.model, run.batch, run.seq_len, run.cluster, run.precision, run.software)
    best = search(request, fitted_constants(), 1).choices[0]
    assert best.time.total <= step_time(run, fitted_constants()).total * (1 + 1e-9)
    assert best.memory.total <= run.cluster.device.memory


@pytest.mark.parametrize("head", [0.0, 0.4, 1.0, 2.5, 6.0])
def test_no_division_of_layers_has_a_faster_slowest_stage(head: float) -> None:
    def slowest(counts: Sequence[int]) -> float:
        return max(*counts, counts[-1] + head)

    for stages in (2, 3, 4):
        found = divide_layers(9, stages, head)
        assert sum(found) == 9 and min(found) >= 1
        assert slowest(found) == min(slowest(c) for c in product(range(1, 9), repeat=stages) if sum(c) == 9)


def test_the_head_counts_when_layers_are_divided() -> None:
    layout = ParallelConfig(dp=1, zero_group=1, pp=2, virtual_stages=1, micro_batches=4)
    large = replace(MODEL, vocab_size=256_000)
    run = PlannedRun(large, layout, 16, 512, Cluster(find_device("a100-40gb"), 2))
    first, last = divided_by_time(run, fitted_constants())
    assert first > last
