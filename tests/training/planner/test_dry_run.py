"""Dry runs: what a rank holds and sends is what the formulas say, in every kind of layout and at full size."""

import resource
from dataclasses import replace

import pytest
import torch

from gristmill.errors import UsageError
from gristmill_planner.dry_run import try_rank
from gristmill_planner.hardware import Cluster, find_device
from gristmill_planner.planned_run import GRISTMILL, OptimizerStates, PlannedRun
from gristmill_planner.published_runs import find_published_run
from gristmill_planner.run_memory import run_memory
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import Recompute
from training.model.model_config import ModelConfig
from training.presets.presets import PRESETS

SIZES = {"layers": 9, "width": 64, "heads": 4, "kv_heads": 4, "ffn_width": 96, "vocab_size": 251, "context": 32}
# layout, its processes, a rank, a preset, recomputation
LAYOUTS: dict[str, tuple[ParallelConfig, int, int, str, Recompute]] = {
    "one": (ParallelConfig(), 1, 0, "llama-2-7b", "none"),
    "replicas": (ParallelConfig(micro_batches=2), 4, 3, "qwen2.5-0.5b", "selective"),
    "ZeRO-1, last tp": (ParallelConfig(zero=1, tp=4, sequence_parallel=True), 8, 7, "bloom-176b", "full"),
    "ZeRO-2, groups": (ParallelConfig(zero=2, zero_group=2, micro_batches=2), 8, 5, "gpt-neox-20b", "none"),
    "ZeRO-3": (ParallelConfig(zero=3), 4, 2, "opt-175b", "full"),
    "ZeRO-3, groups": (ParallelConfig(zero=3, zero_group=2, tp=2), 8, 6, "codegeex-13b", "none"),
    "ZeRO-3, pp": (ParallelConfig(zero=3, pp=2), 4, 1, "llama-2-7b", "full"),
    "tp": (ParallelConfig(tp=2), 2, 1, "qwen3-0.6b", "none"),
    "gpipe": (ParallelConfig(pp=4, schedule="gpipe", micro_batches=4), 4, 2, "mt-nlg-530b", "selective"),
    "1f1b, last": (ParallelConfig(pp=2, tp=2, zero=1, micro_batches=4), 8, 7, "glm-130b", "full"),
    "1f1b, tied": (ParallelConfig(pp=4, micro_batches=4), 4, 0, "bloom-176b", "full"),
    "interleaved": (
        ParallelConfig(pp=2, schedule="interleaved-1f1b", micro_batches=4), 4, 2, "megatron-1.7b", "full",
    ),
    "breadth-first": (ParallelConfig(pp=2, schedule="looped-bfs", micro_batches=4), 2, 0, "gpt2-124m", "none"),
    "zero-bubble": (ParallelConfig(pp=2, schedule="zero-bubble", micro_batches=4), 2, 1, "llama-2-7b", "full"),
    "zbv": (ParallelConfig(pp=2, schedule="zbv", zero=1, tp=2, micro_batches=4), 8, 3, "gpt2-124m", "none"),
    "ring": (ParallelConfig(cp=2, tp=2, zero=1), 8, 6, "llama-2-7b", "full"),
    "ring, ALiBi": (ParallelConfig(cp=4, pp=2), 8, 5, "bloom-176b", "none"),
    "ulysses": (ParallelConfig(cp=2, tp=2, context="ulysses"), 8, 3, "bloom-176b", "selective"),
    "2d": (ParallelConfig(tp=4, tensor="2d", pp=2, schedule="zbv", micro_batches=4), 8, 6, "gpt2-124m", "full"),
    "2.5d": (ParallelConfig(tp=8, tensor="2.5d", depth=2, zero=1), 16, 13, "bloom-176b", "none"),
    "3d": (ParallelConfig(tp=8, tensor="3d"), 8, 5, "llama-2-7b", "none"),
    "3d, ZeRO-3": (ParallelConfig(tp=8, tensor="3d", zero=3), 16, 2, "gpt2-124m", "full"),
    "dualpipev": (ParallelConfig(pp=2, schedule="dualpipev", micro_batches=8), 2, 1, "gpt-neox-20b", "none"),
    "experts": (ParallelConfig(dp=2, micro_batches=2), 2, 1, "olmoe-1b-7b", "selective"),
    "experts, ep": (ParallelConfig(dp=4, ep=2, zero=1, tp=2), 8, 5, "olmoe-1b-7b", "full"),
    "experts, ep, ZeRO-3": (ParallelConfig(dp=4, ep=2, zero=3), 4, 1, "qwen3-30b-a3b", "none"),
    "sinks, ep": (ParallelConfig(dp=4, ep=2, zero=1, tp=2), 8, 5, "gpt-oss-20b", "full"),
    "sinks, ring": (ParallelConfig(cp=2, ep=2, zero=3), 4, 2, "gpt-oss-20b", "none"),
    "experts, ep, pp": (ParallelConfig(dp=4, ep=4, zero=1, pp=2, micro_batches=4), 8, 6, "deepseek-v3", "full"),
}  # fmt: skip
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"experts": 8, "experts_per_token": 2, "expert_width": 32}


