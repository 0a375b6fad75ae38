"""What an unknown option was meant to be: its key decides, whatever section it is given in."""

import pytest

from gristmill.arguments import _OTHER_NAMES, suggestion
from gristmill.config import option_types
from training.config import TrainConfig

KNOWN = list(option_types(TrainConfig))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--optim.learning_rate", "--optim.lr"),
        ("--optim.learningrate", "--optim.lr"),
        ("--learning_rate", "--optim.lr"),
        ("--lr", "--optim.lr"),
        ("--batch", "--data.batch_size"),
        ("--optim.batchsize", "--data.batch_size"),
        ("--max_steps", "--optim.steps"),
        ("--model.stepz", "--optim.steps"),
        ("--optim.weight_decaay", "--optim.weight_decay"),
        ("--checkpoint.evry", "--checkpoint.every"),
        ("--evall.every", "--eval.every"),
    ],
)
def test_an_option_of_the_trainer_is_found_by_its_key(given: str, meant: str) -> None:
    assert suggestion(given, KNOWN) == f"; did you mean {meant}?"


def test_nothing_is_guessed_of_a_section_alone() -> None:
    """Names that have only their section in common are not alike: all of the section are shown."""
    shown = suggestion("--checkpoint.zzz", KNOWN)
    assert shown.startswith("; there are --checkpoint.every, --checkpoint.keep, ") and "--optim" not in shown


def test_other_names_are_of_options() -> None:
    keys = {name.lstrip("-").rpartition(".")[2] for name in KNOWN}
    assert {*_OTHER_NAMES.values()} <= keys
    assert not {*_OTHER_NAMES} & {key.replace("_", "") for key in keys}
