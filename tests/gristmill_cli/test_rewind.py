"""`gristmill rewind`: the documents that it names, encoded again, are the tokens that the trainer read."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from gristmill.io.readers import read_corpus
from gristmill_cli.documents.token_origins import TokenOrigins
from gristmill_cli.run import run
from gristmill_cli.run_config import Dedup, Filter, Lines, Mix, RunConfig, Tokenizer
from preprocessing.steps.model_score import ScoreOptions
from tests.gristmill_cli.corpus import make_corpus, write_records
from tests.gristmill_cli.documentation import commands, shell
from tests.gristmill_cli.in_process import gristmill
from training.config import TrainConfig
from training.data.batches import PrefetchLoader
from training.data.data_config import DataConfig
from training.model.batch import TokenBatch
from training.model.model_config import ModelConfig
from training.optim.optim_config import OptimConfig
from training.reporting.reporting_config import EvalConfig, MetricsConfig
from training.rewind import Rewind
from training.train import train


def score_by_size(texts: list[str]) -> list[float]:
    return [len(text) / 1000 for text in texts]


NOTICE = "All rights are reserved by the miller and his heirs, now and for ever."
LENGTH = 64


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A data run in which keys of the raw corpus are not those of what was mixed: malformed, removed and cut texts."""
    root = tmp_path_factory.mktemp("rewind")
    corpus = make_corpus(root / "corpus")
    words = [f"word{number}" for number in range(60)]
    texts = [" ".join(f"{word}{row}" for word in words) for row in range(40)]
    for row in (3, 7, 9):
        texts[row] = f"{texts[row]}\n{NOTICE}" if row != 7 else NOTICE
    (corpus / "own").mkdir()
    records = [{"text": text, "id": f"own-{row}", "url": f"http://own/{row}"} for row, text in enumerate(texts)]
    write_records(corpus / "own/a.jsonl", records)
    lines = (corpus / "own/a.jsonl").read_text().splitlines(keepends=True)
    (corpus / "own/a.jsonl").write_text("".join([*lines[:2], "no JSON\n", *lines[2:]]))
    config = RunConfig(
        corpus, root / "out", workers=1, max_malformed=0.1, filter=Filter(100), lines=Lines(unit="line", min_count=3),
        dedup=Dedup(exact=True), mix=Mix({"book": 2.5}, holdout=0.05), tokenizer=Tokenizer(vocab_size=420),
        scores={"size": ScoreOptions(function=f"{__name__}:score_by_size")},
    )  # fmt: skip
    run(config)
    return config


Read = dict[int, list[tuple[list[int], int]]]  # by step: the inputs of each sequence, and its last target


@pytest.fixture(scope="module")
def model(data: RunConfig) -> tuple[Path, Read]:
    """A run on these tokens, and what it read."""
    tokens = data.out / "tokens"
    folder = data.out / "read"
    read: Read = {}
    load = PrefetchLoader.batch

    def batch(loader: PrefetchLoader, step: int) -> TokenBatch:
        loaded = load(loader, step)
        read[step + 1] = list(zip(loaded.ids.tolist(), loaded.targets[:, -1].tolist(), strict=True))
        return loaded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefetchLoader, "batch", batch)
        train(
            TrainConfig(
                folder,
                DataConfig(tokens / "train", tokens / "holdout", seq_len=LENGTH, batch_size=12),
                ModelConfig(layers=1, width=16, heads=2),
                OptimConfig(steps=8, warmup_steps=1),
                EvalConfig(sample_tokens=0, sequences=2),
                metrics=MetricsConfig(tensorboard=False),
                device="cpu",
            )
        )
    return folder, read


def command(*words: Any) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "gristmill_cli", "rewind", *map(str, words)]
    return subprocess.run(arguments, capture_output=True, text=True, check=False)


