"""A small checkpoint state, made from a seed, sharded in some layout, saved and loaded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.io.token_shards import TokenizerRecord
from training.checkpoint.checkpoint import CheckpointManager, CheckpointRecord
from training.checkpoint.shard_plans import State
from training.checkpoint.shard_storage import model_state, read_shards
from training.distributed.process_group import init_distributed
from training.experimental.parallel_config import ParallelConfig
from training.model.model_config import ModelConfig
from training.parallel.mesh import World, build_world
from training.sharding.shard_spec import ShardSpec, assemble_shards
from training.sharding.sharded_parameter import ShardedParameter

SHAPES = {"embed.tokens.weight": (7, 6), "blocks.0.mlp.up.weight": (5, 4), "norm.weight": (6,)}
MODEL = ModelConfig(layers=1, width=8, heads=2).resolve(30, 8)
Held = dict[str, tuple[ShardSpec, Tensor]]
Ranks = Callable[..., list[Any]]


@contextmanager
def open_world() -> Iterator[World]:
    with init_distributed("cpu") as device:
        yield build_world(ParallelConfig(dp=torch.distributed.get_world_size(), zero_group=1), device)


def value(key: str, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(key.encode()))
    return torch.randn(shape, generator=generator)


def cut(shape: tuple[int, ...], layout: str, parts: int, number: int) -> ShardSpec:
    """The shard of rank `number` of `parts`: rows, columns, both, or a full copy; vectors are never sharded."""
    whole = ShardSpec.whole(shape)
    if len(shape) < 2 or layout == "copies":
        return whole
    if layout == "both":
        return whole.shard(1, 2, number % 2).shard(0, -(-parts // 2), number // 2)
    return whole.shard({"rows": 0, "columns": 1}[layout], parts, number)


def weights_and_moments(
    layout: str, parts: int, number: int, seed: int
) -> tuple[list[ShardedParameter], dict[str, dict[str, Tensor]]]:
    """Parameters and moments of rank `number` of `parts`; values depend on `seed` and the global position."""
    weights, moments = [], {}
    for name, shape in SHAPES.items():
        spec = cut(shape, layout, parts, number)
        own = nn.Parameter(value(f"model.{name}", shape, seed)[spec.slices].clone())
        weights.append(ShardedParameter(name, own, own, spec, True))
        moments[name] = {
            m: value(f"optim.{name}.{m}", shape, seed)[spec.slices].clone() for m in ("exp_avg", "exp_avg_sq")
        }
    return weights, moments


def record(step: int, size: int = 1) -> CheckpointRecord:
    return CheckpointRecord(
        step=step,
        updates=step - 1,
        processes=size,
        layout={"dp": size},
        stability={"scale": 1024.0},
        unigram_loss=1.5,
        model=MODEL.record(),
        tokenizer=TokenizerRecord("t.model", "0", 30, 2),
    )


def save(folder: Path, layout: str, steps: list[int], keep: int = 2, asynchronous: bool = False) -> list[str]:
    """Save, for each of `steps`, the state with that seed; returns the messages."""
    said: list[str] = []
    with open_world() as world:
        checkpoints = CheckpointManager(folder, keep, world, said.append)
        for step in steps:
            state = model_state(*weights_and_moments(layout, world.size, world.rank, step))
            (checkpoints.save_async if asynchronous else checkpoints.save)(record(step, world.size), state)
            if asynchronous:
                for ((tensor, _),) in state.values():
                    tensor.fill_(torch.nan)  # as the next step would
        checkpoints.wait()
    return said


def load(folder: Path, layout: str) -> tuple[CheckpointRecord | None, Held, list[str]]:
    said: list[str] = []
    with open_world() as world:
        state = model_state(*weights_and_moments(layout, world.size, world.rank, seed=99))
        found = load_latest(CheckpointManager(folder, 2, world, said.append), state)
        return found, {key: (spec, tensor) for key, [(tensor, spec)] in state.items()}, said


def load_latest(checkpoints: CheckpointManager, state: State) -> CheckpointRecord | None:
    """Fill `state` as a resumed run does; returns the checkpoint's record."""
    if (latest := checkpoints.latest()) is None:
        return None
    read_shards(state, latest[0], checkpoints.group.process_group)
    return latest[1]


def is_seed(held: list[Held], seed: int) -> bool:
    """Whether all ranks' shards together are, bit for bit, the state of `seed`."""
    wholes = {key: assemble_shards({specs[key][0]: specs[key][1] for specs in held}) for key in held[0]}
    return all(torch.equal(whole, value(key, tuple(whole.shape), seed)) for key, whole in wholes.items())


def flip_a_bit(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
