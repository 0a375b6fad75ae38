"""What comes before a text: whoever reads one with a model puts before it what its training had before a document."""

import shutil
from pathlib import Path

import pytest
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gristmill.io.token_shards import Manifest
from gristmill.io.tokenizer_file import open_tokenizer
from tests.training.conftest import sentences, small_run, train_with_options, write_shards
from tests.training.hugging_face.test_tokenizer_json import train
from tests.training.tasks.conftest import ITEMS
from tests.training.tasks.test_during_training import scores
from tests.training.tasks.test_lm_eval_model import requests
from training.data.text import begin_text
from training.distributed.process_group import init_distributed
from training.hugging_face.export_hf import export_hf
from training.hugging_face.import_hf import import_hf
from training.language_model import open_language_model
from training.tasks.lm_eval_model import GristmillLM
from training.tasks.run_tasks import run_tasks

END = 2
PAIRS = [("the miller", " carries grain"), ("", "the stone"), ("a slow wheel ", "turns")]


@pytest.fixture(scope="module")
def lossless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus whose tokenizer transformers can have, too."""
    folder = tmp_path_factory.mktemp("lossless")
    model = train()
    (folder / "tokenizer.model").write_bytes(model.serialized_model_proto())
    for name, seed, size in (("train", 1, 100), ("holdout", 2, 20)):
        documents = [[*model.encode(text), END] for text in sentences(seed, size)]
        write_shards(folder / "tokens" / name, [documents], folder / "tokenizer.model", model.vocab_size())
    return folder


def test_nothing_begins_a_text_where_nothing_came_before_a_document(
    lossless: Path, tmp_path: Path, tasks: Path
) -> None:
    task = (tasks / "mill_choice.yaml").read_text().replace("mill_choice", "mill_open")
    question = '"Question: {{question}}\\nAnswer:"'
    assert question in task
    (tasks / "mill_open.yaml").write_text(task.replace(question, '""'))
    names = ["mill_choice", "mill_open"]
    options = [*small_run(lossless), "--data.mask_documents", "true", "--data.seq_len", "64", "--optim.steps", "3"]
    options += ["--optim.lr", "0.01", "--optim.warmup_steps", "1", "--eval.sample_tokens", "0"]
    train_with_options(tmp_path / "run", [*options, "--eval.tasks", *names, "--eval.task_folder", str(tasks)])
    checkpoint = moved_out_of_its_run(tmp_path / "run/checkpoints/step-00000003", tmp_path / "alone")
    export_hf(checkpoint, tmp_path / "hf")
    encode = open_tokenizer(lossless / "tokenizer.model").encode
    text = ITEMS[0]["question"]
    assert isinstance(text, str)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")(text).input_ids == encode(text)
    import_hf(tmp_path / "hf", tmp_path / "start")
    assert (tmp_path / "start/tokenizer.model").is_file()  # the export is known as one of ours
    with init_distributed("cpu") as device:
        exported = open_language_model(tmp_path / "hf", device)
        model = open_language_model(checkpoint, device)
        expected = run_tasks(model, names, tasks, 0, None, 4)
        for opened in (exported, model):
            assert opened.begins(text) == encode(text)
            assert opened.begins("") == [END]  # as something has to be there
        asked = requests("loglikelihood", PAIRS)
        ours = GristmillLM(model)
        assert ours._encode_pair("  ", "turns") == ([END], encode("  turns"))
        theirs = HFLM(
            str(tmp_path / "hf"),
            tokenizer=PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf"),
            device="cpu",
            dtype="float32",
        )
        for (value, _), (expected_value, _) in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
            assert value == pytest.approx(expected_value, abs=1e-5)
    last = scores(tmp_path / "run")[-1]
    for name in names:
        assert last[name]["acc"] == expected[name]["acc"]


def moved_out_of_its_run(checkpoint: Path, folder: Path) -> Path:
    """Move a checkpoint to another folder, with the tokenizer alone."""
    folder.mkdir()
    shutil.copy(checkpoint.parent.parent / "tokenizer.model", folder)
    return checkpoint.rename(folder / checkpoint.name)


@pytest.mark.parametrize("begin", [-1, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_texts_begin_as_documents_do(corpus: Path, begin: int, masked: bool) -> None:
    record = Manifest.load(corpus / "tokens/train").tokenizer
    record.begin_of_document = begin
    own = [begin] * (begin >= 0)
    before = own if masked else [END, *own]
    assert begin_text(record, masked, [7, 8]) == [*before, 7, 8]
    assert begin_text(record, masked, []) == (before or [END])