def test_the_documents_named_encoded_again_are_what_was_read(data: RunConfig, model: tuple[Path, Read]) -> None:
    folder, read = model
    reader = Rewind(folder)
    origins = TokenOrigins(data.out / "tokens/train")
    encoder = sentencepiece.SentencePieceProcessor(model_file=str(data.out / "tokenizer/tokenizer.model"))
    raw = {document.key: document for document in read_corpus(data.corpus, on_malformed="skip")}
    sources = Counter[str]()
    assert len(read) == 8
    for step, rows in read.items():
        sequences = list(reader.sequences(step))
        found = origins.find(part.in_folder for each in sequences for part in each.parts)
        for each, (ids, last) in zip(sequences, rows, strict=True):
            tokens = list[int]()
            for part in each.parts:
                origin = found[part.in_folder]
                assert origin.key is not None and origin.text is not None
                document = [*encoder.encode(origin.text), origins.manifest.tokenizer.end_of_document]
                assert (len(document), len(tokens)) == (part.length, part.first)
                tokens += document[part.before : part.before + part.tokens]
                assert raw[origin.key].own_id == origin.id
                assert raw[origin.key].value("url") == origin.url
                assert origin.text in raw[origin.key].text and part.source == origin.key.source
                sources[part.source] += 1
            assert tokens == [*ids, last]
    assert min(sources[name] for name in ("own", "book", "code", "web")) > 3


def test_the_command_prints_documents_and_their_origins(model: tuple[Path, Read]) -> None:
    folder, _ = model
    whole = command(folder, "--step", 3)
    assert whole.returncode == 0, whole.stderr
    sequences = list(Rewind(folder).sequences(3))
    assert whole.stdout.count("\nsequence ") == len(sequences) == 12
    assert "step 3: 12 sequences of 64 tokens, read by 1 data-parallel rank" in whole.stdout
    for each in sequences:
        for part in each.parts:
            assert f"{part.shard}@{part.in_shard} " in whole.stdout
    chosen = sequences[5].parts[-1]
    one = gristmill("rewind", folder, "--step", 3, "--rank", 0, "--sequence", 5, "--token", LENGTH)
    assert one.returncode == 0, one.stderr
    assert one.stdout.count("\nsequence ") == 1 and one.stdout.count("@") == 2  # its place and its key
    assert f"{chosen.shard}@{chosen.in_shard} " in one.stdout
    assert f"from its token {chosen.before + LENGTH - chosen.first:,}: " in one.stdout


def test_a_spike_is_compared_with_the_steps_around_it(model: tuple[Path, Read]) -> None:
    folder, _ = model
    done = gristmill("rewind", folder, "--around", 3)
    assert done.returncode == 0, done.stderr
    rows = dict(line.split("  ", 1) for line in done.stdout.splitlines()[2:])
    reader = Rewind(folder)
    others = [reader.summarize(step).tokens.get("book", 0) for step in range(1, 9) if step != 3]
    own, _, mean = rows["tokens of book"].partition(")")
    assert own.split()[0] == f"{reader.summarize(3).tokens['book']:,}"
    assert mean.split()[0] == f"{np.mean(others):,.1f}"
    assert rows["loss"].split()[0] == f"{reader.losses[3]:.4f}"
    step = {part.in_folder: part.folder for each in reader.sequences(3) for part in each.parts}
    (tokens,) = {*step.values()}
    texts = {number: origin.text for number, origin in TokenOrigins(tokens).find(step).items()}
    parts = [part.in_folder for each in reader.sequences(3) for part in each.parts]
    sizes = [len(texts[number] or "") / 1000 for number in parts]
    assert float(rows["mean score size of a document"].split()[0]) == pytest.approx(np.mean(sizes), abs=1e-4)
    assert rows["documents"].split()[0] == str(sum(len(each.parts) for each in reader.sequences(3)))


