"""encode writes the token documents that tokenize_corpus writes of the mixed text, in another random order."""

import importlib
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from gristmill.budget import Budget, memory_budget
from gristmill.counts import HELD_OUT, READ, WRITTEN
from gristmill.engine.options import RunOptions
from gristmill.engine.task import FileSet
from gristmill.errors import InputError, OutputError, UsageError
from gristmill.io import readers
from gristmill.io.corpus import list_corpus
from gristmill.io.token_shards import Manifest, open_shards, read_sources
from preprocessing.encode import encode
from preprocessing.mix import mix
from preprocessing.mixing.decided_corpus import GroupDecisions
from preprocessing.mixing.decisions import DecidedFile, write_decisions
from preprocessing.mixing.token_rows import encode_group
from preprocessing.tokenize_corpus import tokenize_corpus
from preprocessing.train_tokenizer import train_tokenizer
from tests.preprocessing.mixing_folders import write_texts
from tests.tokenizers_of_models import BEGIN, content_of
from tests.verify_shards import verify_shards

stage = importlib.import_module("preprocessing.encode")
ROOT = Path(__file__).resolve().parents[2]
DEADLY = """
import gristmill.engine.slices, os, signal
from preprocessing.tokenizer.encoder import Encoder

gristmill.engine.slices.SMALL_BYTES = 0
encode = Encoder.encode

def die_of_deadly_text(self, texts, end_id=-1):
    if any("deadly" in text for text in texts):
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(self, texts, end_id)

Encoder.encode = die_of_deadly_text
"""
ODD = ["", " ", "e\u0301 \u00e9 \ufb01", "a\u2581b", "1234567890 3.14", "👩‍👩‍👧‍👦", "NUL \0 within\0", "long " * 20_000]


@pytest.fixture
def norm(corpus, write) -> Path:
    folder = corpus(book=60, c4=45)
    write(folder / "web" / "0.jsonl", [{"text": text, "id": i} for i, text in enumerate(ODD * 3)])
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "in").mkdir()
    lines = [json.dumps({"text": f"the mill {i} grinds grain and more of it, document {i}"}) for i in range(99)]
    (folder / "in" / "a.jsonl").write_text("\n".join(lines))
    train_tokenizer(folder / "in", folder / "out", 350, exact=False, options=RunOptions(workers=1, quiet=True))
    return folder / "out" / "tokenizer.model"


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_text(content_of("Llama 3"), encoding="utf-8")
    return path


def documents_in(folder: Path) -> Counter[tuple[str, tuple[int, ...]]]:
    """Return how often each document, its source and its ids, is in a folder of token shards."""
    manifest, shards = open_shards(folder)
    found = Counter[tuple[str, tuple[int, ...]]]()
    for record, shard in zip(manifest.shards, shards, strict=True):
        sources = read_sources(folder, record)
        for number, ids in zip(sources.tolist(), shard, strict=True):
            found[record.sources[number], tuple(ids.tolist())] += 1
    return found


def totals_of(folder: Path) -> dict[str, object]:
    """Return what the manifest says but for its shards."""
    manifest = Manifest.load(folder)
    totals = {name: getattr(manifest, name) for name in ("tokenizer", "dtype", "sources", "lossy_documents")}
    return totals | {"tokens": manifest.tokens, "documents": manifest.documents, "bytes": manifest.bytes}


