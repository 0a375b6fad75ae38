import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.torch_version import TorchVersion

from gristmill.config import load_config
from gristmill.errors import UsageError
from training.experimental.parallel_config import ParallelConfig
from training.model.model_config import ModelConfig
from training.parallel.pipeline.schedules import SCHEDULES, SPLIT_BACKWARD

MODEL = ModelConfig(layers=8, width=48, heads=12, kv_heads=6, ffn_width=96).resolve(300, 32)
SEQ_LEN = 32


def refusal(processes: int, seq_len: int = SEQ_LEN, model: ModelConfig = MODEL, **layout: Any) -> str:
    with pytest.raises(UsageError) as error:
        ParallelConfig(**layout).resolve(processes, model, seq_len)
    return str(error.value)


def test_zeros_are_filled_in() -> None:
    assert ParallelConfig().resolve(1, MODEL, SEQ_LEN) == ParallelConfig(1, 0, 1, 1, False, 1, "1f1b", 1, 1)
    assert ParallelConfig(tp=2).resolve(8, MODEL, SEQ_LEN).dp == 4
    full = ParallelConfig(pp=2, schedule="interleaved-1f1b", zero=1).resolve(8, MODEL, SEQ_LEN)
    assert (full.dp, full.zero_group, full.virtual_stages, full.stages, full.micro_batches) == (4, 4, 2, 4, 4)
    assert ParallelConfig(zero=2, zero_group=2).resolve(4, MODEL, SEQ_LEN).zero_group == 2


@pytest.mark.parametrize(("version", "refused"), [("2.11.0+cu130", True), ("2.9.1", True), ("2.13.0+cpu", False)])
def test_what_an_older_torch_computes_wrongly_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, refused: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    for schedule in SPLIT_BACKWARD:
        if refused:
            said = refusal(2, pp=2, schedule=schedule)
            assert f"{schedule} needs torch 2.13 or later, and this is {version}: before" in said
            assert said.endswith("; try --parallel.schedule interleaved-1f1b")
        else:
            ParallelConfig(pp=2, schedule=schedule).resolve(2, MODEL, SEQ_LEN)
    ParallelConfig(pp=2, schedule="interleaved-1f1b").resolve(2, MODEL, SEQ_LEN)


def of(**layout: Any) -> dict[str, Any]:
    return layout


