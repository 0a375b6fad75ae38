"""mix decides, without writing a text, on the documents that pass1, pass2 and dedup_train write."""

import importlib
import json
from collections import Counter
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from gristmill.counts import HELD_OUT, IN_HOLDOUT, MALFORMED, READ, WRITTEN
from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, TooManyMalformed, UsageError
from gristmill.io import readers
from gristmill.io.keys import write_keys
from gristmill.io.readers import read_corpus
from preprocessing import document_pass, mixing
from preprocessing.mix import mix
from preprocessing.shuffle_holdout import pass1
from tests.preprocessing.conftest import write_provenance
from tests.preprocessing.mixing_folders import read_decisions, read_texts_written, tallies_of, write_texts
from tests.tokenizers_of_models import PROSE, content_of

stage = importlib.import_module("preprocessing.mix")
MIXES = {
    "as it is": {},
    "weights": {"weights": "book=2.5,c4=0.3,web=1"},
    "absent": {"weights": "book=0"},
    "another seed": {"seed": 7, "weights": "web=3"},
    "bytes": {"bytes": {"book": 3000, "web": 100}},
}


@pytest.fixture
def norm(corpus) -> Path:
    """Three sources; texts repeat within a source, so that copies of what is held out are in the train set."""
    folder = corpus(book=60, c4=45, web=31)
    lines = (folder / "c4" / "0.jsonl").read_text()
    (folder / "web" / "1.jsonl").write_text(lines * 2)
    return folder


@pytest.fixture
def drops(tmp_path: Path, norm: Path) -> dict[str, Path]:
    """Short documents, and duplicates, one of which replaces a short one that was kept."""
    write_keys(tmp_path / "short.pickle", {"book/0.jsonl": np.array([3, 4, 9]), "c4/1.jsonl": np.array([0])})
    kept = [("book/0.jsonl", 1, "book/0.jsonl", 3), ("book/1.jsonl", 5, "book/0.jsonl", 3),
            ("c4/1.jsonl", 2, "book/0.jsonl", 8), ("c4/1.jsonl", 7, "book/0.jsonl", 8)]  # fmt: skip
    write_provenance(tmp_path / "dup.parquet", kept)
    return {"duplicates": tmp_path / "dup.parquet", "short_docs": tmp_path / "short.pickle"}


@pytest.mark.parametrize("with_drops", [False, True])
@pytest.mark.parametrize("name", MIXES)
def test_it_decides_as_the_stages_that_write_text(
    tmp_path: Path, norm: Path, drops: dict[str, Path], quiet: RunOptions, read, name: str, with_drops: bool
) -> None:
    arguments = MIXES[name] | (drops if with_drops else {})
    counts = write_texts(norm, tmp_path / "text", 0.1, quiet, **arguments)
    decided = mix(norm, tmp_path / "mix", holdout=0.1, options=quiet, **arguments)
    assert read_decisions(tmp_path / "mix") == read_texts_written(tmp_path / "text", read)
    assert tallies_of(decided) == tallies_of(counts)
    assert decided.lengths and decided.total(HELD_OUT).documents
    assert decided.total(IN_HOLDOUT).documents or name in ("absent", "bytes")


