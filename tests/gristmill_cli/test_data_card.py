"""gristmill card: a README.md beside the tokens whose numbers are the records', as the Hub's library reads it."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import DatasetCard

from gristmill.errors import UsageError
from gristmill.io.token_manifest import Manifest
from gristmill_cli.data_card import card
from gristmill_cli.funnel import show_funnel
from gristmill_cli.run import run
from gristmill_cli.run_config import Mix, RunConfig, Tokenizer
from tests.gristmill_cli.corpus import write_records


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


def test_what_is_written_below_the_marker_stays(finished: tuple[Path, Path, str], tmp_path: Path) -> None:
    shutil.copytree(finished[1], tmp_path / "out")
    card(tmp_path / "out")
    path = tmp_path / "out/tokens/README.md"
    first = path.read_text()
    assert str(tmp_path) not in first and str(finished[0].parent) not in first  # no folder of this machine
    path.write_text(f"{first}\n## Licence\n\nOf the miller’s heirs.\n")
    card(tmp_path / "out", "Another name")
    again = path.read_text()
    assert again.endswith("again. -->\n\n## Licence\n\nOf the miller’s heirs.\n") and again.count("-->") == 1
    assert 'pretty_name: "Another name"' in again


def test_the_rules_of_the_recipe_are_told(tmp_path: Path) -> None:
    (tmp_path / "corpus/book").mkdir(parents=True)
    texts = [" ".join(f"{number}word{at}" for at in range(60)) for number in range(40)]
    write_records(tmp_path / "corpus/book/a.jsonl", [{"text": text} for text in [*texts, "few"]])
    recipe = tmp_path / "own.toml"
    recipe.write_text("words.min = 50\n")
    run(
        RunConfig(tmp_path / "corpus", tmp_path / "out", workers=1, recipe=str(recipe), mix=Mix(holdout=0.1),
                  tokenizer=Tokenizer(vocab_size=300, exact=False))
    )  # fmt: skip
    card(tmp_path / "out")
    text = (tmp_path / "out/tokens/README.md").read_text()
    assert "## Rules of the recipe own.toml\n\n```toml\nwords.min = 50\n```" in text
    assert "| words | 1 |" in text and str(tmp_path) not in text
    recipe.write_text("words.min = 2\n")
    card(tmp_path / "out")
    assert "no longer what the run read" in (tmp_path / "out/tokens/README.md").read_text()


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
