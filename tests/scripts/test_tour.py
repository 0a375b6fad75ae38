"""docs/tour.ipynb runs from its first cell to its last, and shows its pictures."""

from pathlib import Path

import pytest

from tests.gristmill_cli.documentation import DOCS


@pytest.mark.thorough
def test_the_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    book = nbformat.read(DOCS / "tour.ipynb", 4)
    stored = [_kinds(cell) for cell in book.cells]
    NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [_kinds(cell) for cell in book.cells] == stored
    pictures = [
        output for cell in book.cells for output in cell.get("outputs", ()) if "image/png" in output.get("data", ())
    ]
    assert len(pictures) == 3
    said = "".join(output.text for cell in book.cells for output in cell.get("outputs", ()) if "text" in output)
    assert "removed" in said and "= train" in said and "done: holdout loss" in said and "sample: " in said


def _kinds(cell: dict) -> set[str]:
    """Of a cell's outputs; how many streams there are depends on how busy the machine is."""
    return {output["output_type"] for output in cell.get("outputs", ())}
