from importlib import import_module
from pathlib import Path

from scripts.draw_pictures import DRAWN, PICTURES, STEP, draw_all

MODULES = [
    "data.sequences", "data.batches", "model.embedding", "model.block", "parallel.data.grad_reducer",
    "parallel.gradients", "parallel.parallel_model", "optim.stability", "optim.optimizer", "train_step", "trainer",
]  # fmt: skip


def test_pictures_are_drawn_and_kept(tmp_path: Path) -> None:
    draw_all(tmp_path)
    for name in DRAWN:
        drawn = (tmp_path / f"{name}.svg").read_text()
        assert drawn.startswith("<?xml") and (PICTURES / f"{name}.svg").is_file()
    picture = (PICTURES / "step.svg").read_text()
    assert all(code in picture for _, code, _, _ in STEP), "run python scripts/draw_pictures.py"


def test_the_step_names_code_that_exists() -> None:
    modules = [import_module(f"training.{name}") for name in MODULES]
    for _, code, _, _ in STEP:
        owner, _, function = code.partition(".")
        assert any(hasattr(getattr(module, owner, None), function) for module in modules), code
