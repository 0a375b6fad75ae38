"""A run of two sources with a second holdout, and the command that evaluates its checkpoint."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch

from gristmill.config import load_config
from gristmill.errors import InputError, UsageError
from gristmill.io.token_shards import TokenizerRecord
from tests.training.conftest import sentences, write_shards
from training.config import TrainConfig
from training.data.data_config import DataConfig
from training.data.sequences import TokenSequences
from training.data.text import TextSequences
from training.distributed.process_group import init_distributed
from training.evaluate import main
from training.evaluate_config import EvaluateConfig
from training.evaluation import _load, evaluate_checkpoint
from training.experimental.parallel_config import ParallelConfig
from training.hugging_face.export_hf import export_hf
from training.hugging_face.import_hf import import_hf
from training.model.model_config import ModelConfig
from training.optim.optim_config import OptimConfig
from training.reporting.metrics_file import METRICS, Summary, read_metrics
from training.reporting.reporting_config import EvalConfig, MetricsConfig
from training.train import train

Data = dict[str, Path]


@pytest.fixture(scope="module")
def data(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Shards of two sources, of which one is upper case: train, holdout, and another holdout of one source."""
    root, tokenizer = tmp_path_factory.mktemp("sources"), corpus / "tokenizer.model"
    encode = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer)).encode
    for name, seed, size in (("train", 3, 60), ("holdout", 4, 20), ("other", 5, 10)):
        texts = [(text.upper() if i % 3 == 0 else text) for i, text in enumerate(sentences(seed, size))]
        of = ["shouted" if i % 3 == 0 else "said" for i in range(size)] if name != "other" else ["said"] * size
        write_shards(root / name, [[[*encode(text), 2] for text in texts]], tokenizer, sources=[of])
    return {name: root / name for name in ("train", "holdout", "other")}