# what was asked, on how many processes; what is said; what that proposes, on how many, and must then work
REFUSED: list[tuple[dict[str, Any], int, str, dict[str, Any], int]] = [
    (of(dp=3, tp=2), 8, r"dp 3 x tp 2 x pp 1 = 6 processes, and 8 were started; try --parallel.dp 4", of(dp=4), 8),
    (of(tp=3), 8, r"dp 2 x tp 3 x pp 1 = 6 processes, and 8 were started; try 6 processes", {}, 6),
    (of(tp=0), 1, r"parallel.dp, tp and pp are 1, 0 and 1; expected 1 or more of each", of(tp=1), 1),
    (of(dp=-2), 2, r"parallel.dp, tp and pp are -2, 1 and 1; expected 1 or more of each", of(dp=2), 2),
    (of(zero_group=2), 4, r"zero_group 2 has no effect with parallel.zero 0; try --parallel.zero 2", of(zero=2), 4),
    (of(zero=1, zero_group=3), 4, r"dp 4 is not divisible by parallel.zero_group 3; try", of(zero_group=2), 4),
    (of(tp=4), 4, r"kv_heads 6 .* parallel.tp 4, nor the other way; try .*tp 2; with 4 .* 1, 2 are", of(tp=2), 4),
    (of(tp=5), 6, r"model.heads 12 is not divisible by parallel.tp 5; try --parallel.tp 3", of(tp=3), 6),
    (of(sequence_parallel=True), 2, r"over parallel.tp, which is 1; try --parallel.tp 2", of(tp=2), 2),
    (of(virtual_stages=2), 1, r"virtual_stages 2 needs .* parallel.pp is 1; try", of(virtual_stages=1), 1),
    (of(pp=2, virtual_stages=2), 2, r"1f1b is defined for 1 stages .*virtual_stages 1", of(virtual_stages=1), 2),
    (of(pp=2, schedule="zbv", virtual_stages=3), 2, r"zbv is defined for 2 .* 2", of(virtual_stages=2), 2),
    (of(pp=2, schedule="looped-bfs", virtual_stages=1), 2, r"for 2 or more stages", of(virtual_stages=2), 2),
    (of(pp=9), 9, r"layers 8 cannot fill 9 pipeline stages .9 ranks x 1.; try --parallel.pp 3, or", of(pp=3), 9),
    (of(pp=6, schedule="zbv"), 6, r"8 cannot fill 12 pipeline stages .6 ranks x 2.; try .*pp 3, or", of(pp=3), 6),
    (of(pp=4, micro_batches=3), 4, r"3 are too few: .* takes 4 or more; try .* 4", of(micro_batches=4), 4),
    (of(pp=2, schedule="dualpipev", micro_batches=2), 2, r"of 4 stages takes 4 or more", of(micro_batches=4), 2),
    (of(pp=2, schedule="interleaved-1f1b", micro_batches=5), 2, r"5 do not divide.*batches 6", of(micro_batches=6), 2),
    (of(pp=2, zero=3, schedule="zbv"), 4, r"zero 3 frees .*schedule zbv.* try --parallel.zero 2, or", of(zero=2), 4),
    (of(pp=2, zero=3, schedule="dualpipev"), 4, r"or --parallel.schedule 1f1b", of(schedule="1f1b"), 4),
    (of(tensor="2d", tp=6), 6, r"tp 6 is no grid of q x q .* parallel.depth 1; try .*tp 4 with 4", of(tp=4), 4),
    (of(tensor="2d"), 1, r"tp 1 is no grid .*; try --parallel.tp 4 with 4 processes", of(tp=4), 4),
    (of(tensor="2.5d", tp=8), 8, r"depth 1 with .* 2.5d: .*--parallel.depth 2 with 8 ranks", of(depth=2), 8),
    (of(tensor="2d", tp=8, depth=2), 8, r"depth 2 with .* 2d: .*; try --parallel.tensor 2.5d", of(tensor="2.5d"), 8),
    (of(tp=2, depth=2), 2, r"depth 2 with parallel.tensor 1d; try --parallel.tensor 2.5d", of(tp=8, tensor="2.5d"), 8),
    (of(tensor="2d", tp=16), 16, r"heads 6 .* by 4, .*--model.kv_heads 8 .* 1d --par.* 2", of(tensor="1d", tp=2), 2),
    (of(tensor="2d", tp=4, sequence_parallel=True), 4, r"a grid divides all .*try", of(sequence_parallel=False), 4),
    (of(tensor="3d", tp=9), 9, r"tp 9 is no cube of l x l x l ranks; try .*tp 8 with 8", of(tp=8), 8),
    (of(tensor="3d", tp=27), 27, r"heads 12 .*by 9, as 3d .* --model.heads 18 .*, or .* 3", of(tensor="1d", tp=3), 3),
    (of(cp=4, tp=2), 12, r"tp 2 x pp 1 x cp 4 = 8 processes, and 12 were started; try 8 processes", of(cp=2), 12),
    (of(tp=5), 4, r"not divisible by parallel.tp 5; try --parallel.tp 2; .* 1, 2 are", of(tp=2), 4),  # first of all
    (of(cp=3), 3, r"seq_len 32 is not .* by 6: ring .* 6 chunks .*cp 3; try --data.seq_len 36", of(cp=2), 2),
    (of(cp=2, tp=4, tensor="2d"), 8, r"cp 2 and parallel.tensor 2d: .*try", of(tensor="1d", tp=3), 6),
    (of(context="ulysses"), 2, r"ulysses has no effect with parallel.cp 1; try --parallel.cp 2", of(cp=2), 2),
    (of(context="ulysses", cp=4), 4, r"tp 1 x parallel.cp 4, .* try .*cp 2, or .*ring", of(context="ring"), 4),
    (of(context="ulysses", cp=2, tp=2), 4, r"tp 2 x parallel.cp 2, .* them; try .*ring", of(context="ring"), 4),
    (of(context="ulysses", cp=2, tp=12), 24, r"tp 12 x parallel.cp 2, .*; try .*ring$", of(context="ring"), 24),
    (of(context="ulysses", cp=3), 3, r"32 is not .* 3: ulysses .* 3 chunks .* 33", of(cp=2), 2),
    (of(compression="int8"), 1, r"one replica, which sends no gradients; try --parallel.dp 2", of(), 2),
    (of(compression="int8", zero=1), 2, r"int8 and parallel.zero 1: .*; try --parallel.zero 0", of(zero=0), 2),
    (of(compression="powersgd", tensor="2d", tp=4), 8, r"blocks of a grid .*try .* 1d", of(tensor="1d", tp=2), 4),
    (of(compression="int8", reduce_bf16=True), 2, r"two ways to send less; try", of(reduce_bf16=False), 2),
    (of(compression_rank=2), 2, r"rank 2 has no effect with .*none; try", of(compression="powersgd"), 2),
    (of(micro_batches=-1), 1, r"parallel.micro_batches is -1; expected 1 or more", of(micro_batches=1), 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "processes", "message", "proposed", "then"), REFUSED, ids=[str(r[0]) for r in REFUSED]
)
def test_an_error_suggests_a_layout_that_works(
    asked: dict[str, Any], processes: int, message: str, proposed: dict[str, Any], then: int
) -> None:
    said = refusal(processes, **asked)
    assert re.search(message, said), said
    ParallelConfig(**{**asked, **proposed}).resolve(then, MODEL, SEQ_LEN)


