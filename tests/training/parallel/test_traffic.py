"""The traffic theory beside what a step really sends, with many buckets and many chunks of the loss."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_traffic import LAYOUTS, counted_and_expected, traffic_case
from training.parallel import parameter_shapes, traffic_inputs

RunRanks = Callable[..., list[Any]]
CHOICE = ("DDP", "ZeRO-1", "ZeRO-2, groups of 2", "ZeRO-3", "tp", "tp, sequence parallel", "pp, interleaved")
CHOICE += ("2D", "3D", "ring", "Ulysses")
COMPRESSED = ("PowerSGD", "PowerSGD, tp, sequence parallel", "int8", "int8, tp, pp")


@pytest.mark.every(6)
@pytest.mark.parametrize("name", CHOICE)
@pytest.mark.parametrize("preset", ["llama", "gpt2"])
def test_traffic_in_bf16_is_that_of_the_formulas(run_ranks: RunRanks, name: str, preset: Any) -> None:
    for counted, expected in run_ranks(LAYOUTS[name][0], counted_and_expected, traffic_case(name, preset, "bf16")):
        assert counted == expected
        if name in ("DDP", "ZeRO-1"):
            assert max(volume.calls for volume in counted.values()) > 5  # buckets
        if name == "tp":
            assert counted["tp", "all-reduce"].calls > 60  # chunks


@pytest.mark.every(2)
@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_gradients_have_the_bytes_of_the_formulas(run_ranks: RunRanks, name: str) -> None:
    for preset in ("llama", "gpt2") if ", pp" not in name else ("llama",):
        for counted, expected in run_ranks(LAYOUTS[name][0], counted_and_expected, traffic_case(name, preset, "fp32")):
            assert counted == expected
            assert counted["replicate", "all-reduce"].calls > 3  # buckets


def test_the_theory_uses_nothing_of_what_it_checks() -> None:
    theory = [
        *Path(traffic_inputs.__file__).parents[1].rglob("*traffic.py"),
        Path(traffic_inputs.__file__),
        Path(parameter_shapes.__file__),
    ]
    allowed = ("traffic", "traffic_inputs", "parameter_shapes", "layout", "options", "experiment")
    allowed += ("memory_config", "model_config", "model_options", "own_shapes")
    assert len(theory) >= 6
    for path in theory:
        tree = ast.parse(path.read_text())
        imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        used = [name for name in imported if name.startswith("training.") and name.split(".")[-1] not in allowed]
        assert not used, f"{path} imports {used}"