@pytest.mark.parametrize("kind", ["model", "tokenizer.json"])
@pytest.mark.parametrize("begins", [False, True])
def test_documents_shares_and_holdout_are_those_of_the_mixed_text(
    tmp_path: Path, norm: Path, quiet: RunOptions, model: Path, tokenizer_json: Path, kind: str, begins: bool
) -> None:
    tokenizer = model if kind == "model" else tokenizer_json
    begin = "model" if kind == "model" else BEGIN
    ends = {"bos": begin} if begins else {}
    arguments = {"weights": "book=2.5,web=2"}
    text = tmp_path / "text"
    write_texts(norm, text, 0.1, quiet, **arguments)
    mixed = mix(norm, tmp_path / "mix", holdout=0.1, options=quiet, **arguments)
    counts = encode(norm, tmp_path / "mix", tokenizer, tmp_path / "tokens", quiet, **ends)
    for name, folder in (("train", "train_deduped"), ("holdout", "holdout")):
        tokenize_corpus(text / folder, tokenizer, tmp_path / "expected" / name, quiet, **ends)
        assert documents_in(tmp_path / "tokens" / name) == documents_in(tmp_path / "expected" / name)
        assert totals_of(tmp_path / "tokens" / name) == totals_of(tmp_path / "expected" / name)
        verify_shards(tmp_path / "tokens" / name)
    assert bool(Manifest.load(tmp_path / "tokens" / "train").lossy_documents) == (kind == "model")
    for source in ("book", "c4", "web"):
        for reason in (WRITTEN, HELD_OUT):
            assert counts.total(reason, source) == mixed.total(reason, source)
    assert counts.total(READ).documents == mixed.total(WRITTEN).documents + mixed.total(HELD_OUT).documents


@pytest.fixture
def many_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "SLICE_BYTES", 400)
    monkeypatch.setattr("gristmill.engine.slices.SMALL_BYTES", 0)


@pytest.mark.parametrize("fan_out", [3, 7])
def test_levels_change_no_byte(
    tmp_path: Path, corpus, quiet: RunOptions, model: Path, digest, many_slices: None,
    monkeypatch: pytest.MonkeyPatch, fan_out: int,
) -> None:  # fmt: skip
    norm = corpus(book=60, c4=45)
    mix(norm, tmp_path / "mix", weights="book=1.5", holdout=0.1, options=quiet)
    assert len(list((tmp_path / "mix").rglob("*.decisions.parquet"))) > 10
    monkeypatch.setattr(stage, "FAN_OUT", 256)
    encode(norm, tmp_path / "mix", model, tmp_path / "direct", quiet)
    monkeypatch.setattr(stage, "FAN_OUT", fan_out)
    encode(norm, tmp_path / "mix", model, tmp_path / "levels", quiet)
    assert digest(tmp_path / "levels") == digest(tmp_path / "direct")


def test_workers_and_little_memory_change_no_byte(
    tmp_path: Path, norm: Path, quiet: RunOptions, model: Path, digest
) -> None:
    mix(norm, tmp_path / "mix", weights="book=1.5", holdout=0.1, options=quiet)
    runs = {"one": quiet, "two": RunOptions(workers=2, quiet=True), "little": RunOptions(1, "16MiB", quiet=True)}
    for name, options in runs.items():
        encode(norm, tmp_path / "mix", model, tmp_path / name, options)
    assert digest(tmp_path / "one") == digest(tmp_path / "two") == digest(tmp_path / "little")


