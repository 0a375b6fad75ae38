import math
import re
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from gristmill.config import load_config
from gristmill.errors import UsageError
from training.config import TrainConfig
from training.data.data_config import DataConfig
from training.model.model_config import ModelConfig


def test_resolve_fills_in_all_defaults() -> None:
    llama = ModelConfig(width=96, heads=6).resolve(1000, 64)
    assert (llama.kv_heads, llama.ffn_width, llama.vocab_size, llama.context) == (6, 256, 1000, 64)
    assert (llama.norm, llama.positions, llama.mlp, llama.bias, llama.tied) == ("rms", "rope", "swiglu", False, False)
    gpt2 = ModelConfig(preset="gpt2", width=96, tied=False).resolve(1000, 64)
    assert (gpt2.ffn_width, gpt2.norm, gpt2.positions, gpt2.tied) == (384, "layer", "learned", False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 100, "heads": 3}, "try --model.width 102"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads 3"),
        ({"width": 12, "heads": 4}, "even number of features"),
        ({"vocab_size": 50}, "below the tokenizer's 99"),
        ({"context": 8}, "below data.seq_len 16"),
        ({"layers": -1}, "above 0"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_inconsistent_model_sizes_are_errors(changes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ModelConfig(**changes).resolve(99, 16)  # type: ignore[arg-type]


def numbers(options: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The options of a configuration that are numbers, with their values; not lists of them that are empty."""
    hints = typing.get_type_hints(type(options))
    for found in fields(options):
        value, kinds = getattr(options, found.name), (hints[found.name], *typing.get_args(hints[found.name]))
        if is_dataclass(value):
            yield from numbers(value, f"{prefix}{found.name}.")
        elif (int in kinds or float in kinds) and value not in ((), {}):
            yield prefix + found.name, value


CONFIG = TrainConfig(Path("out"), DataConfig(Path("a"), Path("b")))
NUMBERS = dict(numbers(CONFIG))


def with_option(config: Any, name: str, value: Any) -> Any:
    section, _, rest = name.partition(".")
    return replace(config, **{section: with_option(getattr(config, section), rest, value) if rest else value})


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_is_refused_outside_its_range_with_a_value_to_try(name: str) -> None:
    default = NUMBERS[name]
    of_float = default is None or isinstance(default, float | tuple)
    for value in (math.nan, math.inf, -math.inf, -1.0, -5e-324) if of_float else (-1, 2**63, 10**400):
        given = (default[0], value) if isinstance(default, tuple) else value
        with pytest.raises(UsageError) as error:
            with_option(CONFIG, name, given).check()
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        said = str(error.value)
        assert said.startswith(f"{name} is {given}; expected ") and said.endswith(f"; try --{name} {shown}"), said


def test_the_ends_of_ranges() -> None:
    for name, value, wanted in [
        ("optim.lr", 0.0, "more than 0"),
        ("optim.betas", (1.0, 0.9), "less"),
        ("optim.eps", 0.0, "more than 0"),
        ("timeout", 1e9, "10,000,000 or less"),
        ("model.layers", 10_001, "10,000 or less"),
        ("data.batch_size", 0, "1 or more"),
        ("stability.min_loss_scale", 0.0, "more than 0"),
    ]:
        with pytest.raises(UsageError, match=rf"{name} is .*; expected .*{re.escape(wanted)}"):
            with_option(CONFIG, name, value).check()
    for name, value in (("optim.betas", (0.0, 0.0)), ("optim.min_lr", 0.0), ("eval.temperature", 0.0)):
        with_option(CONFIG, name, value).check()


def test_a_holdout_without_a_name_is_refused_as_it_would_take_that_of_data_holdout() -> None:
    given = ["--out_dir", "out", "--data.train", "a", "--data.holdout", "b", "--data.holdouts", "", "c"]
    with pytest.raises(UsageError, match=r"data.holdouts has a folder with an empty name; .* --data.holdouts other c"):
        load_config(TrainConfig, given).check()


def test_a_rank_waits_longer_for_one_that_compiles() -> None:
    assert [replace(CONFIG, **given).seconds_to_wait for given in ({}, {"compile": True}, {"timeout": 5.0})] == [
        60,
        600,
        5,
    ]


def test_a_trace_of_steps_that_the_run_does_not_have_is_refused() -> None:
    for steps, suggested in (("990:1001", "990:1000"), ("2000:2001", "1000:1000")):
        with pytest.raises(UsageError, match=f"'{steps}', and the run ends at step 1000; .* {suggested}"):
            with_option(CONFIG, "profile.steps", steps).check()
    with_option(CONFIG, "profile.steps", "999:1000").check()


@pytest.mark.parametrize("option", ["checkpoint.folder", "data.cache", "memory.folder"])
def test_a_folder_in_a_bucket_is_refused_before_one_of_its_name_is_made_here(option: str) -> None:
    with pytest.raises(UsageError, match="s3://bucket/run: expected a folder of this machine"):
        with_option(CONFIG, option, Path("s3://bucket/run")).check()
