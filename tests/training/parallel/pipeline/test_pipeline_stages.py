import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.experimental.parallel_config import ParallelConfig
from training.model.decoder import Decoder, meta_decoder
from training.model.model_config import ModelConfig
from training.parallel.pipeline.pipeline_stages import global_name, split_stages
from training.parallel.pipeline.stage_layers import stage_layers


def model(layers: int, vocabulary: int = 100, **sizes: object) -> ModelConfig:
    return ModelConfig(layers=layers, width=64, heads=4, **sizes).resolve(vocabulary, 16)  # type: ignore[arg-type]


@given(st.integers(1, 12), st.integers(0, 20), st.integers(10, 100_000))
def test_stages_are_consecutive_and_balanced(stages: int, more: int, vocab: int) -> None:
    config = model(stages + more, vocab)
    layers = stage_layers(config, stages, 16)
    assert [i for stage in layers for i in stage] == list(range(config.layers))
    counts = [len(stage) for stage in layers]
    assert min(counts) >= 1 and max(counts[:-1], default=1) - min(counts[:-1], default=1) <= 1
    assert counts[-1] <= max(counts)


def test_a_large_vocabulary_leaves_the_last_stage_fewer_layers() -> None:
    small, large = stage_layers(model(12, 300), 4, 16), stage_layers(model(12, 3000), 4, 16)
    assert [len(s) for s in small] == [3, 3, 3, 3] or len(small[-1]) == 2
    assert len(large[-1]) == 1 and sum(map(len, large)) == 12


def test_stages_are_balanced_for_the_sequences_and_not_for_the_context() -> None:
    short, long = (ModelConfig(layers=12, width=64, heads=4, context=n).resolve(3000, 16) for n in (16, 65_536))
    assert stage_layers(long, 4, 16) == stage_layers(short, 4, 16) != stage_layers(long, 4, 65_536)
    stages = [
        split_stages(meta_decoder(config), ParallelConfig(pp=4, virtual_stages=1), 3, 16) for config in (short, long)
    ]
    assert [len(part.blocks) for (part,) in stages] == [1, 1]


@pytest.mark.parametrize("preset", ["llama", "gpt2"])
def test_stages_compose_to_the_whole_model(preset: str) -> None:
    whole, ids = Decoder(model(3, preset=preset)), torch.arange(20).view(2, 10)
    x = ids
    for rank in range(3):
        (part,) = split_stages(whole, ParallelConfig(pp=3, virtual_stages=1), rank, 16)
        x = part(x)
    assert torch.equal(x, whole(ids))


@pytest.mark.parametrize("preset", ["llama", "gpt2"])
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zbv"])
def test_the_stages_have_all_parameters_of_the_unsplit_model(preset: str, schedule: str) -> None:
    config = model(7, preset=preset)
    layout = ParallelConfig(1, 0, 1, 1, False, 2, schedule, 2, 4)  # type: ignore[arg-type]
    decoder = meta_decoder(config)
    parts = [part for rank in range(2) for part in split_stages(decoder, layout, rank, 16)]
    names = [global_name(part, name) for part in parts for name, p in part.named_parameters()]
    whole = [name for name, _ in decoder.named_parameters(remove_duplicate=False)]
    for part in parts:  # in the order of use: gradients are reduced in the reverse one, while others are computed
        mine = [name for name, _ in part.named_parameters()]
        assert mine == [name for name in whole if name in mine]
    whole = [name for name, _ in decoder.named_parameters()]
    assert set(names) == set(whole)
    twice = [name for name in set(names) if names.count(name) > 1]
    assert twice == (["embed.tokens.weight"] if preset == "gpt2" else [])
    assert all(p.device.type == "meta" for part in parts for p in part.parameters())
