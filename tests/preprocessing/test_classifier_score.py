"""Scores of Hugging Face classifiers are those of transformers, for each kind of head; others are refused."""

import json
import random
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, UsageError
from gristmill.steps import Batch
from preprocessing.prepare import prepare
from preprocessing.steps.model_score import ScoreOptions, score_step
from tests.preprocessing.fasttext_models import BAD, GOOD

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *GOOD, *BAD]
TEXTS = [" ".join(random.Random(i).choices([*GOOD, *BAD, "東京"], k=i * 7 % 90)) for i in range(150)] + ["", "\n", "é"]
LABELS = {0: "spam", 1: "mill", 2: "other"}


def save_model(folder: Path, labels: dict[int, str], problem: str | None = None, kind: type | None = None) -> Path:
    """Save a BERT of random weights, large enough that scores differ, with a tokenizer of words."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, initializer_range=0.5, id2label=labels,
        label2id={name: number for number, name in labels.items()}, problem_type=problem,
    )  # fmt: skip
    (kind or BertForSequenceClassification)(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    return folder


def by_transformers(folder: Path, label: str, max_tokens: int = 64) -> list[float]:
    """The scores of TEXTS, one at a time and without padding, as the documentation of transformers computes them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    scores = []
    for text in TEXTS:
        with torch.no_grad():
            inputs = tokenizer(text, truncation=True, max_length=max_tokens, return_tensors="pt")
            logits = model(**inputs).logits[0]
        if len(logits) == 1:
            scores.append(logits[0].item())
        elif model.config.problem_type == "multi_label_classification":
            scores.append(torch.sigmoid(logits)[model.config.label2id[label]].item())
        else:
            scores.append(torch.softmax(logits, -1)[model.config.label2id[label]].item())
    return scores


@pytest.mark.parametrize(
    ("labels", "problem", "label"),
    [
        ({0: "LABEL_0"}, "regression", ""),  # as FineWeb-Edu's
        (LABELS, None, "mill"),
        (LABELS, "multi_label_classification", "spam"),
    ],
)
@pytest.mark.parametrize("max_tokens", [512, 20])
def test_scores_are_those_of_transformers(tmp_path: Path, labels, problem, label: str, max_tokens: int) -> None:
    folder = save_model(tmp_path / "model", labels, problem)
    step = score_step("edu", ScoreOptions(transformers=str(folder), label=label, max_tokens=max_tokens))
    threads = torch.get_num_threads()
    found = step.apply(Batch(tuple(TEXTS))).facts[step.fact]
    expected = by_transformers(folder, label, min(64, max_tokens))
    assert found.dtype == np.float32 and torch.get_num_threads() == threads
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert np.ptp(expected) > 0.1


def test_facts_are_the_same_for_any_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.engine.slices.SMALL_BYTES", 0)  # a task for each file
    folder = save_model(tmp_path / "model", LABELS)
    for number in range(4):
        path = tmp_path / "corpus/web" / f"{number}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": text or "a"}) + "\n" for text in TEXTS[number::4]))
    step = score_step("edu", ScoreOptions(transformers=str(folder), label="mill"))
    for workers in (1, 2):
        prepare(tmp_path / "corpus", None, tmp_path / f"{workers}", [step], RunOptions(workers=workers, quiet=True))
    one, two = (sorted((tmp_path / name).rglob("*.parquet")) for name in "12")
    assert len(one) == 4 and [path.read_bytes() for path in one] == [path.read_bytes() for path in two]
    assert step.fact in pq.read_schema(one[0]).names


def test_a_device_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    step = score_step("edu", ScoreOptions(transformers=str(save_model(tmp_path, {0: "LABEL_0"})), device="cuda"))
    with pytest.raises(UsageError, match="device cuda: expected a GPU that torch can use, got none; try"):
        step.apply(Batch(("the mill",)))


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def of_another_kind(folder: Path) -> None:
    save_model(folder, LABELS, kind=BertForMaskedLM)


def not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("harm", "label", "kind", "message"),
    [
        (nothing, "edu", UsageError, "expected label to be one of spam, mill, other, got 'edu'"),
        (nothing, "", UsageError, "expected label to be one of spam, mill, other, got ''"),
        (without_weights, "mill", UsageError, r"expected weights as .safetensors, and there are none"),
        (of_another_kind, "mill", UsageError, "expected a model for sequence classification, got BertForMaskedLM"),
        (not_json, "mill", InputError, r"config.json is not JSON"),
    ],
)
def test_models_that_cannot_be_used_are_refused(tmp_path: Path, harm, label: str, kind: type, message: str) -> None:
    folder = save_model(tmp_path / "model", LABELS)
    harm(folder)
    with pytest.raises(kind, match=message) as refused:
        score_step("edu", ScoreOptions(transformers=str(folder), label=label))
    assert "\n" not in str(refused.value)


def test_a_label_of_a_model_of_one_output_and_a_missing_folder(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", {0: "LABEL_0"})
    with pytest.raises(UsageError, match="label 'good' has no effect with a model of one output"):
        score_step("edu", ScoreOptions(transformers=str(folder), label="good"))
    with pytest.raises(UsageError, match=r"none: expected a model's folder with config.json, or a repository ORG/NAME"):
        score_step("edu", ScoreOptions(transformers=str(tmp_path / "none")))


def test_damaged_weights_are_refused_as_they_are_loaded(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", LABELS)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    step = score_step("edu", ScoreOptions(transformers=str(folder), label="mill"))
    with pytest.raises(UsageError, match="model cannot be loaded by transformers"):
        step.apply(Batch(("the mill",)))


def test_one_thread_computes_and_others_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over several threads have another order, and other last digits."""
    step = score_step("edu", ScoreOptions(transformers=str(save_model(tmp_path / "model", LABELS)), label="mill"))
    threads = []
    compute = BertForSequenceClassification.forward

    def noted(*arguments: object, **options: object) -> object:
        threads.append(torch.get_num_threads())
        return compute(*arguments, **options)

    monkeypatch.setattr(BertForSequenceClassification, "forward", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        step.apply(Batch(tuple(TEXTS[:5])))
        assert set(threads) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