def model_of(*more: str) -> ModelConfig:
    options = ["--layers", "2", "--width", "64", "--heads", "4", *more]
    return load_config(ModelConfig, options).resolve(300, SEQ_LEN)


@pytest.mark.parametrize(
    ("ranks", "depth", "options"),
    [
        (9, 1, []), (9, 1, ["--kv_heads", "2"]), (9, 1, ["--heads", "6", "--width", "48", "--ffn_width", "50"]),
        (9, 1, ["--heads", "6", "--head_dim", "10"]), (27, 1, []), (27, 1, ["--head_dim", "12", "--heads", "3"]),
        (27, 1, ["--preset", "gpt2", "--heads", "2"]), (18, 2, []), (25, 1, ["--preset", "gpt2"]),
    ],
)  # fmt: skip
def test_each_way_out_of_a_grid_that_does_not_fit_works(ranks: int, depth: int, options: list[str]) -> None:
    tensor = {18: "2.5d", 27: "3d"}.get(ranks, "2d")
    given = ["--tensor", tensor, "--tp", str(ranks), "--depth", str(depth)]
    layout = load_config(ParallelConfig, given)
    with pytest.raises(UsageError, match="is not divisible by") as error:
        layout.resolve(ranks, model_of(*options), SEQ_LEN)
    sizes, without = str(error.value).split("; try ")[1].split(", or ")
    layout.resolve(ranks, model_of(*options, *sizes.replace("model.", "").split()), SEQ_LEN)
    load_config(ParallelConfig, [*given, *without.replace("parallel.", "").split()]).resolve(
        ranks, model_of(*options), SEQ_LEN
    )


def test_the_numbers_of_ranks_in_a_description_multiply_to_the_processes() -> None:
    layout = ParallelConfig(dp=2, zero=1, zero_group=2, cp=2, ep=4)
    assert layout.describe() == "dp 2 x ZeRO-1 x cp 2 (ring), ep 4 within dp x cp" and layout.processes == 4
    assert replace(layout, cp=1, ep=2).describe() == "dp 2 x ZeRO-1, ep 2 within dp"


def test_a_grid_is_described_and_recorded_where_there_is_one() -> None:
    layout = ParallelConfig(tp=8, tensor="2.5d", depth=2).resolve(16, MODEL, SEQ_LEN)
    assert layout.describe() == "dp 2 x tp 8 (2.5d, 2 x 2 x 2)" and layout.grid == (2, 2, 2)
    assert layout.batch_shards == 4 and layout.record()["depth"] == 2
    assert not {"tensor", "depth"} & ParallelConfig(tp=2).resolve(2, MODEL, SEQ_LEN).record().keys()


