"""Each cell of the documentation's table of families is a case of a test."""

from pathlib import Path

from gristmill_parity.feature_cases import feature_cases
from tests.training.hf_models import MODELS, THEIRS
from tests.training.hugging_face import test_families, test_generation

DOCS = Path(__file__).parents[3] / "docs/guides/models.md"


def test_every_cell_names_a_case() -> None:
    text = DOCS.read_text().partition("| family |")[2].partition("\n\n")[0]
    head, _, *rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in f"| family |{text}".splitlines()]
    cases, _ = feature_cases(full=True)
    known = {
        "logits and gradients": test_families.FAMILY_NAMES,
        "import": THEIRS,
        "export": MODELS,
        "text": test_generation.GENERATED,
        "parallel": {case.preset for case in cases if case.processes == 8},
        "document mask": {case.preset for case in cases if case.documents},
    }
    assert head[1:] == list(known) and len(rows) == 15
    for row in rows:
        for column, cell in zip(head[1:], row[1:], strict=True):
            assert cell in known[column] or cell in ("–", "not in transformers"), (row[0], column)
