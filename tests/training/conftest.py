"""Small corpora of token shards, and processes to train on them."""

import gc
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch

from gristmill.config import load_config
from gristmill.engine.execution.local import start_fork_server
from gristmill.io.token_shards import (
    Manifest,
    ShardRecord,
    SourceRecord,
    TokenizerRecord,
    TokenShardWriter,
    token_dtype,
    write_sources,
)
from training.config import TrainConfig
from training.data.data_config import DataConfig
from training.distributed.rank_pool import RankPool
from training.model.model_config import ModelConfig
from training.optim.optim_config import OptimConfig
from training.reporting.reporting_config import EvalConfig, MetricsConfig
from training.train import train

REPOSITORY = Path(__file__).resolve().parents[2]
VOCABULARY = 300  # byte fallback takes 256 of them

Documents = list[list[int]]
_LONGEST = (
    "test_compile.py",
    "test_restart.py",
    "test_independent.py",
    "test_certificate.py",
    "test_train.py",
    "test_grid.py",
    "test_disturbed_run.py",
    "test_remote_run.py",
    "test_torchrun.py",
)
_REFUSAL = re.compile(r"[^\n]* needs torch 2\.\d+ or later, and this is [^\n]*")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Skip a test of what this version of torch cannot do, if it was refused with the reason."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        if refusal := _REFUSAL.search(str(error)):
            pytest.skip(f"refused: {refusal[0].strip()}")
        raise


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that are marked gpu where there is none. The longest files come first: none is left to run alone."""
    items.sort(key=_turn)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def _turn(item: pytest.Item) -> int:
    """The tests of other rooms keep their places, before these."""
    if not item.path.is_relative_to(REPOSITORY / "tests/training"):
        return -1
    return _LONGEST.index(item.path.name) if item.path.name in _LONGEST else len(_LONGEST)


@pytest.fixture(autouse=True)
def _few_threads_of_runs() -> Iterator[None]:
    """End the threads of process groups that are garbage: each run leaves sixteen, which poll, in cycles of references.

    These are too few objects for the garbage collector to begin by itself.
    """
    yield
    if len(list(Path("/proc/self/task").iterdir())) > 50:
        gc.collect()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """As many as the processes beside it have: results are compared bit for bit. A run here may leave others."""
    torch.set_num_threads(1)


def write_shards(
    folder: Path,
    shards: list[Documents],
    tokenizer: Path | None = None,
    vocabulary: int = VOCABULARY,
    sources: list[list[str]] | None = None,
) -> Path:
    """Token shards of the documents given as ids, and of the `sources` of each; every token is two bytes of text."""
    folder.mkdir(parents=True, exist_ok=True)
    records, totals = [], dict[str, SourceRecord]()
    for number, documents in enumerate(shards):
        name = f"shard-{number:05d}"
        with TokenShardWriter(folder / name, token_dtype(vocabulary)) as shard:
            for ids in documents:
                shard.add(ids)
        record = ShardRecord(name, len(documents), shard.tokens, 2 * shard.tokens, shard.sha256, shard.idx_sha256)
        records.append(record)
        if sources is not None:
            record.sources = list(dict.fromkeys(sources[number]))
            numbers = np.array([record.sources.index(source) for source in sources[number]], np.int64)
            record.sources_sha256 = write_sources(folder / name, numbers, record.sources)
            for source, ids in zip(sources[number], documents, strict=True):
                total = totals.setdefault(source, SourceRecord())
                total.documents, total.tokens, total.bytes = (
                    total.documents + 1, total.tokens + len(ids), total.bytes + 2 * len(ids),
                )  # fmt: skip
    path = os.path.relpath(tokenizer, folder) if tokenizer else "none.model"
    digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer else "none"
    Manifest(TokenizerRecord(path, digest, vocabulary, 2), str(token_dtype(vocabulary)), records, totals).save(folder)
    return folder


def sentences(seed: int, count: int) -> list[str]:
    """Made-up prose with much to learn in it: few words, in an order that depends on the word before."""
    random = np.random.default_rng(seed)
    words = ["the", "a", "miller", "grain", "mill", "stone", "water", "wheel", "turns", "grinds", "carries"]
    words += ["sells", "flour", "bread", "morning", "river", "slow", "fine"]
    texts = []
    for _ in range(count):
        at = int(random.integers(len(words)))
        text = []
        for _ in range(int(random.integers(8, 30))):
            text.append(words[at])
            at = (at * 5 + 1 + int(random.integers(3))) % len(words)
        texts.append(" ".join(text) + ".")
    return texts


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokens/train (two shards), tokens/holdout and the tokenizer that made both."""
    root = tmp_path_factory.mktemp("corpus")
    tokenizer = root / "tokenizer.model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(0, 500)),
        model_prefix=str(tokenizer.with_suffix("")),
        vocab_size=VOCABULARY,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    encode = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer)).encode
    for name, seed, sizes in (("train", 1, (150, 100)), ("holdout", 2, (30,))):
        shards = [[[*encode(text), 2] for text in sentences(seed + 10 * i, size)] for i, size in enumerate(sizes)]
        write_shards(root / "tokens" / name, shards, tokenizer)
    return root


