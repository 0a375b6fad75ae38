"""Rewind names, for every step and rank, the documents whose tokens the trainer really read."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from gristmill.errors import InputError, UsageError
from gristmill.io.token_shards import TokenShard
from tests.training.conftest import write_shards
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.config import TrainConfig
from training.data.batches import PrefetchLoader
from training.experimental.local_steps.replicas_config import ReplicasConfig
from training.experimental.parallel_config import ParallelConfig
from training.kernels.cross_entropy import IGNORE_INDEX
from training.model.batch import TokenBatch
from training.reporting.metrics_file import METRICS
from training.rewind import DocumentPart, Rewind
from training.train import train

LENGTH = 16  # T
Ranks = Callable[..., list[Any]]


class Row(NamedTuple):
    """A sequence as the trainer had it: inputs, and the last target."""

    ids: NDArray[np.int64]
    padding: NDArray[np.bool_]
    last_target: int


Read = dict[tuple[int, int], list[Row]]  # by step, from 1, and rank


def train_and_record(config: TrainConfig) -> Read:
    """Train, and return the rows of every step's batch; those of a step that is read again replace it."""
    read: Read = {}
    load = PrefetchLoader.batch

    def batch(loader: PrefetchLoader, step: int) -> TokenBatch:
        loaded = load(loader, step)
        ids = loaded.ids.numpy().copy()
        padding = np.zeros_like(ids, bool) if loaded.padding is None else loaded.padding.numpy()
        rank = loader.batches.dp_rank // loader.batches.runs
        read[step + 1, rank] = [Row(*each) for each in zip(ids, padding, loaded.targets[:, -1].tolist(), strict=True)]
        return loaded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefetchLoader, "batch", batch)
        train(config)
    return read


@pytest.fixture
def read(run_ranks: Ranks) -> Callable[..., Read]:
    """`read(config, processes)`: train in so many, and return what each data-parallel rank read in each step."""

    def run(config: TrainConfig, processes: int = 1) -> Read:
        results: list[Read] = run_ranks(processes, train_and_record, config)
        return {key: rows for of_process in results for key, rows in of_process.items()}

    return run


@pytest.fixture
def base(config: TrainConfig, corpus: Path, tmp_path: Path) -> TrainConfig:
    """A run of 12 steps on the set a; sets a, b and c have documents of 1 to 50 tokens, of two sources."""
    random = np.random.default_rng(3)
    for name in "abc":
        documents = [random.integers(3, 300, random.integers(0, 50)).tolist() + [2] for _ in range(120)]
        sources = [["book", "web"][number % 2] for number in range(120)]
        write_shards(
            tmp_path / name,
            [documents[:70], documents[70:]],
            corpus / "tokenizer.model",
            sources=[sources[:70], sources[70:]],
        )
    return replace(
        config,
        optim=replace(config.optim, schedule="wsd", warmup_steps=1, steps=12),
        data=replace(config.data, train=tmp_path / "a", seq_len=LENGTH, batch_size=4),
        eval=replace(config.eval, sample_tokens=0, sequences=2),
        checkpoint=CheckpointConfig(every=4),
        metrics=replace(config.metrics, log_every=2),
    )


def ids_of(part: DocumentPart) -> NDArray[np.int64]:
    """Return the tokens that a part names, of its document in its shard."""
    ids = np.asarray(TokenShard(part.folder / part.shard)[part.in_shard], np.int64)
    assert len(ids) == part.length
    return ids[part.before : part.before + part.tokens]


def tokens_of(parts: list[DocumentPart]) -> NDArray[np.int64]:
    tokens = np.full(LENGTH + 1, IGNORE_INDEX)
    for part in parts:
        assert (tokens[part.first : part.first + part.tokens] == IGNORE_INDEX).all()
        tokens[part.first : part.first + part.tokens] = ids_of(part)
    return tokens


def check(run: Path, expected: Read, *folders: Path) -> Rewind:
    """Compare what a run's ranks read with what rewind says that they read."""
    assert expected
    reader = Rewind(run, folders)
    for step in sorted({step for step, _ in expected}):
        sequences = list(reader.sequences(step))
        ranks = {rank for at, rank in expected if at == step}
        assert {each.rank for each in sequences} == ranks
        for rank in ranks:
            named = [tokens_of(each.parts) for each in sequences if each.rank == rank]
            assert len(named) == len(expected[step, rank])
            for tokens, row in zip(named, expected[step, rank], strict=True):
                assert (tokens[:-1] == np.where(row.padding, IGNORE_INDEX, row.ids)).all()
                assert row.last_target in (tokens[-1], IGNORE_INDEX)
    return reader


