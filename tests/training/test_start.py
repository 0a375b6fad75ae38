"""A start that is refused leaves the output folder to the next one."""

from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.errors import InputError, UsageError
from training.config import TrainConfig
from training.train import train


def test_a_refused_init_from_does_not_claim_the_folder(config: TrainConfig, tmp_path: Path) -> None:
    one_step = replace(config, optim=replace(config.optim, steps=1))
    other = replace(one_step, out_dir=tmp_path / "other", model=replace(config.model, rope_base=500.0))
    train(other)
    for wrong, error in (
        (tmp_path / "nowhere", "wanted a checkpoint"),
        (other.out_dir, "of another model: model.rope"),
    ):
        with pytest.raises(UsageError, match=error):
            train(replace(one_step, init_from=wrong, seed=7))
        assert [path.name for path in one_step.out_dir.iterdir()] == [".lock"]
    train(replace(one_step, init_from=other.out_dir, model=other.model))  # the corrected options, another seed
    assert (one_step.out_dir / "run.json").is_file()


@pytest.mark.parametrize("text", ["[]", '{"steps": null}', "{}", "\xff", "nonsense"])
def test_a_damaged_run_json_is_an_error(config: TrainConfig, text: str) -> None:
    config.out_dir.mkdir()
    (config.out_dir / "run.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"run.json is damaged; remove .* to start over"):
        train(config)
