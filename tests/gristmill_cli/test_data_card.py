"""gristmill card: a README.md beside the tokens whose numbers are the records', as the Hub's library reads it."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import DatasetCard

from gristmill.errors import UsageError
from gristmill.io.token_manifest import Manifest
from gristmill_cli.data_card import card
from gristmill_cli.funnel import show_funnel


def test_the_numbers_are_those_of_the_records(finished: tuple[Path, Path, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished[1], out)
    card(out, "My mill's grain")
    text = (out / "tokens/README.md").read_text()
    read = DatasetCard(text)
    assert read.data.pretty_name == "My mill's grain" and read.data.size_categories == ["n<1K"]
    funnel, manifest = show_funnel(out), Manifest.load(out / "tokens/train")
    for source, tokens in funnel.tokens["train"].items():
        tally = funnel.tallies[source]
        row = next(line for line in text.splitlines() if line.startswith(f"| {source} |"))
        cells = [cell.strip().replace(",", "") for cell in row.strip("|").split("|")]
        assert [int(cells[at]) for at in (1, 3, 5)] == [tally["read"].documents, tally["train"].documents, tokens]
    for reason in ("short", "duplicate"):
        number = sum(tallies[reason].documents for tallies in funnel.tallies.values() if reason in tallies)
        assert f"| {reason} | {number:,} |" in text
    assert manifest.tokenizer.sha256 in text
    card(out, "My mill's grain")
    assert (out / "tokens/README.md").read_text() == text


def test_what_is_no_finished_run_is_refused(finished: tuple[Path, Path, str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected the --out of a gristmill run, got no run\.json"):
        card(tmp_path)
    shutil.copytree(finished[1], tmp_path / "out")
    (tmp_path / "out/tokens/README.md").write_text("# Mine\n")
    with pytest.raises(UsageError, match=r"README\.md exists, and gristmill card did not write it; move it"):
        card(tmp_path / "out")
    (tmp_path / "out/funnel.json").unlink()
    with pytest.raises(UsageError, match="that has finished"):
        card(tmp_path / "out")
