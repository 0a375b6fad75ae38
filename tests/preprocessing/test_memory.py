"""Memory: all processes of a stage together stay within --memory, beyond what they take for a small corpus."""

import io
import json
import os
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import sentencepiece
import zstandard

from benchmarks.process_memory import MemoryPeak, measure_peak, resident_memory
from gristmill.budget import Budget, memory_budget
from gristmill.errors import UsageError
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import Slice
from gristmill.io.readers import plan_slices
from preprocessing.apply import apply_to_slices
from preprocessing.mixing.shuffle_buckets import NUMBERS, open_scatter, write_bucket_file
from preprocessing.tokenize_corpus import encode_slices
from preprocessing.tokenizer.loading import new_encoder
from preprocessing.train_tokenizer import sample_group
from preprocessing.user_code import version_of
from tests.tokenizers_of_models import content_of

ROOT = Path(__file__).resolve().parents[2]
MB = 1 << 20
BUDGET = 96 * MB
needs_sizes = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="the sizes of processes are Linux's"
)


def make_corpus(root: Path, size: int) -> Path:
    """Two files, for two workers, of each kind: lines of `size` bytes, plain and compressed, and repeated values."""
    line = json.dumps({"text": "word " * (size // 5)}) + "\n"
    for n in range(2):
        (root / str(n)).mkdir(parents=True)
        (root / f"{n}/lines.jsonl").write_text(line * 2)
        (root / f"{n}/packed.jsonl.zst").write_bytes(zstandard.compress(line.encode() * 2))
        values = pa.table({"text": [f"{i % 3} " * (size // 32) for i in range(64)]})
        pa.parquet.write_table(values, root / f"{n}/values.parquet", dictionary_pagesize_limit=1 << 30)
    return root


def run_stage(*arguments: object) -> MemoryPeak:
    command = [sys.executable, "-m", "gristmill_cli", *map(str, arguments), "--memory", str(BUDGET)]
    command += ["--workers", "2"]
    found = measure_peak(command, os.environ | {"PYTHONPATH": str(ROOT)})
    assert found.exit_code == 0, found.output
    return found


def normalize(corpus: Path, target: Path) -> MemoryPeak:
    return run_stage("normalize_text", "--data_dir", corpus, "--target_dir", target)


@needs_sizes
def test_two_workers_that_read_long_records_stay_within_the_budget(tmp_path: Path) -> None:
    found = normalize(make_corpus(tmp_path / "large", 11 * MB), tmp_path / "large_out")
    assert found.processes >= 4  # this one, the fork server and its tracker, and the workers
    small = make_corpus(tmp_path / "small", 1000)
    runs = (normalize(small, tmp_path / f"small_out{number}") for number in range(20))
    own = next(it for it in runs if it.processes == found.processes)  # it ends so soon that a look may miss a worker
    assert found.bytes - own.bytes < BUDGET


def make_lines(root: Path, size: int) -> Path:
    """Two files, each with short lines before a line of `size` bytes of random digits, and after it."""
    short, long = (json.dumps({"text": os.urandom(count // 2).hex()}) + "\n" for count in (2000, size))
    for n in range(2):
        (root / str(n)).mkdir(parents=True)
        (root / f"{n}/a.jsonl").write_text(short * 100 + long + short)
    return root


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model of a type, trained on a few words: neither digits nor snowmen are in its vocabulary."""
    folder = tmp_path_factory.mktemp("models")

    def model(kind: str) -> Path:
        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the mill grinds grain into flour", "aaaaaaaaaaaaa"] * 9), model_writer=written,
            model_type=kind, vocab_size=300, hard_vocab_limit=False, byte_fallback=True, minloglevel=2,
            normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
        )  # fmt: skip
        (folder / f"{kind}.model").write_bytes(written.getvalue())
        return folder / f"{kind}.model"

    return model


@needs_sizes
@pytest.mark.parametrize("stage", ["pass1", "bpe", "tokenizer.json"])
def test_later_stages_stay_within_the_budget(tmp_path: Path, models: Callable[[str], Path], stage: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content_of("Llama 3"))
    tokenizer = models("bpe") if stage == "bpe" else tmp_path / "tokenizer.json"
    name = ("shuffle_holdout", stage) if stage == "pass1" else ("tokenize_corpus", "--tokenizer", tokenizer)
    small, large = (
        make_lines(tmp_path / "small", 1000),
        make_lines(tmp_path / "large", MB if stage == "tokenizer.json" else 16 * MB),
    )
    own = run_stage(*name, "--input_dir", small, "--out_dir", tmp_path / "small_out")
    found = run_stage(*name, "--input_dir", large, "--out_dir", tmp_path / "large_out")
    assert found.processes == own.processes >= 4
    assert found.bytes - own.bytes < BUDGET


def slice_of(path: Path, *texts: str) -> Slice:
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
    return plan_slices(list_corpus(path.parent)[0])[0]


@pytest.mark.parametrize("word", ["the mill ", "12345 ", "\u2603"])
def test_a_long_text_after_short_ones_is_encoded_in_parts(
    tmp_path: Path, models: Callable[[str], Path], word: str
) -> None:
    """Also one of characters that the vocabulary lacks."""
    size = 6 * MB
    part = slice_of(tmp_path / "in/a.jsonl", *["the mill"] * 1000, word * (size // len(word.encode())), "the mill")
    tokenizer = models("bpe")
    encode_slices((part,), tokenizer, -1, 2, tmp_path / "first.bin")  # loads the model
    tracemalloc.start()
    try:
        encode_slices((part,), tokenizer, -1, 2, tmp_path / "second.bin")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 2.5 * size + 12 * MB  # its line, its text, and what a part takes


def test_a_sample_of_long_texts_is_not_in_memory(tmp_path: Path) -> None:
    size, count = 2 * MB, 12
    part = slice_of(tmp_path / "in/a.jsonl", *[f"{n} the mill" * (size // 11) for n in range(count)])
    with memory_budget(Budget.of(8 * size, 1, tmp_path / "lock")):
        sample_group((part,), (1000,), 1, tmp_path / "first.txt")  # imports what it needs
        tracemalloc.start()
        try:
            sample_group((part,), (count * size,), 1, tmp_path / "second.txt")
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (tmp_path / "second.txt").stat().st_size > (count - 1) * size
    assert most < 7 * size  # its line, its text, and a quarter of a worker's share


@pytest.mark.parametrize(("kind", "word", "why"), [
    ("bpe", "a", "with 3,145,728 characters that the vocabulary may join"),
    ("unigram", "the mill ", "which SentencePiece itself encodes"),
])  # fmt: skip
def test_a_text_that_cannot_be_divided_says_how_much_it_needs(
    tmp_path: Path, models: Callable[[str], Path], kind: str, word: str, why: str
) -> None:
    part = slice_of(tmp_path / "in/a.jsonl", "short", (word * (3 * MB))[: 3 * MB])
    with (
        memory_budget(Budget.of(100 * MB, 1, tmp_path / "lock")),
        pytest.raises(UsageError, match=rf"^the text a.jsonl@1, {why}, takes about 192 MiB .* give --memory 205MiB"),
    ):
        encode_slices((part,), models(kind), -1, 2, tmp_path / "tokens.bin")


@pytest.mark.parametrize(("kind", "word"), [("bpe", "a"), ("unigram", "the mill ")])
def test_a_text_that_cannot_be_divided_is_held_though_a_batch_has_room_for_it(
    tmp_path: Path, models: Callable[[str], Path], kind: str, word: str
) -> None:
    part = slice_of(tmp_path / "in/a.jsonl", "short", (word * 900_000)[:900_000], "short")
    with (
        memory_budget(Budget.of(50 * MB, 1, tmp_path / "lock")),
        pytest.raises(UsageError, match=r"^the text a.jsonl@1, .* takes about 55 MiB"),
    ):
        encode_slices((part,), models(kind), -1, 2, tmp_path / "tokens.bin")


def test_documents_that_a_function_drops_take_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "drops_all.py").write_text("def f(documents):\n    for _ in documents:\n        yield from ()\n")
    monkeypatch.syspath_prepend(tmp_path)
    version = version_of("drops_all:f")
    few, many = (slice_of(tmp_path / f"in{n}/a.jsonl", *map(str, range(n))) for n in (10, 50_000))
    rows = tmp_path / "failed.parquet"
    apply_to_slices((few,), (tmp_path / "first.jsonl",), "drops_all:f", version, rows)  # imports what it needs
    tracemalloc.start()
    try:
        counts = apply_to_slices((many,), (tmp_path / "second.jsonl",), "drops_all:f", version, rows)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert counts.total("dropped by f").documents == 50_000
    assert most < 4 * MB


@needs_sizes
def test_the_frame_of_a_long_line_leaves_no_memory_with_arrow(tmp_path: Path) -> None:
    numbers = pa.record_batch([[1], [1], [1], [1], ["source"]], schema=NUMBERS)
    line = os.urandom(MB) * 32
    with memory_budget(Budget.of(200 * MB, 1, tmp_path / "lock")), write_bucket_file(tmp_path / "out") as writer:
        before = resident_memory(os.getpid())[0]
        with open_scatter(lambda rows: np.zeros(rows.num_rows, np.int64), writer.write, tmp_path / "out") as scatter:
            scatter.add(numbers, np.array([len(line)], np.int64), [line])
        assert resident_memory(os.getpid())[0] - before < 16 * MB


@pytest.mark.parametrize(("fallback", "wanted"), [("", "132"), ("other ids", "810")])
def test_a_long_text_of_a_tokenizer_json_is_refused_before_it_takes_the_memory(
    tmp_path: Path, fallback: str, wanted: str
) -> None:
    (tmp_path / "tokenizer.json").write_text(content_of("Llama 3"))
    encoder = new_encoder(tmp_path / "tokenizer.json")[1]
    encoder.fallback = fallback
    refused = f"the text t, which is encoded as a whole, takes about {wanted} MiB of memory"
    with memory_budget(Budget.of(64 * MB, 1, tmp_path / "lock")), pytest.raises(UsageError, match=refused):
        list(encoder.encode_parts("the mill grinds " * (3 * MB // 16), what="the text t"))
