from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.bench_memory import Run
from gristmill.errors import UsageError
from training.distributed.process_group import init_distributed
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import MemoryConfig
from training.model.model_config import ModelConfig
from training.parallel.mesh import build_world

RunRanks = Callable[..., list[Any]]
CONFIG = ModelConfig(preset="gpt2", layers=3, width=32, heads=4)


def in_files(run: Run) -> bool:
    """Whether what is updated, and what FSDP gathers from, are the files."""
    with torch.no_grad():
        for weight, p in zip(run.params, run.part.parameters(), strict=True):
            same = weight.local.untyped_storage().data_ptr() == p.to_local().untyped_storage().data_ptr()  # type: ignore[attr-defined]
            if not same:
                return False
    maps = Path("/proc/self/maps").read_text()
    paths = sorted(run.files.folder.iterdir())  # type: ignore[union-attr]
    return all(str(path) in maps for path in paths) and len(paths) == sum(w.local.numel() > 0 for w in run.params)


def trained(folder: Path, vocab_size: int) -> list[dict[str, Any]]:
    """Losses and rows of a run in memory and one in files."""
    config, results = CONFIG.resolve(vocab_size, 16), []
    ids = torch.randint(vocab_size, (6, 16), generator=torch.Generator().manual_seed(1))
    with init_distributed("cpu") as device:
        layout = ParallelConfig(zero=3).resolve(int(torch.distributed.get_world_size()), config, 16)
        world = build_world(layout, device)
        for places in ({}, {"parameters": "disk"}, {"parameters": "disk", "optimizer": "disk"}):
            run = Run(config, world, 3, MemoryConfig(folder=folder, **places))  # type: ignore[arg-type]
            losses = []
            for _ in range(3):
                loss = run.forward(ids.chunk(world.size)[world.rank])
                losses.append(loss.item())
                run.update(loss)
            where = in_files(run) if places else True
            changed = run.files is None or any(any(path.read_bytes()) for path in run.files.folder.iterdir())
            results.append(
                {"losses": losses, "rows": [w.local.detach().clone() for w in run.params], "there": where and changed}
            )
            run.close()
    return results


@pytest.mark.every(2)
@pytest.mark.parametrize(("ranks", "vocab_size"), [(1, 60), (2, 61), (3, 64)])
def test_offloaded_parameters_train_bitwise_as_in_memory(
    run_ranks: RunRanks, tmp_path: Path, ranks: int, vocab_size: int
) -> None:
    """Rows that do not divide, and rows of which a process has none, among them."""
    for memory, *files in run_ranks(ranks, trained, tmp_path, vocab_size):
        assert memory["losses"][0] > memory["losses"][-1]
        for disk in files:
            assert disk["there"] and disk["losses"] == memory["losses"]
            assert all(map(torch.equal, disk["rows"], memory["rows"]))
    assert not list(tmp_path.iterdir())


def resident(folder: Path) -> list[float]:
    """For a run in memory and one in files: resident bytes between steps, over those of parameters and states."""
    config = ModelConfig(layers=3, width=256, heads=4).resolve(2048, 16)
    ids, shares = torch.zeros(1, 16, dtype=torch.int64), []
    with init_distributed("cpu") as device:
        world = build_world(ParallelConfig(zero=3).resolve(1, config, 16), device)
        for places in ({}, {"parameters": "disk", "optimizer": "disk"}):
            run = Run(config, world, 3, MemoryConfig(folder=folder, **places))  # type: ignore[arg-type]
            run.update(run.forward(ids))
            mapped = sum(w.local.nbytes for w in run.params)
            addresses = [w.local.data_ptr() for w in run.params]
            shares.append(_resident_of(addresses) / mapped)
            run.close()
    return shares


def _resident_of(addresses: list[int]) -> int:
    """Resident bytes of the mappings in which these addresses are."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            start, stop = (int(end, 16) for end in line.split()[0].split("-"))
            inside = any(start <= address < stop for address in addresses)
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_pages_are_dropped_between_uses(run_ranks: RunRanks, tmp_path: Path) -> None:
    ((memory, files),) = run_ranks(1, resident, tmp_path)
    assert memory > 0.99 and files < 0.01


def test_parameter_offload_needs_zero_3() -> None:
    for place in ("cpu", "disk"):
        config = MemoryConfig(parameters=place)  # type: ignore[arg-type]
        config.check(3)
        with pytest.raises(UsageError, match=f"memory.parameters is {place} and parallel.zero 2.*--parallel.zero 3"):
            config.check(2)
    MemoryConfig(optimizer="disk").check(0)


def test_options_without_effect_give_a_warning() -> None:
    assert MemoryConfig(optimizer="cpu").warnings("cpu") == [
        "memory.optimizer cpu saves nothing here: the device is the CPU; --memory.optimizer disk would"
    ]
    assert MemoryConfig(optimizer="cpu").warnings("cuda") == MemoryConfig().warnings("cpu") == []