def until(config: TrainConfig, steps: int, batch_size: int = 4, **options: Any) -> TrainConfig:
    return replace(
        config,
        optim=replace(config.optim, steps=steps),
        data=replace(config.data, batch_size=batch_size, **options),
    )


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"order": "randperm"},
        {"packing": "best-fit"},
        {"packing": "best-fit", "mask_documents": True},
        {"train": "ab"},
        {"train": "ba", "weights": (0.7, 0.1)},
        {"train": "abc", "weights": (1.0, 2.0, 4.0), "packing": "best-fit"},
        {"batch_ramp": ("2:128", "4:400"), "batch_size": 8},
    ],
    ids=str,
)
def test_the_documents_named_are_those_that_each_rank_read(
    base: TrainConfig, tmp_path: Path, read: Callable[..., Read], data: dict[str, Any]
) -> None:
    if "train" in data:
        data = {**data, "train": tuple(tmp_path / letter for letter in data["train"])}
    config = replace(base, data=replace(base.data, **data))
    check(config.out_dir, read(config, 2))


@pytest.mark.parametrize(
    ("processes", "ranks", "options"),
    [
        (4, 2, {"parallel": ParallelConfig(tp=2)}),
        (4, 2, {"parallel": ParallelConfig(pp=2, micro_batches=2)}),
        (2, 1, {"parallel": ParallelConfig(cp=2)}),
        (2, 2, {"parallel": ParallelConfig(local_steps=2)}),
        (2, 2, {"replicas": ReplicasConfig(Path("meeting"), count=2, number=1, local_steps=2, deadline=0.5)}),
    ],
    ids=str,
)
def test_ranks_are_those_that_read_different_sequences(
    base: TrainConfig, tmp_path: Path, read: Callable[..., Read], processes: int, ranks: int, options: dict[str, Any]
) -> None:
    if "replicas" in options:
        options = {"replicas": replace(options["replicas"], folder=tmp_path / "meeting")}
    reader = check(base.out_dir, read(until(replace(base, **options), 4, 8), processes))
    assert reader.ranks(3) == ranks


def test_a_run_resumed_with_other_batches_and_ranks(base: TrainConfig, read: Callable[..., Read]) -> None:
    expected = read(until(base, 4, 4), 2)
    expected |= read(until(base, 8, 6), 1)
    expected |= read(until(base, 9, 8), 4)  # to a step without a checkpoint of its own
    check(base.out_dir, expected)
    shutil.rmtree(base.out_dir / "checkpoints/step-00000009")  # as if it had been killed before the last one
    (base.out_dir / "checkpoints/latest").write_text("step-00000008")
    check(base.out_dir, expected)


def test_a_mix_that_is_resumed(base: TrainConfig, tmp_path: Path, read: Callable[..., Read]) -> None:
    mixed = replace(base, data=replace(base.data, train=(tmp_path / "a", tmp_path / "c"), weights=(1.0, 2.0)))
    expected = read(until(mixed, 5, 4, packing="best-fit"), 2)
    expected |= read(until(mixed, 9, 8, packing="best-fit"), 2)
    check(base.out_dir, expected)


@pytest.mark.parametrize("data", [{"skip": 3}, {"train": "b"}, {"train": "ab"}, {"packing": "best-fit"}], ids=str)
@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_branch_and_the_run_that_it_left(
    base: TrainConfig, tmp_path: Path, read: Callable[..., Read], data: dict[str, Any], has_checkpoint: bool
) -> None:
    source = read(until(base, 4, 4), 2) | read(until(base, 7, 6), 1)
    if "train" in data:
        data = {**data, "train": tuple(tmp_path / letter for letter in data["train"])}
    branch = replace(base, out_dir=tmp_path / "branch", branch_from=base.out_dir)
    own = read(until(branch, 10, 6, **data), 2)
    if has_checkpoint:
        own |= read(until(branch, 13, 4, **data), 1)
    else:
        shutil.rmtree(branch.out_dir / "checkpoints")
    assert {step for step, _ in own} == set(range(8, 14 if has_checkpoint else 11))
    check(branch.out_dir, source | own)
    check(base.out_dir, source)
    (tmp_path / "run").rename(tmp_path / "gone")
    if has_checkpoint and data == {"skip": 3}:
        assert Rewind(branch.out_dir).ranks(3) is None and len(list(Rewind(branch.out_dir).sequences(3))) == 4
    elif has_checkpoint:
        with pytest.raises(
            UsageError, match=r"is a branch from .*run, whose run read the steps until 7, and that is no"
        ):
            list(Rewind(branch.out_dir).sequences(3))