@pytest.fixture(scope="module")
def run(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    config = TrainConfig(
        out_dir=tmp_path_factory.mktemp("runs") / "run",
        data=DataConfig(data["train"], data["holdout"], {"late": data["other"]}, seq_len=16, batch_size=8),
        model=ModelConfig(layers=2, width=32, heads=4, kv_heads=2),
        optim=OptimConfig(steps=4, lr=1e-2, warmup_steps=1),
        eval=EvalConfig(sample_tokens=0, lengths=(60,)),
        metrics=MetricsConfig(tensorboard=True),
        device="cpu",
    )
    train(config)
    return config.out_dir


def config_of(run: Path, *tokens: Path, **options: Any) -> EvaluateConfig:
    return EvaluateConfig(run, tokens, device="cpu", **options)


def test_a_run_reports_each_holdout_and_each_of_its_sources(run: Path) -> None:
    (evaluated,) = [record for record in read_metrics(run / METRICS) if record["kind"] == "eval"]
    sources = evaluated["sources"]
    assert set(sources) == {"said", "shouted"} and sources["shouted"]["loss"] > sources["said"]["loss"]
    tokens = sum(part["tokens"] for part in sources.values())
    mean = sum(part["loss"] * part["tokens"] for part in sources.values()) / tokens
    assert evaluated["loss"] == pytest.approx(mean) and set(evaluated["lengths"]) == {"0-59", "60-"}
    assert set(evaluated["holdouts"]) == {"late"} and "sources" not in evaluated["holdouts"]["late"]
    summary = json.loads((run / "summary.json").read_bytes())
    assert {key: summary[key] for key in ("sources", "lengths", "holdouts")} == {
        key: evaluated[key] for key in ("sources", "lengths", "holdouts")
    }


LAYOUTS = [
    ParallelConfig(),
    ParallelConfig(zero=3),
    ParallelConfig(tp=2, sequence_parallel=True),
    ParallelConfig(pp=2),
]


def losses_of(config: EvaluateConfig) -> dict[str, dict[str, Any]]:
    return {name: found.values() for name, found in evaluate_checkpoint(config).items()}


def test_a_run_resumed_with_other_sequences_is_compared_with_their_unigram_loss(run: Path, data: Data) -> None:
    def trained(out_dir: str, steps: int, sequences: int) -> Summary:
        config = TrainConfig(
            out_dir=run.parent / out_dir,
            data=DataConfig(data["train"], data["holdout"], seq_len=16, batch_size=8),
            model=ModelConfig(layers=1, width=16, heads=2),
            optim=OptimConfig(steps=steps, schedule="constant"),
            eval=EvalConfig(sample_tokens=0, sequences=sequences),
            metrics=MetricsConfig(tensorboard=False),
            device="cpu",
        )
        return train(config)

    before, few = trained("resumed", 1, 20), trained("few", 1, 3)
    assert before.unigram_loss != few.unigram_loss
    assert trained("resumed", 1, 3).unigram_loss == before.unigram_loss  # it is done, and evaluates nothing
    assert trained("resumed", 2, 3).unigram_loss == few.unigram_loss
    assert [r["unigram_loss"] for r in read_metrics(run.parent / "resumed" / METRICS) if r["kind"] == "run"][-1] == (
        few.unigram_loss
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_has_the_losses_that_its_run_reported(
    run: Path, data: Data, run_ranks: Callable[..., list[Any]], layout: ParallelConfig
) -> None:
    (evaluated,) = [record for record in read_metrics(run / METRICS) if record["kind"] == "eval"]
    config = config_of(run, data["holdout"], data["other"], lengths=(60,), parallel=layout)
    for found in run_ranks(2, losses_of, config):
        holdout, other = found[str(data["holdout"])], found[str(data["other"])]
        for name in ("loss", "bits_per_byte"):
            assert holdout[name] == pytest.approx(evaluated[name], rel=1e-5)
            assert other[name] == pytest.approx(evaluated["holdouts"]["late"][name], rel=1e-5)
            for part in ("said", "shouted"):
                assert holdout["sources"][part][name] == pytest.approx(evaluated["sources"][part][name], rel=1e-5)


def test_a_run_that_masked_documents_is_not_evaluated_without_a_mask_in_silence(
    run: Path, data: Data, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--data.train", str(data["train"]), "--data.holdout", str(data["holdout"]), "--data.seq_len", "16"]
    words += ["--data.batch_size", "8", "--data.mask_documents", "true", "--model.layers", "1", "--model.width", "16"]
    words += ["--optim.steps", "8", "--optim.lr", "0.01", "--optim.warmup_steps", "1"]
    words += ["--eval.sample_tokens", "0", "--device", "cpu", "--out_dir", str(tmp_path / "run")]
    of_run = words
    reported = train(load_config(TrainConfig, of_run)).holdout_loss
    checkpoint = tmp_path / "alone"  # moved out of its run, whose run.json says it, too
    (tmp_path / "run/checkpoints/step-00000008").rename(checkpoint)
    evaluated = {}
    for option in ("", "true", "false"):
        capfd.readouterr()
        words = ["--mask_documents", option] if option else []
        main([str(checkpoint), str(data["holdout"]), "--out", str(tmp_path / "out"), "--device", "cpu", *words])
        evaluated[option] = next(iter(json.loads((tmp_path / "out").read_text()).values()))["loss"]
        said = "documents do not see each other, as in training"
        assert capfd.readouterr().err.count(said) == (not option)
    assert evaluated[""] == evaluated["true"] == pytest.approx(reported, rel=1e-7) != evaluated["false"]
    of_run = [
        word.replace("mask_documents", "eod_mask_loss").replace(f"{tmp_path}/run", f"{tmp_path}/eod") for word in of_run
    ]
    reported = train(load_config(TrainConfig, of_run)).holdout_loss
    capfd.readouterr()
    (tmp_path / "eod/run.json").unlink()
    main([f"{tmp_path}/eod", str(data["holdout"]), "--out", str(tmp_path / "out"), "--device", "cpu"])
    assert next(iter(json.loads((tmp_path / "out").read_text()).values()))["loss"] == pytest.approx(reported, rel=1e-7)
    assert "first tokens of documents are not counted, as in training" in capfd.readouterr().err
    main([str(run), str(data["holdout"]), "--device", "cpu"])
    assert "see each other" not in capfd.readouterr().err


def test_a_text_for_a_run_that_masked_documents_begins_as_its_documents_do(
    run: Path, corpus: Path, tmp_path: Path
) -> None:
    """With nothing: no document saw the end of another; its first token is no target."""
    (tmp_path / "a.txt").write_text(text := " ".join(sentences(9, 3)))
    ids = torch.tensor(sentencepiece.SentencePieceProcessor(model_file=str(corpus / "tokenizer.model")).encode(text))
    with init_distributed("cpu") as device:
        part, nats = _load(config_of(run), device)[0].parts[0], 0.0
        for start in range(0, len(ids) - 1, 16):
            logits = part(ids[start:-1][None, :16])[0].log_softmax(-1)
            nats -= float(logits[range(len(logits)), ids[start + 1 :][:16]].sum().detach())
    (found,) = evaluate_checkpoint(config_of(run, text=(tmp_path / "a.txt",), mask_documents=True)).values()
    assert found.whole.tokens == len(ids) - 1
    assert found.whole.loss == pytest.approx(nats / (len(ids) - 1), rel=1e-5)


def test_a_text_has_the_loss_of_its_tokens_as_a_document(
    run: Path, data: Data, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(sentences(9, 3)) + " é"
    (tmp_path / "a.txt").write_text(text)
    ids = sentencepiece.SentencePieceProcessor(model_file=str(corpus / "tokenizer.model")).encode(text)
    read, nats = torch.tensor([2, *ids]), 0.0
    with init_distributed("cpu") as device:
        part = _load(config_of(run), device)[0].parts[0]
        for start in range(0, len(ids), 16):
            logits = part(read[start:-1][None, :16])[0].log_softmax(-1)
            nats -= float(logits[range(len(logits)), read[start + 1 :][:16]].sum().detach())
    out = tmp_path / "losses.json"
    (found,) = evaluate_checkpoint(config_of(run, text=(tmp_path / "a.txt",), out=out)).values()
    assert found.whole.tokens == len(ids) and found.whole.loss == pytest.approx(nats / len(ids), rel=1e-5)
    assert found.whole.bits_per_byte == pytest.approx(
        found.whole.loss * len(ids) / math.log(2) / len(text.encode()), rel=1e-9
    )
    (written,) = json.loads(out.read_bytes()).values()
    assert written["perplexity"] == pytest.approx(math.exp(found.whole.loss))
    assert f"perplexity {math.exp(found.whole.loss):.4g} ({len(ids):,} tokens)" in capfd.readouterr().out


@pytest.mark.parametrize("stride", [1, 5, 8, 16])
def test_with_a_stride_every_token_is_predicted_once_from_what_its_sequence_has_before_it(
    run: Path, corpus: Path, tmp_path: Path, stride: int
) -> None:
    (tmp_path / "a.txt").write_text(text := " ".join(sentences(9, 2)))
    ids = sentencepiece.SentencePieceProcessor(model_file=str(corpus / "tokenizer.model")).encode(text)
    read, nats, start = torch.tensor([2, *ids]), 0.0, 0
    with init_distributed("cpu") as device:
        part = _load(config_of(run), device)[0].parts[0]
        for target in range(1, len(read)):
            start += stride if target - start > 16 else 0
            logits = part(read[start:target][None])[0, -1].log_softmax(-1)
            nats -= float(logits[read[target]].detach())
    (found,) = evaluate_checkpoint(config_of(run, text=(tmp_path / "a.txt",), stride=stride)).values()
    assert found.whole.tokens == len(ids) > 48 and found.whole.loss == pytest.approx(nats / len(ids), rel=1e-5)


def test_bad_input_is_refused_in_a_sentence(run: Path, data: Data, tmp_path: Path, shards: Callable[..., Path]) -> None:
    (tmp_path / "latin.txt").write_bytes(b"\xff")
    (tmp_path / "empty.txt").touch()
    other = shards(tmp_path / "tokens", [[[1] * 40]])
    for config, fault in (
        (config_of(run), "nothing to evaluate on: give folders of token shards, --text FILE, or --tasks NAME"),
        (config_of(tmp_path, data["holdout"]), "expected a checkpoint with record.json"),
        (config_of(run, other), "was made with tokenizer none.model .* and the checkpoint was trained with another"),
        (config_of(run, parallel=ParallelConfig(micro_batches=2)), "micro_batches is 2, .*; try --micro_batch_size 8"),
        (
            config_of(run, parallel=ParallelConfig(local_steps=3)),
            "local_steps is 3, .*; leave --parallel.loc",
        ),
        (config_of(run, parallel=ParallelConfig(reduce_bf16=True)), "reduce_bf16 is True, .* on training alone"),
        (config_of(run, parallel=ParallelConfig(compression="int8")), "compression is int8, .* on training alone"),
        (config_of(run, parallel=ParallelConfig(schedule="gpipe")), "schedule gpipe has no effect with parallel.pp 1"),
        (config_of(run, data["holdout"], seq_len=32), "seq_len is 32, and the checkpoint's model has .* --seq_len 16"),
        (config_of(run, text=(tmp_path / "a",), weights={"said": 1.0}), "weights is given, but there are no TOKENS"),
        (config_of(run, text=(tmp_path / "a",), lengths=(9,)), "lengths is given, but .*leave --lengths out"),
        (config_of(run, text=(tmp_path / "a",), sequences=3), "sequences is given, but there are no TOKENS"),
        (config_of(run, data["holdout"], tokenizer=tmp_path / "t"), "tokenizer is .*t, but there is no --text"),
        (config_of(run, data["holdout"], stride=8), "stride is 8, but there is no --text"),
        (config_of(run, text=(tmp_path / "a.txt",), stride=17), "stride is 17, and a sequence has 16 tokens: .* 8"),
        (config_of(run, data["holdout"], lengths=(9, 5)), r"^lengths are \(9, 5\); .* try --lengths 256 1024 4096$"),
        (config_of(run, data["holdout"], weights={"web": 1.0}), "^weights has 'web', and .* has no such source"),
        (config_of(run, text=(tmp_path / "none.txt",)), "none.txt: no such file; expected a text file"),
        (config_of(run, text=(tmp_path / "empty.txt",)), "empty.txt is empty; expected text"),
        (config_of(run, text=(tmp_path / "latin.txt",)), "latin.txt is not UTF-8"),
        (config_of(run, text=(tmp_path / "a",), tokenizer=tmp_path / "empty.txt"), "is not the checkpoint's tokenizer"),
    ):
        with pytest.raises((UsageError, InputError), match=fault):
            evaluate_checkpoint(config)


def test_a_model_without_a_tokenizer_refuses_ids_that_it_lacks(run: Path, data: Data, tmp_path: Path) -> None:
    """An imported checkpoint may not know its tokenizer: only the vocabularies can be compared."""
    export_hf(run, tmp_path / "hf")
    (tmp_path / "hf/tokenizer.model").unlink(missing_ok=True)
    import_hf(tmp_path / "hf", tmp_path / "start")
    vocabulary = TokenSequences(data["holdout"], 16).manifest.tokenizer.vocab_size
    write_shards(tmp_path / "larger", [[[3, vocabulary + 3] * 20]], vocabulary=vocabulary + 4)
    sizes = f"a vocabulary of {vocabulary + 4}, and the checkpoint's model has one of {vocabulary}"
    with pytest.raises(UsageError, match=sizes):
        evaluate_checkpoint(config_of(tmp_path / "start", tmp_path / "larger"))
    (tmp_path / "a.txt").write_text("the mill")
    with pytest.raises(UsageError, match="--text needs the checkpoint's tokenizer, which it does not name"):
        evaluate_checkpoint(config_of(tmp_path / "start", text=(tmp_path / "a.txt",)))


def test_the_tokenizer_of_an_imported_model_is_found(run: Path, corpus: Path, tmp_path: Path) -> None:
    export_hf(run, tmp_path / "hf")
    (tmp_path / "hf/tokenizer.model").write_bytes((corpus / "tokenizer.model").read_bytes())
    import_hf(tmp_path / "hf", tmp_path / "start")
    (tmp_path / "a.txt").write_text(" ".join(sentences(9, 2)))
    (ours,) = evaluate_checkpoint(config_of(run, text=(tmp_path / "a.txt",))).values()
    (theirs,) = evaluate_checkpoint(config_of(tmp_path / "start", text=(tmp_path / "a.txt",))).values()
    assert theirs.whole.loss == pytest.approx(ours.whole.loss, rel=1e-6)


def test_a_text_of_one_token_without_an_end_of_document_is_refused(corpus: Path, tmp_path: Path) -> None:
    tokenizer = corpus / "tokenizer.model"
    encoder = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    size = encoder.vocab_size()
    word = next(text for i in range(size) if len(encoder.encode(text := encoder.id_to_piece(i).strip("▁"))) == 1)
    (tmp_path / "a.txt").write_text(word)
    assert len(TextSequences(tmp_path / "a.txt", 4, tokenizer, [2], TokenizerRecord("", "", size, 2))) == 1
    with pytest.raises(UsageError, match=r"a.txt is one token, .*; expected more text"):
        TextSequences(tmp_path / "a.txt", 4, tokenizer, [], TokenizerRecord("", "", size, -1))


def test_the_command_line_takes_folders_text_and_weights(
    run: Path, data: Data, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [str(run), str(data["holdout"]), str(data["other"]), "--weights", "said", "2", "--parallel.tp", "2"]
    config = load_config(EvaluateConfig, words)
    assert config == EvaluateConfig(
        run, (data["holdout"], data["other"]), weights={"said": 2.0}, parallel=ParallelConfig(tp=2)
    )
    (tmp_path / "a.txt").write_text("the mill")
    main([str(run), "--text", str(tmp_path / "a.txt"), "--device", "cpu"])
    assert "perplexity" in capfd.readouterr().out
    with pytest.raises(SystemExit):
        main([str(run)])
    assert capfd.readouterr().err.startswith("error: nothing to evaluate on")
