"""train_tokenizer: what it reads and refuses. (Its model: test_tokenize_corpus.)"""

from pathlib import Path

import pytest

from gristmill.counts import READ
from gristmill.engine.options import RunOptions
from gristmill.errors import UsageError
from gristmill.io import readers
from preprocessing.mix import mix
from preprocessing.train_tokenizer import SAMPLED, train_tokenizer
from tests.gristmill.engine.sandbox import sandboxed


def test_tasks_of_the_training_open_only_what_they_declare(
    tmp_path: Path, quiet: RunOptions, corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", 400)
    norm = corpus(files=3, book=60, c4=10)
    with sandboxed(tmp_path) as sandbox:
        train_tokenizer(norm, tmp_path / "sandboxed", 290, options=quiet)
    assert sandbox.tasks > 8
    train_tokenizer(norm, tmp_path / "plain", 290, options=quiet)
    models = [(tmp_path / name / "tokenizer.model").read_bytes() for name in ("sandboxed", "plain")]
    assert models[0] == models[1]
    monkeypatch.setattr("gristmill.engine.slices.SMALL_BYTES", 0)
    train_tokenizer(norm, tmp_path / "alone", 290, options=quiet)
    assert (tmp_path / "alone" / "tokenizer.model").read_bytes() == models[0]


def test_a_tokenizer_in_its_corpus_or_of_another_corpus_is_refused(tmp_path: Path, quiet: RunOptions, corpus) -> None:
    norm, other = corpus(files=1, book=60), corpus("other", files=1, book=70)
    for folder in (norm, norm / "book"):
        with pytest.raises(UsageError, match="give a folder outside it"):
            train_tokenizer(norm, folder, 290, options=quiet)
    train_tokenizer(norm, tmp_path / "out", 290, options=quiet)
    with pytest.raises(UsageError, match="would lose it"):
        train_tokenizer(other, tmp_path / "out", 290, options=quiet)


def test_the_train_set_of_a_mix_is_sampled(
    tmp_path: Path, corpus, quiet: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy for itself, whatever the slices; neither the holdout nor what is left out."""
    norm = corpus(book=400, c4=300, web=50)
    mix(norm, tmp_path / "mix", weights="book=2.5,web=0", holdout=0.1, options=quiet)
    samples = []
    for name in ("whole", "cut"):
        if name == "cut":
            monkeypatch.setattr(readers, "SLICE_BYTES", 2000)
            monkeypatch.setattr("gristmill.engine.slices.SMALL_BYTES", 0)
        counts = train_tokenizer(
            norm, tmp_path / name, 300, sample="12KiB", exact=False, options=quiet, mix_dir=tmp_path / "mix"
        )
        samples.append((tmp_path / name / "tokenizer.model").read_bytes())
        assert counts.total(READ, "book").documents == 900 and not counts.total(READ, "web").documents
        assert 8_000 < counts.total(SAMPLED).bytes < 17_000
        assert counts.total(SAMPLED, "book").documents > 2 * counts.total(SAMPLED, "c4").documents
    assert samples[0] == samples[1]