def test_slices_and_groups_change_no_decision(
    tmp_path: Path, norm: Path, quiet: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    mix(norm, tmp_path / "whole", weights="book=1.5", holdout=0.1, options=quiet)
    monkeypatch.setattr(readers, "SLICE_BYTES", 400)
    monkeypatch.setattr("gristmill.engine.slices.SMALL_BYTES", 0)
    monkeypatch.setattr(stage, "FAN_IN", 2)
    monkeypatch.setattr(mixing.decisions, "_FACTS_SHARE", 0)
    mix(norm, tmp_path / "cut", weights="book=1.5", holdout=0.1, options=quiet)
    assert len(list((tmp_path / "cut").rglob("*.decisions.parquet"))) > 20
    assert read_decisions(tmp_path / "cut") == read_decisions(tmp_path / "whole")


def test_two_workers_write_the_same_bytes(tmp_path: Path, norm: Path, digest) -> None:
    for workers in (1, 2):
        mix(norm, tmp_path / str(workers), weights="book=1.5", options=RunOptions(workers=workers, quiet=True))
    assert digest(tmp_path / "1") == digest(tmp_path / "2")


def test_another_mix_reads_no_text(
    tmp_path: Path, norm: Path, quiet: RunOptions, digest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts stay: a change of weights, seed or holdout, of what is short or a copy, decides anew from them."""
    mix(norm, tmp_path / "mix", options=quiet)
    before = digest(tmp_path / "mix")

    def read_no_more(*_: object, **__: object) -> None:
        raise AssertionError("a text was read")

    monkeypatch.setattr(document_pass, "read_documents", read_no_more)
    mix(norm, tmp_path / "mix", weights="book=2.5", seed=3, holdout=0.2, options=quiet)
    after = digest(tmp_path / "mix")
    assert {name for name in after if after[name] == before[name]} == {
        name for name in after if name.startswith("facts/")
    }


def test_a_keep_list_has_the_last_word(
    tmp_path: Path, norm: Path, drops: dict[str, Path], quiet: RunOptions, read
) -> None:
    (tmp_path / "list.txt").write_text("keep book/0.jsonl@3\ndrop c4/0.jsonl@2\n")
    arguments = drops | {"keep_list": tmp_path / "list.txt"}
    counts = write_texts(norm, tmp_path / "text", 0.1, quiet, **arguments)
    decided = mix(norm, tmp_path / "mix", holdout=0.1, options=quiet, **arguments)
    assert tallies_of(decided) == tallies_of(counts)
    assert read_decisions(tmp_path / "mix") == read_texts_written(tmp_path / "text", read)


def test_a_text_in_a_list_is_dropped_in_every_row(
    tmp_path: Path, norm: Path, drops: dict[str, Path], quiet: RunOptions, read
) -> None:
    """By facts, and by reading, which gives the same documents; a text that no document has is refused."""
    text = json.loads((norm / "c4" / "0.jsonl").read_text().splitlines()[2])["text"]
    listed = tmp_path / "list.txt"
    listed.write_text(f"drop sha256:{sha256(text.encode()).hexdigest()} whose copies are in web\n")
    arguments = drops | {"keep_list": listed}
    counts = write_texts(norm, tmp_path / "text", 0.1, quiet, **arguments)
    decided = mix(norm, tmp_path / "mix", holdout=0.1, options=quiet, **arguments)
    assert tallies_of(decided) == tallies_of(counts)
    assert read_decisions(tmp_path / "mix") == read_texts_written(tmp_path / "text", read)
    copies = [document for document in read_corpus(norm) if document.text == text]
    assert len(copies) >= 3 and decided.total("in your list").documents == len(copies)
    listed.write_text(f"{listed.read_text()}\ndrop sha256:{32 * '0'} of mine\n")
    for again in (partial(mix, norm, tmp_path / "mix"), partial(pass1, norm, tmp_path / "text" / "pass1")):
        with pytest.raises(InputError, match=r"list.txt, line 3: no document has the text of `drop sha256:0+ of mine`"):
            again(options=quiet, keep_list=listed)
    listed.write_text("drop sha256:123\n")
    with pytest.raises(UsageError, match="line 1: expected keep KEY, drop KEY or drop sha256:DIGEST"):
        mix(norm, tmp_path / "mix", options=quiet, keep_list=listed)


def test_tokens_are_those_that_the_tokenizer_counts(tmp_path: Path, write, quiet: RunOptions, read) -> None:
    norm = tmp_path / "norm"
    write(norm / "web/0.jsonl", [{"text": PROSE[i % 6] * (2000 if i == 3 else 1)} for i in range(200)])
    write(norm / "book/0.jsonl", [{"text": f"ein Buch {i}"} for i in range(20)])
    (tmp_path / "tokenizer.json").write_text(content_of("Llama 3"), encoding="utf-8")
    arguments = {"tokens": {"web": 9000}, "tokenizer": tmp_path / "tokenizer.json"}
    counts = write_texts(norm, tmp_path / "text", 0.0, quiet, **arguments)
    decided = mix(norm, tmp_path / "mix", holdout=0.0, options=quiet, **arguments)
    assert tallies_of(decided) == tallies_of(counts)
    assert read_decisions(tmp_path / "mix") == read_texts_written(tmp_path / "text", read)


def test_malformed_records_are_counted_and_kept_beside_the_facts(tmp_path: Path, norm: Path, quiet: RunOptions) -> None:
    with (norm / "book" / "0.jsonl").open("a") as file:
        file.write('{"no": "text"}\nnot JSON\n\n{"text": "the last one"}\n')
    with pytest.raises(TooManyMalformed, match="2 of 170 records are malformed"):
        mix(norm, tmp_path / "mix", options=quiet)
    lenient = RunOptions(workers=1, quiet=True, max_malformed=0.5)
    counts = mix(norm, tmp_path / "mix", holdout=0.0, options=lenient)
    assert counts.malformed == 2 and counts.total(f"{MALFORMED}: broken JSON").documents == 1
    assert counts.total(READ).documents == counts.total(WRITTEN).documents + 2
    (rejects,) = (tmp_path / "mix").rglob("*.malformed")
    assert rejects.read_text().count("\n") == 2
    assert read_decisions(tmp_path / "mix")[0]["book/0.jsonl@33"] == 1


def test_drops_of_another_corpus_are_refused(tmp_path: Path, norm: Path, quiet: RunOptions) -> None:
    write_keys(tmp_path / "short.pickle", {"book/0.jsonl": np.array([3000])})
    with pytest.raises(InputError, match=r"name 1 documents, and 0 of them are in the corpus"):
        mix(norm, tmp_path / "mix", short_docs=tmp_path / "short.pickle", options=quiet)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"holdout": 1.0}, "--holdout 1.0: expected a fraction"),
    ({"seed": -1}, "--seed -1: expected a whole number"),
    ({"weights": "bok=1"}, "--weights names 'bok'"),
])  # fmt: skip
def test_options_out_of_range_are_refused(
    tmp_path: Path, norm: Path, quiet: RunOptions, arguments: dict, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        mix(norm, tmp_path / "mix", options=quiet, **arguments)


def test_a_document_is_held_out_once(tmp_path: Path, norm: Path, quiet: RunOptions) -> None:
    mix(norm, tmp_path / "mix", weights="book=3", holdout=0.1, options=quiet)
    train, holdout = read_decisions(tmp_path / "mix")
    assert holdout == Counter(dict.fromkeys(holdout, 1)) and not train.keys() & holdout.keys()
    assert {train[key] for key in train if key.startswith("book/")} == {3}
