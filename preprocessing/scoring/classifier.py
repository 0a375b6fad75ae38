"""Hugging Face sequence classifiers: what a model's files say of it, and its scores of texts."""

import hashlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill.batches import batched
from gristmill.errors import InputError, UsageError, require, wrap_read_errors
from preprocessing.scoring.fasttext_file import version_of_file

CONFIG = "config.json"
_WEIGHTS = ".safetensors"
_READ = (".json", ".safetensors", ".txt", ".model")  # suffixes of a model's files; no code and no pickles
_ARCHITECTURE = "ForSequenceClassification"
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(?:@[\w./-]+)?")
_BATCH = 32  # texts at once
_NO_LIMIT = 1 << 20  # tokens; tokenizers without a limit of their own name a greater one


class ClassifierFiles(NamedTuple):
    """The files of a classifier, its version, and the output that is its score: the place of a label, -1 for the only.

    `is_multi` says that labels do not exclude each other.
    """

    files: tuple[Path, ...]
    version: str
    output: int
    is_multi: bool


def read_classifier(given: str, label: str) -> ClassifierFiles:
    """Return what the files of a model say: a folder, or a repository ORG/NAME[@REVISION] of the Hub.

    Raises UsageError for a model of another kind or a label that it does not have, InputError for a damaged one.
    """
    folder = _find_folder(given)
    config = _read_config(folder)
    architectures = config.get("architectures") or ["a model that does not say what it is"]
    require(
        str(architectures[0]).endswith(_ARCHITECTURE),
        f"{folder}: expected a model for sequence classification, got {architectures[0]}",
    )
    read = [path for path in folder.iterdir() if path.suffix in _READ and path.is_file()]
    files = tuple(sorted(read))
    require(
        any(path.suffix == _WEIGHTS for path in files),
        f"{folder}: expected weights as {_WEIGHTS}, and there are none; try saving the model with save_pretrained",
    )
    hashes = "\n".join(f"{path.name} {version_of_file(path)}" for path in files)
    version = hashlib.sha256(hashes.encode()).hexdigest()
    output = _find_output(folder, config, label)
    return ClassifierFiles(files, version, output, config.get("problem_type") == "multi_label_classification")


def _find_folder(given: str) -> Path:
    folder = Path(given)
    if (folder / CONFIG).is_file():
        return folder
    if folder.exists() or not _REPOSITORY.fullmatch(given):
        raise UsageError(f"{given}: expected a model's folder with {CONFIG}, or a repository ORG/NAME of the Hub")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise UsageError(f"{given}: to read it from the Hub: pip install 'gristmill[hub]'") from error
    name, _, revision = given.partition("@")
    patterns = [f"*{suffix}" for suffix in _READ]
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise UsageError(f"{given}: expected a folder, or a model of the Hub that can be read ({first})") from error


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        with wrap_read_errors(path):
            config = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}); fetch it again") from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: expected a table, got {type(config).__name__}; fetch it again")
    return config


def _find_output(folder: Path, config: dict[str, Any], label: str) -> int:
    """Return the place of a label among the outputs, or -1 for a model of one output."""
    labels = dict[str, int]()
    for number, name in (config.get("id2label") or {}).items():
        labels[str(name)] = int(number)
    if not labels:
        for number in range(config.get("num_labels", 2)):
            labels[f"LABEL_{number}"] = number
    if len(labels) == 1:
        require(label in ("", *labels), f"{folder}: label {label!r} has no effect with a model of one output")
        return -1
    if label not in labels:
        raise UsageError(f"{folder}: expected label to be one of {', '.join(labels)}, got {label!r}")
    return labels[label]


class Classifier:
    """A classifier in memory, on a device; `score` gives a score for each text."""

    def __init__(self, folder: Path, device: str, max_tokens: int) -> None:
        """Load the model. Raises UsageError if transformers cannot, or there is no such device."""
        from transformers import AutoModelForSequenceClassification, AutoTokenizer  # here, as it takes seconds
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        has_device = device == "cpu" or sys.modules["torch"].cuda.is_available()
        require(has_device, f"device {device}: expected a GPU that torch can use, got none; try device = 'cpu'")
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
            model = AutoModelForSequenceClassification.from_pretrained(folder, use_safetensors=True, dtype="float32")
        except Exception as error:  # of torch, safetensors, tokenizers and each model's own code
            first = str(error).strip().partition("\n")[0]
            raise UsageError(f"{folder} cannot be loaded by transformers ({first}); try another model") from error
        self.device = device
        self.model = model.eval().requires_grad_(False).to(device)
        limits = [max_tokens, getattr(self.tokenizer, "model_max_length", _NO_LIMIT)]
        limits.append(getattr(model.config, "max_position_embeddings", None) or _NO_LIMIT)
        self.max_tokens = min(limits)

    def score(self, texts: Sequence[str], output: int, is_multi: bool) -> NDArray[np.float32]:
        """Return the score of each text: the only output of the model, or a label's probability.

        Texts of as many tokens go together, so that none is padded: padding would change the last digits. The score of
        a text without tokens is 0.
        """
        inputs = self.tokenizer(list(texts), truncation=True, max_length=self.max_tokens)
        numbers_of = defaultdict[int, list[int]](list)
        for number, ids in enumerate(inputs["input_ids"]):
            numbers_of[len(ids)].append(number)
        numbers_of.pop(0, None)  # a text without a token says nothing
        scores = np.zeros(len(texts), np.float32)
        with _one_thread():
            for of_length in numbers_of.values():
                for numbers in batched(of_length, count=_BATCH):
                    chosen = {name: [values[number] for number in numbers] for name, values in inputs.items()}
                    logits = self._logits(chosen)
                    scores[numbers] = logits[:, 0] if output < 0 else _probabilities(logits, is_multi)[:, output]
        return scores

    def _logits(self, inputs: dict[str, list[list[int]]]) -> NDArray[np.float64]:
        """Return the outputs (n, labels) for the inputs of some texts, which are of one length."""
        from transformers import BatchEncoding

        logits = self.model(**BatchEncoding(inputs, tensor_type="pt").to(self.device)).logits
        numbers: NDArray[np.float64] = logits.float().cpu().numpy().astype(np.float64)
        return numbers


def _probabilities(logits: NDArray[np.float64], is_multi: bool) -> NDArray[np.float64]:
    """Return probabilities by softmax, or by a sigmoid of each label."""
    if is_multi:
        single: NDArray[np.float64] = 1 / (1 + np.exp(-logits))
        return single
    powers = np.exp(logits - logits.max(1, keepdims=True))
    shares: NDArray[np.float64] = powers / powers.sum(1, keepdims=True)
    return shares


@contextmanager
def _one_thread() -> Iterator[None]:
    """Context: torch computes on one thread, as sums in another order would change the last bits of a score."""
    torch: Any = sys.modules["torch"]  # loaded by transformers
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
