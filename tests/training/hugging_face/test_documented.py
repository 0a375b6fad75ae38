"""docs/guides/models.md: every cell of the table of families is a case that is tested."""

import re
from pathlib import Path

from gristmill_parity.cases import SHRUNK
from tests.training.hf_models import MODELS, THEIRS
from tests.training.hugging_face.test_families import FAMILY_NAMES
from tests.training.hugging_face.test_generation import GENERATED
from training.hugging_face.families import FAMILIES
from training.presets.presets import PRESETS

DOCS = Path(__file__).parents[3] / "docs/guides/models.md"
# of the columns, but the first and last
CASES = (set(FAMILY_NAMES), set(THEIRS), set(MODELS), set(GENERATED), set(SHRUNK))


def test_every_cell_is_a_case_of_its_test() -> None:
    table = DOCS.read_text().partition("| family |")[2].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line.startswith("|")]
    assert set(FAMILIES) == {re.sub("`", "", row[1]) for row in rows if row[1].startswith("`")}
    for family, *cells in rows:
        for cell, cases in zip(cells, CASES, strict=False):
            for case in re.findall("`(.*?)`", cell):
                assert case in cases, f"{family}: no case {case}"
        assert "`" in cells[4], f"{family} is in no row of the certificate"


def test_every_published_preset_trains_in_the_full_certificate_or_has_the_parts_of_one_that_does() -> None:
    assert "`megatron-*`, whose parts are those of `mt-nlg-530b`" in DOCS.read_text()
    sizes, left_out = ("layers", "width", "heads"), {name for name in PRESETS if name.startswith("megatron-")}
    assert {name for name, preset in PRESETS.items() if preset.parameters} == SHRUNK.keys() | left_out
    for name in left_out:
        parts = [{key: PRESETS[it].options[key] for key in PRESETS[it].options if key not in sizes}
                 for it in (name, "mt-nlg-530b")]  # fmt: skip
        assert parts[0] == parts[1]