def test_parts_are_sized_by_the_tokens_there_are(
    tmp_path: Path, norm: Path, quiet: RunOptions, model: Path, many_slices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text of characters that are tokens each has more bytes of tokens than expected."""
    mix(norm, tmp_path / "mix", holdout=0.1, options=quiet)
    encode(norm, tmp_path / "mix", model, tmp_path / "few", quiet)
    monkeypatch.setattr(stage, "MIN_PARTS", 1)
    monkeypatch.setattr(stage, "_BYTES_A_TOKEN", 300)
    monkeypatch.setattr(stage, "MAX_PART_BYTES", 4000)
    encode(norm, tmp_path / "mix", model, tmp_path / "many", quiet, shard_size="1")
    assert len(Manifest.load(tmp_path / "many" / "train").shards) > 20
    for name in ("train", "holdout"):
        assert documents_in(tmp_path / "few" / name) == documents_in(tmp_path / "many" / name)
        verify_shards(tmp_path / "many" / name)


def test_a_killed_run_resumes_with_the_same_bytes(
    tmp_path: Path, norm: Path, quiet: RunOptions, model: Path, digest, start
) -> None:
    mix(norm, tmp_path / "mix", weights="book=1.5", holdout=0.1, options=quiet)
    encode(norm, tmp_path / "mix", model, tmp_path / "whole", quiet)
    code = (
        "import importlib, os, signal\n"
        "from pathlib import Path\n"
        "from gristmill.engine.options import RunOptions\n"
        "stage = importlib.import_module('preprocessing.encode')\n"
        "def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)\n"
        "stage.manifest_task = die\n"
        f"stage.encode(Path({str(norm)!r}), Path({str(tmp_path / 'mix')!r}), Path({str(model)!r}), "
        f"Path({str(tmp_path / 'killed')!r}), RunOptions(workers=1, quiet=True))\n"
    )
    process = start("-c", code)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(InputError, match=r"unfinished|has not finished"):
        Manifest.load(tmp_path / "killed" / "train")
    encode(norm, tmp_path / "mix", model, tmp_path / "killed", quiet)
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")
    assert not list((tmp_path / "killed").rglob("*.work"))


def test_nothing_is_encoded_twice(
    tmp_path: Path, norm: Path, quiet: RunOptions, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are copies of tokens, and a document that is in neither set is not even decoded."""
    counted = Counter[str]()
    original = readers.read_chosen

    def note(part, rows, only_text):
        for document in original(part, rows, only_text):
            counted[str(document.key)] += 1
            yield document

    monkeypatch.setattr("preprocessing.mixing.token_rows.read_chosen", note)
    mix(norm, tmp_path / "mix", weights="book=3,c4=0.5", holdout=0.1, options=quiet)
    encode(norm, tmp_path / "mix", model, tmp_path / "tokens", quiet)
    assert set(counted.values()) == {1}
    assert 20 <= sum(key.startswith("c4/") for key in counted) <= 24


def test_a_corpus_that_is_not_the_one_of_the_mix_is_refused(
    tmp_path: Path, norm: Path, quiet: RunOptions, model: Path, write
) -> None:
    mix(norm, tmp_path / "mix", holdout=0.1, options=quiet)
    write(norm / "new" / "0.jsonl", [{"text": "another file"}])
    with pytest.raises(InputError, match=r"decides on another corpus: .* new/0\.jsonl\. Run mix again"):
        encode(norm, tmp_path / "mix", model, tmp_path / "tokens", quiet)
    (norm / "new" / "0.jsonl").unlink()
    lines = (norm / "book" / "0.jsonl").read_text().splitlines(keepends=True)
    (norm / "book" / "0.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(InputError, match=r"book/0\.jsonl has no row 29"):
        encode(norm, tmp_path / "mix", model, tmp_path / "tokens", quiet)
    (norm / "book" / "0.jsonl").write_text("".join(lines[:-1]) + "not JSON\n")
    with pytest.raises(InputError, match=r"book/0\.jsonl line 30 is malformed \(broken JSON"):
        encode(norm, tmp_path / "mix", model, tmp_path / "tokens", quiet)


def test_damaged_and_unfinished_mixes_are_refused(tmp_path: Path, norm: Path, quiet: RunOptions, model: Path) -> None:
    with pytest.raises(UsageError, match="expected the folder that mix wrote"):
        encode(norm, tmp_path / "mix", model, tmp_path / "tokens", quiet)
    mix(norm, tmp_path / "mix", holdout=0.1, options=quiet)
    path = next((tmp_path / "mix").rglob("book/*.decisions.parquet"))
    content = path.read_bytes()
    path.write_bytes(content[:-40] + bytes(40))
    with pytest.raises(InputError, match=r"\.decisions\.parquet"):
        encode(norm, tmp_path / "mix", model, tmp_path / "tokens", quiet)
    path.write_bytes(content)
    (tmp_path / "mix" / "mix.json").write_text("{")
    with pytest.raises(InputError, match=r"mix\.json is damaged"):
        encode(norm, tmp_path / "mix", model, tmp_path / "tokens", quiet)


def test_files_of_others_are_not_overwritten(tmp_path: Path, norm: Path, quiet: RunOptions, model: Path) -> None:
    mix(norm, tmp_path / "mix", holdout=0.1, options=quiet)
    (tmp_path / "tokens" / "train").mkdir(parents=True)
    (tmp_path / "tokens" / "train" / "mine.bin").write_bytes(b"mine")
    with pytest.raises(OutputError, match=r"mine\.bin"):
        encode(norm, tmp_path / "mix", model, tmp_path / "tokens", quiet)


def test_a_long_text_is_encoded_in_parts(tmp_path: Path, model: Path) -> None:
    size = 12 << 20
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    texts = [*["the mill"] * 1000, "the mill grinds " * (size // 16), "the mill"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (part,) = readers.plan_slices(list_corpus(path.parent)[0])
    rows = np.arange(len(texts))
    copies = np.where(rows % 2, 2, 1)
    decided = DecidedFile("a.jsonl", rows, copies, np.array([len(text) for text in texts]), np.array([""] * len(texts)))
    write_decisions(tmp_path / "decisions.parquet", [decided], [np.array([""] * len(texts))])
    decisions = GroupDecisions(FileSet((tmp_path / "decisions.parquet",)), (len(texts),))
    arguments = (decisions, model, -1, 2, 1, 4)
    with memory_budget(Budget.of(8 * size, 1, tmp_path / "lock")):
        encode_group((part,), *arguments, tmp_path / "first.bucket")  # loads the model
        tracemalloc.start()
        try:
            encode_group((part,), *arguments, tmp_path / "second.bucket")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 4 * size + (12 << 20)  # its line, its text, and what a part takes


def test_sentencepiece_decodes_what_was_encoded(tmp_path: Path, norm: Path, quiet: RunOptions, model: Path) -> None:
    mix(norm, tmp_path / "mix", holdout=0.1, options=quiet)
    encode(norm, tmp_path / "mix", model, tmp_path / "tokens", quiet)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    texts = Counter[str]()
    for name in ("train", "holdout"):
        for (_, ids), times in documents_in(tmp_path / "tokens" / name).items():
            texts[processor.decode(list(ids[:-1]))] += times
    lines = [line for file in list_corpus(norm) for line in file.path.read_text().splitlines()]
    every = Counter(json.loads(line)["text"].replace("\u2581", " ") for line in lines)
    assert texts.keys() <= every.keys() and len(texts) > 100


def test_the_documents_on_which_a_worker_dies_are_named(
    tmp_path: Path, corpus, write, quiet: RunOptions, model: Path
) -> None:
    """By file and first row of those that are encoded together; Python imports sitecustomize in workers, too."""
    norm = corpus(book=9, c4=9)
    long_text = "long " * 250_000  # is not encoded together with what follows
    texts = ["a text", long_text, "another", "a deadly one"]
    write(norm / "web" / "0.jsonl", [{"text": text, "id": row} for row, text in enumerate(texts)])
    mix(norm, tmp_path / "mix", holdout=0, options=quiet)
    (tmp_path / "sitecustomize.py").write_text(DEADLY)
    command = [sys.executable, "-m", "preprocessing.encode", "--input_dir", norm, "--mix_dir", tmp_path / "mix"]
    command += ["--tokenizer", model, "--out_dir", tmp_path / "tokens", "--workers", "2"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "error: a worker process died in encode on web/0.jsonl, row 2 or soon after (SIGKILL): " in done.stderr
    assert done.stderr.endswith("With --max_failed 0.001 so many documents on which that happens are set aside\n")