def small_run(
    layout: ParallelConfig, processes: int, preset: str, recompute: Recompute, kv_heads: int = 4
) -> PlannedRun:
    sizes: dict[str, int] = {**SIZES, "kv_heads": kv_heads}
    if preset == "deepseek-v3":
        sizes |= {**LATENT, "groups_per_token": 2, "expert_groups": 4, "dense_layers": 1}
    if PRESETS[preset].options.get("experts"):
        sizes |= {**EXPERTS, "context": 32}
    if preset == "gpt-oss-20b":
        sizes["window"] = 8
    model = ModelConfig(preset=preset, **sizes).resolve(1, 32)
    layout = layout.resolve(processes, model, 32)
    cluster = Cluster(find_device("a100-40gb"), processes)
    sequences = 2 * layout.dp * layout.micro_batches * layout.batch_shards
    return PlannedRun(model, layout, sequences, 32, cluster, recompute)


@pytest.mark.every(4)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_holds_and_sends_what_the_formulas_say(name: str) -> None:
    layout, processes, rank, preset, recompute = LAYOUTS[name]
    if layout.zero == 3 and layout.pp > 1 and torch.__version__ >= "2.14":
        pytest.skip("FSDP reduces a first stage's embedding once a step")
    found = try_rank(small_run(layout, processes, preset, recompute), rank)
    assert found.sent == found.expected_sent
    assert found.agrees and found.parameters > 10_000
    assert bool(found.sent) == (processes > 1)
    assert not torch.distributed.is_initialized()


def test_selective_recomputation_with_tensor_parallelism() -> None:
    found = try_rank(small_run(ParallelConfig(tp=2), 2, "llama-2-7b", "selective"), 1)
    assert found.agrees


@pytest.mark.parametrize("rank", range(4))
def test_ranks_with_the_same_head_of_keys(rank: int) -> None:
    layout = ParallelConfig(tp=4, sequence_parallel=True, zero=1)
    found = try_rank(small_run(layout, 8, "qwen2.5-0.5b", "none", kv_heads=2), rank)
    assert found.agrees and found.sent == found.expected_sent and ("kv", "all-reduce") in found.sent


@pytest.mark.thorough
def test_full_size() -> None:
    """BLOOM-176B on 384 GPUs, with a tenth of its micro-batches."""
    run = find_published_run("bloom-176b").run
    run = replace(run, batch=2 * 8 * 12, layout=replace(run.layout, micro_batches=12))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = try_rank(run, 17)
    assert found.place == {
        "pp": (0, 12),
        "replicate": (0, 1),
        "shard": (4, 8),
        "tp": (1, 4),
        "cp": (0, 1),
        "ep": (0, 1),
    }
    assert found.agrees
    divided, whole = 12 * 14336**2 + 7 * 14336, 6 * 14336  # of a layer: matrices with q, k, v's and up's biases; others
    embedding = 250_880 * 14336 // 4 + 2 * 14336
    assert found.built["weights"] == 2 * (6 * (divided // 4 + whole) + embedding)
    planned = run_memory(replace(run, software=GRISTMILL, stage_layers=()))  # layers as the trainer divides them
    assert planned.rank == 0  # as that of rank 17
    assert {kind: planned.kinds[kind] for kind in found.built} == pytest.approx(found.built, rel=0.02)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # 1 GiB, in KiB


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_there_is_not(rank: int) -> None:
    with pytest.raises(UsageError, match=rf"--rank is {rank}; expected 0 to 3, as 4 GPUs have"):
        try_rank(small_run(ParallelConfig(), 4, "gpt2-124m", "none"), rank)


def test_a_layout_that_the_trainer_refuses() -> None:
    run = small_run(ParallelConfig(pp=2, micro_batches=2), 2, "gpt2-124m", "none")
    with pytest.raises(UsageError, match=r"schedule 1f1b of 2 stages takes 2 or more"):
        try_rank(replace(run, layout=replace(run.layout, micro_batches=1)), 0)


@pytest.mark.parametrize("states", [OptimizerStates("sgd"), OptimizerStates("muon"), OptimizerStates(ema=True)])
def test_the_states_are_those_of_the_run(states: OptimizerStates) -> None:
    run = replace(small_run(ParallelConfig(zero=1), 2, "llama-2-7b", "none"), states=states)
    adamw, found = (try_rank(each, 1) for each in (replace(run, states=OptimizerStates()), run))
    assert found.agrees
    share = found.built["moments"] / adamw.built["moments"]
    least, most = {"sgd": (0, 0), "muon": (0.5, 0.9), "adamw": (1.49, 1.5)}[states.name]
    assert least <= share <= most


def test_of_experts_muon_spares_the_moments_that_the_formula_says() -> None:
    """Beside AdamW, whose flat moments are padded."""
    run = small_run(ParallelConfig(dp=8, ep=2, zero=1), 8, "olmoe-1b-7b", "none")
    adamw, muon = (replace(run, states=OptimizerStates(name)) for name in ("adamw", "muon"))
    spared = try_rank(adamw, 1).built["moments"] - try_rank(muon, 1).built["moments"]
    assert spared == run_memory(adamw).kinds["moments"] - run_memory(muon).kinds["moments"] > 0


def test_moments_elsewhere_are_refused() -> None:
    run = replace(small_run(ParallelConfig(), 1, "gpt2-124m", "none"), states=OptimizerStates(moments="disk"))
    with pytest.raises(UsageError, match=r"--dry_run with memory\.optimizer disk: .*; try memory\.optimizer device"):
        try_rank(run, 0)
