"""The table of docs/guides/generation.md: each family writes text and has lm_eval's likelihoods, divided over ranks.

A cell is a test. One process is compared with transformers in test_greedy.py, and with lm_eval's own backend on the
export in tests/training/tasks/test_lm_eval_model.py; here ranks are compared with one process, to 1e-10 in float64.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import REPOSITORY
from tests.training.generation.test_greedy import written
from tests.training.hf_models import MODELS
from tests.training.hugging_face.test_generation import GENERATED
from tests.training.tasks.test_lm_eval_model import answers
from training.distributed.process_group import init_distributed
from training.experimental.parallel_config import ParallelConfig
from training.hugging_face.families import FAMILIES as EXPORTED
from training.language_model import open_language_model
from training.tasks.lm_eval_model import GristmillLM

# one model of each family, of an even number of heads
FAMILIES = {name.partition(",")[0]: "bloom" if "3 heads" in name else name for name in GENERATED}
LAYOUTS = ("tp", "pp", "ep")
PAGE = REPOSITORY / "docs/guides/generation.md"


def cells() -> list[tuple[str, str, str]]:
    """Family, use and layout of each cell; dense models have no experts to divide."""
    return [
        (family, use, layout)
        for family, name in FAMILIES.items()
        for use in ("generate", "lm-eval")
        for layout in LAYOUTS
        if layout != "ep" or MODELS[name].experts
    ]


def write(folder: Path, **layout: int) -> Any:
    """Prompt, tokens and text of some prompts."""
    return written(folder, "fp64", **layout)


def score(folder: Path, **layout: int) -> Any:
    """What lm_eval asks for: likelihoods of answers and of texts, and texts."""
    with init_distributed("cpu") as device:
        return answers(GristmillLM(open_language_model(folder, device, ParallelConfig(**layout), "fp64"), 4))


USES = {"generate": write, "lm-eval": score}


@pytest.fixture(scope="module")
def of_one_process(checkpoint_of: Callable[[str], Path]) -> Callable[[str, str], Any]:
    """`of_one_process(NAME, USE)`, once computed."""
    made: dict[tuple[str, str], Any] = {}

    def get(name: str, use: str) -> Any:
        if (name, use) not in made:
            made[name, use] = USES[use](checkpoint_of(name))
        return made[name, use]

    return get


@pytest.mark.every(11)
@pytest.mark.parametrize(("family", "use", "layout"), cells())
def test_ranks_have_what_one_process_has(
    checkpoint_of: Callable[[str], Path],
    of_one_process: Callable[[str, str], Any],
    run_ranks: Callable[..., list[Any]],
    family: str,
    use: str,
    layout: str,
) -> None:
    name = FAMILIES[family]
    ranks = 5 if layout == "ep" and MODELS[name].experts == 5 else 2
    expected = of_one_process(name, use)
    for found in run_ranks(ranks, partial(USES[use], **{layout: ranks}), checkpoint_of(name)):
        if use == "generate":
            assert found == expected
        else:
            assert [greedy for _, greedy in found[0]] == [greedy for _, greedy in expected[0]]
            values = [value for value, _ in expected[0]] + expected[1]
            assert [value for value, _ in found[0]] + found[1] == pytest.approx(values, rel=1e-10)
            assert found[2] == expected[2]


def test_no_family_is_left_out() -> None:
    assert set(FAMILIES) == set(EXPORTED)


def test_the_page_has_the_cells_that_are_tested() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text().partition("## What is tested")[2], re.MULTILINE)
    shown = [
        (family, use, layout)
        for family, marks in rows
        for use in USES
        for layout, mark in zip(LAYOUTS, marks.split(" | ")[-3:], strict=True)
        if mark == "✓"
    ]
    assert sorted(shown) == sorted(cells())
    assert all(marks.split(" | ")[:2] == ["✓", "✓"] for _, marks in rows)
