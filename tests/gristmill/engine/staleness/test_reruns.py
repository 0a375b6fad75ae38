"""What a run says of tasks that it runs again."""

import pytest

from gristmill.engine.staleness.reruns import explain


@pytest.mark.parametrize(
    ("details", "said"),
    [
        (False, "upper: upper: 1 of 2 tasks runs: documents or files failed in 1 task\n"),
        (True, "upper: b: documents or files failed in it\n"),
    ],
)
def test_a_task_that_is_tried_again_says_so(details: bool, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It has the arguments and inputs of before, and its output is there."""
    identities = {name: {"argument suffix": "?"} for name in "ab"}
    explain("upper", "upper", identities, identities, ["b"], {"b"}, details)
    assert capsys.readouterr().err == said


def test_a_step_without_tasks_is_not_explained(capsys: pytest.CaptureFixture[str]) -> None:
    explain("upper", "upper", {}, {}, [], set(), details=False)
    assert capsys.readouterr().err == ""
