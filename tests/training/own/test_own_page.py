"""The page on parts of your own: its file trains alike under every layout, with all parts together and one by one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gristmill_cli.documentation import examples
from tests.training.own.test_own_modules import LAYOUTS, losses, options

EACH = {
    "model.mlp": ("squared_relu", "ScaledMLP"), "model.block": ("ScaledBlock",), "optim.name": ("Lion",),
    "optim.schedule": ("restarts",),
}  # fmt: skip


def test_the_file_of_the_page_trains_alike_under_every_layout(
    corpus: Path, tmp_path: Path, train_in_ranks: Callable[[int, Path, list[str]], None]
) -> None:
    (text,) = examples("guides/own-parts.md")
    parts = tmp_path / "my_parts.py"
    parts.write_text(text)
    given = options(corpus, "--optim.lr", "1e-3")
    for option, names in EACH.items():
        given += [f"--{option}", f"{parts}:{names[-1]}"]
    train_in_ranks(1, tmp_path / "one", given)
    plain = losses(tmp_path / "one")
    assert len(plain) == 4 and plain[4] < plain[1]
    for number, (layout, (processes, words)) in enumerate(LAYOUTS.items()):
        train_in_ranks(processes, out_dir := tmp_path / str(number), [*given, *words])
        assert losses(out_dir) == pytest.approx(plain, rel=1e-9), layout


@pytest.mark.parametrize(("option", "name"), [(option, name) for option, names in EACH.items() for name in names])
def test_each_part_of_the_page_alone(
    corpus: Path, tmp_path: Path, train_in_ranks: Callable[[int, Path, list[str]], None], option: str, name: str
) -> None:
    (text,) = examples("guides/own-parts.md")
    (tmp_path / "my_parts.py").write_text(text)
    train_in_ranks(1, tmp_path / "mine", options(corpus, f"--{option}", f"{tmp_path}/my_parts.py:{name}"))
    train_in_ranks(1, tmp_path / "ours", options(corpus))
    assert losses(tmp_path / "mine")[4] != losses(tmp_path / "ours")[4]