def test_texts_are_decoded_where_no_data_run_is_known(
    data: RunConfig, model: tuple[Path, Read], tmp_path: Path
) -> None:
    folder, _ = model
    shutil.copytree(data.out / "tokens", tmp_path / "moved")
    shutil.copytree(data.out / "tokenizer", tmp_path / "tokenizer")
    shutil.copytree(folder, tmp_path / "read")
    path = tmp_path / "read/run.json"
    path.write_text(path.read_text().replace(str(data.out / "tokens"), str(tmp_path / "nowhere")))
    refused = gristmill("rewind", tmp_path / "read", "--step", 3)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "try --tokens FOLDER" in refused.stderr
    moved = gristmill("rewind", tmp_path / "read", "--step", 3, "--tokens", tmp_path / "moved/train")
    assert moved.returncode == 0, moved.stderr
    part = next(part for each in Rewind(folder).sequences(3) for part in each.parts if part.before == 0)
    (origin,) = TokenOrigins(data.out / "tokens/train").find([part.in_folder]).values()
    assert origin.text is not None and origin.text[:40] in moved.stdout and str(origin.key) not in moved.stdout
    foreign = gristmill("rewind", folder, "--step", 3, "--tokens", data.out / "tokens/holdout")
    assert foreign.returncode == 2 and foreign.stderr.count("\n") == 1
    assert "tokens/holdout: expected the token shards that" in foreign.stderr


def test_without_the_records_of_the_mix_texts_are_decoded(data: RunConfig, model: tuple[Path, Read]) -> None:
    (data.out / "mix").rename(data.out / "gone")
    try:
        done = gristmill("rewind", model[0], "--step", 3)
    finally:
        (data.out / "gone").rename(data.out / "mix")
    assert done.returncode == 0, done.stderr
    assert "without keys of the corpus: " in done.stdout and "jsonl" not in done.stdout
    part = next(part for each in Rewind(model[0]).sequences(3) for part in each.parts if part.before == 0)
    text = TokenOrigins(part.folder).decode(part.shard, part.in_shard)
    assert text is not None and text[:40] in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", 9], "step 9: expected a step from 1 to 8, the last one of"),
        (["--around", 9], "step 9: expected a step from 1 to 8"),
        (["--step", -1], "step -1: expected a step from 1 to 8"),
        (["--step", 2, "--rank", 1], "--rank 1: expected 0 to 0, the data-parallel ranks of step 2"),
        (["--step", 2, "--sequence", 12], "--sequence 12: expected 0 to 11, the sequences of step 2"),
        (["--step", 2, "--token", 65], "--token 65: expected 0 to 64, a token of a sequence"),
        (["--step", 2, "--around", 2], "expected --step N or --around N, one of them"),
        ([], "expected --step N or --around N, one of them"),
        (["--around", 2, "--token", 1], "--rank, --sequence and --token are for --step"),
    ],
)
def test_a_mistake_is_one_sentence(model: tuple[Path, Read], words: list[Any], said: str) -> None:
    done = gristmill("rewind", model[0], *words)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


def test_folders_of_no_training_run_are_refused(data: RunConfig, tmp_path: Path) -> None:
    for folder, said in ((data.out, "got the --out of a gristmill run"), (tmp_path, "got no run.json in it")):
        done = gristmill("rewind", folder, "--step", 1)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


def test_the_commands_of_the_page(data: RunConfig) -> None:
    """After a run of two processes, as a launcher starts them."""
    (block,) = commands("guides/rewind.md")
    training = (
        'torchrun --standalone --nproc_per_node=2 -m gristmill_cli.train --data.train "$OUT/tokens/train" '
        '--data.holdout "$OUT/tokens/holdout" --out_dir "$OUT/model" --model.layers 1 --model.width 16 --model.heads 2 '
        "--data.seq_len 256 --data.batch_size 4 --data.packing best-fit --optim.steps 14 --device cpu >&2\n"
    )
    done = shell(training + block, on_one_core=True, OUT=str(data.out))
    assert done.returncode == 0, done.stderr
    assert "step 12 beside the mean of 13 steps around it" in done.stdout
    assert "sequence 3, rank 1: " in done.stdout and "sequence 2" not in done.stdout
    assert json.loads((data.out / "model/run.json").read_text())["starts"][0]["dp"] == 2
