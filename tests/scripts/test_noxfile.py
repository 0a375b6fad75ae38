"""The versions of torch that nox tests are those that pyproject.toml allows and the documentation tells of."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_oldest_torch_is_the_oldest_allowed_and_both_are_documented() -> None:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    oldest, newest = ast.literal_eval(assigned["TORCH"])
    assert f'"torch>={oldest.rpartition(".")[0]}",' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = (ROOT / "docs/reference/development.md").read_text(encoding="utf-8")
    assert f"| {oldest} |" in table and f"| {newest} |" in table
