import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.distributed.layout import ParallelConfig
from training.model.decoder import Decoder
from training.model.model_config import ModelConfig
from training.parallel.pipeline_stages import global_name, rank_of_stage, split_stages, stage_layers, stages_of_rank


def model(layers: int, vocabulary: int = 100, **sizes: object) -> ModelConfig:
    return ModelConfig(layers=layers, width=64, heads=4, **sizes).resolve(vocabulary, 16)  # type: ignore[arg-type]


@given(st.integers(1, 12), st.integers(0, 20), st.integers(10, 100_000))
def test_stages_are_consecutive_and_balanced(stages: int, more: int, vocab: int) -> None:
    config = model(stages + more, vocab)
    layers = stage_layers(config, stages)
    assert [i for stage in layers for i in stage] == list(range(config.layers))
    counts = [len(stage) for stage in layers]
    assert min(counts) >= 1 and max(counts[:-1], default=1) - min(counts[:-1], default=1) <= 1
    assert counts[-1] <= max(counts)


def test_a_large_vocabulary_leaves_the_last_stage_fewer_layers() -> None:
    small, large = stage_layers(model(12, 300), 4), stage_layers(model(12, 3000), 4)
    assert [len(s) for s in small] == [3, 3, 3, 3] or len(small[-1]) == 2
    assert len(large[-1]) == 1 and sum(map(len, large)) == 12


def test_stages_of_looped_and_v_shaped_schedules() -> None:
    looped = ParallelConfig(1, 0, 1, 1, False, 2, "interleaved-1f1b", 3, 2)
    assert [stages_of_rank(looped, rank) for rank in (0, 1)] == [[0, 2, 4], [1, 3, 5]]
    v = ParallelConfig(1, 0, 1, 1, False, 3, "zbv", 2, 6)
    assert [stages_of_rank(v, rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
    for layout in (looped, v):
        assert all(stage in stages_of_rank(layout, rank_of_stage(layout, stage)) for stage in range(layout.stages))


@pytest.mark.parametrize("preset", ["llama", "gpt2"])
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zbv"])
def test_the_stages_have_all_parameters_of_the_unsplit_model(preset: str, schedule: str) -> None:
    config = model(7, preset=preset)
    layout = ParallelConfig(1, 0, 1, 1, False, 2, schedule, 2, 4)  # type: ignore[arg-type]
    parts = [part for rank in range(2) for part in split_stages(config, layout, rank)]
    names = [global_name(part, name) for part in parts for name, p in part.named_parameters()]
    whole = [name for name, _ in Decoder(config).named_parameters()]
    assert set(names) == set(whole)
    twice = [name for name in set(names) if names.count(name) > 1]
    assert twice == (["embed.tokens.weight"] if preset == "gpt2" else [])
    assert all(p.device.type == "meta" for part in parts for p in part.parameters())