@pytest.fixture
def config(corpus: Path, tmp_path: Path) -> TrainConfig:
    """A run of a second: 12 steps of 8 sequences of 16 tokens."""
    return TrainConfig(
        out_dir=tmp_path / "run",
        data=DataConfig(corpus / "tokens/train", corpus / "tokens/holdout", seq_len=16, batch_size=12),
        model=ModelConfig(layers=2, width=32, heads=4, kv_heads=2),
        optim=OptimConfig(steps=12, lr=1e-2, warmup_steps=3),
        eval=EvalConfig(sample_tokens=8, sequences=10),
        metrics=MetricsConfig(tensorboard=False, log_every=4),
        device="cpu",
    )


@pytest.fixture(scope="session", autouse=True)
def _warm_fork_server() -> None:
    """Restart the fork server with torch imported, once: processes of these tests then start in milliseconds."""
    forkserver._forkserver._stop()  # tests before these may have started it without torch
    modules = ["training.loop", "gristmill_parity.worker", "training.parallel.pipeline.pipeline_parallel"]
    start_fork_server(["numba", "pytest", *modules, "training.kernels.cpu.kernels", "training.optim.build_optimizer"])


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Twelve processes at most, which all the tests share; a job starts those that are missing."""
    with RankPool(12, timeout=300.0, job_timeout=900.0) as ranks:  # only what hangs takes so long
        yield ranks


@pytest.fixture
def run_ranks(rank_pool: RankPool) -> Callable[..., list[Any]]:
    """`run_ranks(size, function, *arguments)`: what a test module's function returned in each of `size` processes."""
    return rank_pool.run


def small_run(corpus: Path) -> list[str]:
    """The options of a run of a second or two, but for its --out_dir."""
    sizes = {"model.layers": 2, "model.width": 32, "data.seq_len": 16, "data.batch_size": 8, "device": "cpu"}
    folders = {"data.train": corpus / "tokens/train", "data.holdout": corpus / "tokens/holdout"}
    return [word for key, value in {**folders, **sizes}.items() for word in (f"--{key}", str(value))]


def train_with_options(out_dir: Path, options: list[str]) -> None:
    """A rank's part of a run with these options, as training/train.py takes them."""
    train(load_config(TrainConfig, ["--out_dir", str(out_dir), *options]))


@pytest.fixture
def train_in_ranks(run_ranks: Callable[..., list[Any]]) -> Callable[[int, Path, list[str]], None]:
    """`train_in_ranks(size, out_dir, options)`: a run in warm ranks, as torchrun would start it in cold ones."""

    def run(size: int, out_dir: Path, options: list[str]) -> None:
        run_ranks(size, train, load_config(TrainConfig, ["--out_dir", str(out_dir), *options]))

    return run


@pytest.fixture
def start_training(corpus: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start_training(launcher, out_dir, *options)`: training/train.py as a user starts it, in two processes.

    Its output is one pipe; whatever still runs is ended with the test.
    """
    started: list[subprocess.Popen[str]] = []

    def start(launcher: list[str], out_dir: Path, *options: str) -> subprocess.Popen[str]:
        command = [*launcher, "training/train.py", *small_run(corpus), "--out_dir", str(out_dir), *options]
        quiet = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        started.append(
            subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=quiet,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, 9)
        process.communicate()


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
LAUNCH = [sys.executable, "-m", "torch.distributed.launch", "--standalone", "--nproc_per_node=2"]


@pytest.fixture
def torchrun() -> list[str]:
    return TORCHRUN


@pytest.fixture
def shards() -> Callable[..., Path]:
    return write_shards
