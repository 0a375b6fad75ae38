"""pass1 by amounts: the epochs of a source follow from the bytes, or tokens, that neither short nor duplicates have."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from gristmill.counts import WRITTEN
from gristmill.engine.options import RunOptions
from gristmill.errors import UsageError
from gristmill.io.keys import write_keys
from preprocessing.mixing.shuffle_buckets import BucketManifest, manifest_path
from preprocessing.shuffle_holdout import pass1
from tests.patience import patience
from tests.preprocessing.conftest import ROOT
from tests.tokenizers_of_models import PROSE, content_of


def weights_of(folder: Path) -> dict[str, float]:
    return BucketManifest.load(manifest_path(folder)).weights


def content(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file() and ".gristmill" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.fixture
def norm(tmp_path: Path, write) -> Path:
    """Forty texts of 100 bytes, four of them short and six duplicates; and another source."""
    write(tmp_path / "norm/book/0.jsonl", [{"text": "ü" * 48 + f"{i:04d}"} for i in range(40)])
    write(tmp_path / "norm/web/0.jsonl", [{"text": PROSE[i % 6] * (40 if i == 3 else 1)} for i in range(2000)])
    write_keys(tmp_path / "short.pickle", {"book/0.jsonl": np.arange(4)})
    write_keys(tmp_path / "dup.pickle", {"book/0.jsonl": np.arange(4, 10)})
    return tmp_path / "norm"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(content_of("Llama 3"), encoding="utf-8")
    return tmp_path / "tokenizer.json"


@pytest.mark.parametrize(("asked", "weight", "documents"), [(750, 0.25, 8), (7500, 2.5, 75), (3000, 1, 30)])
def test_bytes_become_epochs_of_what_is_kept(
    tmp_path: Path, norm: Path, quiet: RunOptions, asked: int, weight: float, documents: int
) -> None:
    sets = {"duplicates": tmp_path / "dup.pickle", "short_docs": tmp_path / "short.pickle"}
    counts = pass1(norm, tmp_path / "out", **sets, options=quiet, bytes={"book": asked})
    assert weights_of(tmp_path / "out") == {"book": weight, "web": 1}
    written = counts.total(WRITTEN, "book")
    assert (written.documents, written.bytes) == (documents, 100 * documents)
    assert counts.total(WRITTEN, "web").documents == 2000  # it was not named


def test_tokens_are_those_that_the_tokenizer_counts(
    tmp_path: Path, norm: Path, quiet: RunOptions, tokenizer: Path, read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preprocessing.tokenizer.loading.LONG_TEXT", 1000)  # so that one is encoded by itself
    reference = Tokenizer.from_file(str(tokenizer))
    texts = [record["text"] for record in read(norm / "web")]
    total = sum(len(reference.encode(text, add_special_tokens=False)) for text in texts)
    pass1(norm, tmp_path / "out", options=quiet, tokens={"web": 3 * total}, tokenizer=tokenizer)
    assert weights_of(tmp_path / "out") == {"book": 1, "web": 3}


@pytest.mark.thorough
def test_bytes_are_the_same_under_workers_and_shards_and_done_is_done(
    tmp_path: Path, norm: Path, tokenizer: Path, capsys
) -> None:
    asked = {"tokens": "book=1111,web=22222", "tokenizer": tokenizer}

    def mixed(name: str, **more: object) -> dict[str, bytes]:
        pass1(norm, tmp_path / name, options=RunOptions(**more), **asked)
        return content(tmp_path / name)

    one, two = mixed("one", workers=1), mixed("two", workers=2)
    three = tmp_path / "three"
    command = [sys.executable, "preprocessing/shuffle_holdout.py", "pass1", "--input_dir", norm, "--out_dir", three]
    command += ["--tokens", asked["tokens"], "--tokenizer", tokenizer, "--workers", "1"]
    shards = [subprocess.Popen([*command, "--shard", f"{i}/2"], cwd=ROOT, stderr=subprocess.PIPE) for i in range(2)]
    said = [shard.communicate(timeout=patience(120))[1] for shard in shards]
    assert [shard.returncode for shard in shards] == [0, 0], said
    assert one == two == content(three) and len(one) > 3
    capsys.readouterr()
    mixed("one", workers=2)
    assert "done already, nothing to do" in capsys.readouterr().err
    tokenizer.write_text(content_of("GPT-2"), encoding="utf-8")  # counts otherwise
    before = weights_of(tmp_path / "one")
    mixed("one", workers=1)
    assert weights_of(tmp_path / "one") != before


def test_the_summary_has_what_was_asked_and_what_was_written(
    tmp_path: Path, norm: Path, quiet: RunOptions, capsys
) -> None:
    pass1(norm, tmp_path / "out", options=RunOptions(workers=1), bytes="book=1000")
    shown = capsys.readouterr()
    row = next(line.split() for line in shown.out.splitlines() if line.startswith("book"))
    assert row[:3] == ["book", "0.25", "10"] and row[-3:] == ["1,000", "→", "1,000"]


MISTAKES = {
    "--bytes book=1e+09: expected at most 4,000,000, 1,000 times the 4,000 that": {"bytes": "book=1e9"},
    "--bytes names 'c4': the corpus has the sources 'book', 'web'; give bytes of these only": {"bytes": "c4=1"},
    "--bytes book: expected source=number,… with each source once": {"bytes": "book"},
    "--bytes book=0: expected a number of bytes above 0": {"bytes": "book=0"},
    "--bytes and --weights are both given: expected one of them": {"bytes": "book=1", "weights": "book=1"},
    "--tokens needs --tokenizer": {"tokens": "book=1"},
    "--tokenizer has no effect without --tokens": {"tokenizer": Path("t.json")},
}


@pytest.mark.parametrize("sentence", MISTAKES)
def test_an_amount_that_cannot_be(
    tmp_path: Path, norm: Path, quiet: RunOptions, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.json").write_text(content_of("Llama 3"), encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        pass1(norm, tmp_path / "out", options=quiet, **MISTAKES[sentence])
    assert sentence in str(caught.value)


def test_a_source_of_which_nothing_is_left(tmp_path: Path, norm: Path, quiet: RunOptions) -> None:
    write_keys(tmp_path / "all.pickle", {"book/0.jsonl": np.arange(40)})
    with pytest.raises(UsageError, match=r"expected at most 0, 1,000 times the 0 .* leave out this source"):
        pass1(norm, tmp_path / "out", short_docs=tmp_path / "all.pickle", options=quiet, bytes="book=1")