def test_compression_is_described_and_recorded_where_there_is_some() -> None:
    layout = ParallelConfig(compression="powersgd", compression_rank=2, tp=2).resolve(4, MODEL, SEQ_LEN)
    assert layout.describe() == "dp 2 (powersgd of rank 2) x tp 2" and layout.record()["compression_rank"] == 2
    int8 = ParallelConfig(compression="int8").resolve(2, MODEL, SEQ_LEN)
    assert int8.describe() == "dp 2 (int8)" and "compression_rank" not in int8.record()
    assert "compression" not in ParallelConfig(tp=2).resolve(2, MODEL, SEQ_LEN).record()
    tied = replace(MODEL, tied=True)
    for schedule in ("1f1b", "zbv"):  # of which one rank has both ends
        said = refusal(4, model=tied, pp=2, schedule=schedule, compression="int8")
        assert "try --model.tied false, or --parallel.pp 1" in said


def test_context_parallelism_is_described_and_recorded_where_there_is_some() -> None:
    layout = ParallelConfig(cp=2, zero=1, tp=2).resolve(8, MODEL, SEQ_LEN)
    assert layout.describe() == "dp 2 x ZeRO-1 x tp 2 x cp 2 (ring)" and layout.record()["cp"] == 2
    assert (layout.replicas, layout.shards, layout.processes, layout.sequence_parts) == (4, 4, 8, 4)
    assert not {"cp", "context"} & ParallelConfig(tp=2).resolve(2, MODEL, SEQ_LEN).record().keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_layer": True}, "query_layer and parallel.cp 2: .* try --parallel.cp 1"),
    ],
)
def test_models_whose_sequences_are_not_divided_yet(changes: dict[str, Any], message: str) -> None:
    assert re.search(message, refusal(2, model=replace(MODEL, **changes), cp=2))


def test_errors_that_depend_on_data_and_vocabulary() -> None:
    said = refusal(2, seq_len=31, tp=2, sequence_parallel=True)
    assert "data.seq_len 31 is not divisible by parallel.tp 2" in said and "try --data.seq_len 32" in said
    small = replace(MODEL, vocab_size=8)
    assert "a vocabulary of 8 is too small for parallel.tp 3; try --parallel.tp 2" in refusal(6, model=small, tp=3)


@given(
    st.integers(1, 16),
    st.builds(
        ParallelConfig, st.integers(0, 4), st.integers(0, 3), st.integers(0, 4), st.integers(0, 4), st.booleans(),
        st.integers(0, 4), st.sampled_from(sorted(SCHEDULES)), st.integers(0, 3), st.integers(0, 9),
    ),
)  # fmt: skip
def test_every_layout_is_fully_resolved_or_an_error_with_advice(processes: int, layout: ParallelConfig) -> None:
    try:
        full = layout.resolve(processes, MODEL, SEQ_LEN)
    except UsageError as error:
        assert re.search("try|expected|wanted|too small", str(error))
        return
    assert full.dp * full.tp * full.pp == processes and full.dp % full.zero_group == 0
    assert min(full.dp, full.zero_group, full.virtual_stages, full.micro_batches) > 0
    assert full.resolve(processes, MODEL, SEQ_LEN) == full


def test_stages_of_looped_and_v_shaped_schedules() -> None:
    looped = ParallelConfig(1, 0, 1, 1, False, 2, "interleaved-1f1b", 3, 2)
    assert [looped.stages_of_rank(rank) for rank in (0, 1)] == [[0, 2, 4], [1, 3, 5]]
    v = ParallelConfig(1, 0, 1, 1, False, 3, "zbv", 2, 6)
    assert [v.stages_of_rank(rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert looped.stage_ranks == [0, 1, 0, 1, 0, 1] and v.stage_ranks == [0, 1, 2, 2, 1, 0]
