"""A suggested size of a layout passes the same checks as an answer, with the processes that were started."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.errors import UsageError
from training.experimental.parallel_config import ParallelConfig
from training.model.model_config import ModelConfig

DENSE = ModelConfig(layers=3, width=48, heads=12, kv_heads=6, ffn_width=96).resolve(300, 32)
SPARSE = ModelConfig(layers=5, width=48, heads=12, kv_heads=4, ffn_width=96, experts=6).resolve(300, 24)
SIZE = re.compile(r"try --parallel\.(tp|pp|cp|ep) (\d+)(?: with (\d+) process)?")


def refusal(layout: ParallelConfig, processes: int, model: ModelConfig) -> str:
    """What the layout is refused with; empty if it is not."""
    try:
        layout.resolve(processes, model, model.context)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "suggested"),
    [
        ({"pp": 4}, {"pp": 2}),  # three stages do not divide four processes
        ({"tp": 5}, {"tp": 2}),  # nor do three parts
        ({"tp": 4}, {"tp": 2}),
        ({"pp": 8, "dp": 2}, {"pp": 2}),
        ({"tp": 8, "dp": 4}, {"tp": 1}),
        ({"pp": 4, "schedule": "zbv"}, {"pp": 1}),
    ],
)
def test_a_suggestion_is_for_four_processes(options: dict[str, Any], suggested: dict[str, int]) -> None:
    said = refusal(ParallelConfig(**options), 4, DENSE)
    ((name, size),) = suggested.items()
    assert f"try --parallel.{name} {size}" in said
    assert not refusal(ParallelConfig(**options | suggested), 4, DENSE)


def test_a_size_that_needs_other_processes_names_them() -> None:
    said = refusal(ParallelConfig(tensor="2d", tp=3), 3, DENSE)
    assert "try --parallel.tp 4 with 4 processes, or --parallel.tensor 1d" in said
    assert not refusal(ParallelConfig(tensor="2d", tp=4), 4, replace(DENSE, kv_heads=6))


sizes = st.integers(1, 9)


@settings(max_examples=600, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "dp": st.integers(0, 4), "tp": sizes, "pp": sizes, "cp": st.sampled_from([1, 1, 2, 3, 4]),
            "ep": st.sampled_from([1, 1, 2, 3, 4, 6]), "zero": st.sampled_from([0, 0, 1, 3]),
            "schedule": st.sampled_from(["1f1b", "interleaved-1f1b"]), "context": st.sampled_from(["ring", "ulysses"]),
            "tensor": st.sampled_from(["1d", "1d", "2d", "3d"]), "sequence_parallel": st.booleans(),
        }
    ),
    st.integers(1, 24),
    st.sampled_from([DENSE, SPARSE]),
)  # fmt: skip
def test_every_suggested_size_is_accepted(options: dict[str, Any], processes: int, model: ModelConfig) -> None:
    layout = ParallelConfig(**options)
    said = refusal(layout, processes, model)
    for name, size, others in SIZE.findall(said):
        again = refusal(replace(layout, **{name: int(size)}), int(others or processes), model)
        assert not again, f"{said} --> {again}"