def test_tokens_that_moved_are_known_by_their_shards(
    base: TrainConfig, tmp_path: Path, read: Callable[..., Read]
) -> None:
    expected = read(until(base, 3), 1)
    (tmp_path / "a").rename(tmp_path / "elsewhere")
    check(base.out_dir, expected, tmp_path / "elsewhere")
    with pytest.raises(
        UsageError, match=r"trained on \(.*/a\) are not in .*/a: expected a folder with the same shards"
    ):
        Rewind(base.out_dir)
    with pytest.raises(UsageError, match=r"--tokens .*/b: expected the token shards that .*run was trained on"):
        Rewind(base.out_dir, [tmp_path / "b"])


def test_a_run_of_an_earlier_release(base: TrainConfig, tmp_path: Path, read: Callable[..., Read]) -> None:
    """Its starts have no steps, ranks and weights, as those of a release before; checkpoints have the ranks."""
    mixed = replace(base, data=replace(base.data, train=(tmp_path / "a", tmp_path / "b"), weights=(0.75, 0.25)))
    expected = read(until(mixed, 4), 2)
    path = base.out_dir / "run.json"
    stored = json.loads(path.read_text())
    for start in stored["starts"]:
        for name in ("dp", "steps_done", "weights"):
            del start[name]
    path.write_text(json.dumps(stored))
    check(base.out_dir, expected)


def test_sources_and_lengths_of_a_step(base: TrainConfig, read: Callable[..., Read]) -> None:
    expected = read(until(base, 3), 1)
    reader = Rewind(base.out_dir)
    assert reader.steps_done == 3 and set(reader.losses) == {1, 2, 3}
    parts = [part for each in reader.sequences(2) for part in each.parts]
    summary = reader.summarize(2)
    assert sorted(summary.lengths.tolist()) == sorted(part.length for part in parts)
    assert sum(summary.tokens.values()) == len(expected[2, 0]) * LENGTH
    for source in ("book", "web"):  # each token but the first of a sequence is predicted
        predicted = sum(part.tokens - (part.first == 0) for part in parts if part.source == source)
        assert summary.tokens[source] == predicted > 0
        assert {part.in_folder % 2 for part in parts if part.source == source} == {["book", "web"].index(source)}


@pytest.fixture
def finished(base: TrainConfig) -> Iterator[Path]:
    train(until(base, 2))
    yield base.out_dir


@pytest.mark.parametrize("step", [0, 3, -1, 10**9])
def test_a_step_beyond_the_run(finished: Path, step: int) -> None:
    with pytest.raises(UsageError, match=r"expected a step from 1 to 2, the last one of .*run"):
        list(Rewind(finished).sequences(step))


def test_folders_that_are_no_training_run(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere: expected the --out_dir of a training run, got no run.json in it"):
        Rewind(tmp_path / "nowhere")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/run.json").write_text('{"corpus": "c", "dedup": {}}')
    with pytest.raises(
        UsageError, match=r"data: expected the --out_dir of a training run, got the --out of a gristmill"
    ):
        Rewind(tmp_path / "data")
    record = finished / "checkpoints/step-00000002/record.json"
    record.write_text(record.read_text().replace('"step": 2', '"step": 1'))
    with pytest.raises(InputError, match=r"step-00000002 does not say what the run has read \(record.json is damaged"):
        Rewind(finished)
    stored = json.loads((finished / "run.json").read_text())
    for change in ({"data.seq_len": "16"}, {"data.train": None}, {"starts": 3}, {"data.order": "sorted"}):
        (finished / "run.json").write_text(json.dumps(stored | change))
        with pytest.raises(
            InputError, match=rf"run.json is damaged: .*`\$.{next(iter(change))}`; restore it from a copy"
        ):
            Rewind(finished)
    (finished / "run.json").write_text('{"steps": 3}')
    with pytest.raises(InputError, match=r"run.json is damaged: .* missing required field"):
        Rewind(finished)
    (finished / "run.json").write_text("[]")
    with pytest.raises(InputError, match=r"run.json is damaged"):
        Rewind(finished)


def test_a_run_that_has_not_come_so_far(finished: Path) -> None:
    stored = json.loads((finished / "run.json").read_text())
    (finished / "run.json").write_text(json.dumps(stored | {"steps": 9}))
    (finished / METRICS).unlink()
    reader = Rewind(finished)
    assert reader.steps_done == 2 and len(list(reader.sequences(9))) == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parallel.parts": 2}, "was trained by a server and workers"),
        (
            {"data.packing": "best-fit", "data.packing_version": 1},
            "best-fit packing in its version 1, and this release",
        ),
    ],
    ids=str,
)
def test_runs_whose_steps_are_not_known_are_refused(finished: Path, change: dict[str, Any], said: str) -> None:
    stored = json.loads((finished / "run.json").read_text())
    (finished / "run.json").write_text(json.dumps(stored | change))
    with pytest.raises(UsageError, match=said):
        Rewind(finished)
