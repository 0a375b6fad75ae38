"""The files of an imported model's tokenizer: what came in goes out, through shards and training, or is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from gristmill.engine.options import RunOptions
from gristmill.errors import UsageError
from gristmill.io.token_shards import open_shards
from gristmill.io.tokenizer_companions import read_config
from gristmill.io.tokenizer_file import open_tokenizer
from preprocessing.tokenize_corpus import tokenize_corpus
from tests.tokenizers_of_models import PROSE, content_of, write_ranks
from tests.training.hf_models import build_theirs
from tests.training.hugging_face.test_tokenizer_json import train as train_tokenizer
from training.config import TrainConfig
from training.hugging_face.export_hf import export_hf
from training.hugging_face.import_hf import import_hf
from training.model.model_config import ModelConfig
from training.train import train

ONE = RunOptions(workers=1, quiet=True)
IDS = {"bos_token_id": 1, "eos_token_id": 2}
CONFIG = {
    "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False,
    "add_bos_token": True, "add_eos_token": False, "model_max_length": 20,
    "chat_template": "{% for message in messages %}[INST] {{ message.content }} [/INST]{% endfor %}",
    "added_tokens_decoder": {str(i): {"content": token} for i, token in enumerate(["<unk>", "<s>", "</s>"])},
}  # fmt: skip
ADDED = {"content": "<|im_start|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}


def write_model(folder: Path, config: dict[str, Any], **settings: Any) -> Path:
    """Write a model as Llama 2 is published, but without a tokenizer.json."""
    build_theirs("llama", folder, vocab_size=600, max_position_embeddings=20)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | IDS))
    settings = {"add_dummy_prefix": True, "vocab_size": 400} | settings
    (folder / "tokenizer.model").write_bytes(train_tokenizer(**settings).serialized_model_proto())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_texts(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in PROSE * 20))
    return folder


def tokenize(tokenizer: Path, root: Path) -> Path:
    tokenize_corpus(write_texts(root / "texts"), tokenizer, root / "tokens", ONE, bos="model")
    return root / "tokens"


def train_and_export(config: TrainConfig, start: Path, tokens: Path, out: Path) -> None:
    data = replace(config.data, train=tokens, holdout=tokens)
    optim = replace(config.optim, steps=1, warmup_steps=0)
    train(replace(config, model=ModelConfig(), init_from=start, optim=optim, data=data))
    export_hf(config.out_dir, out)


def files_of(folder: Path) -> dict[str, bytes]:
    """The contents of a model's files but those of the model itself."""
    own = {"config.json", "generation_config.json", "model.safetensors"}
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name not in own}


def test_a_tokenizer_model_goes_out_with_its_template_and_begin(tmp_path: Path, config: TrainConfig) -> None:
    hf = write_model(tmp_path / "hf", CONFIG)
    import_hf(hf, start := tmp_path / "start")
    tokens = tokenize(start, tmp_path)
    train_and_export(config, start, tokens, again := tmp_path / "again")
    assert files_of(again) == files_of(hf)
    theirs = transformers.AutoTokenizer.from_pretrained(hf)
    found = transformers.AutoTokenizer.from_pretrained(again)
    assert (found.bos_token, found.eos_token, found.chat_template) == ("<s>", "</s>", CONFIG["chat_template"])
    assert [found(text).input_ids for text in PROSE] == [theirs(text).input_ids for text in PROSE]
    shard = open_shards(tokens)[1][0]
    assert [shard[i].tolist() for i in range(len(PROSE))] == [[*theirs(text).input_ids, 2] for text in PROSE]


@pytest.mark.parametrize("where", ["config", "added_tokens.json", "map", "control"])
def test_tokens_that_a_tokenizer_model_does_not_find_are_refused(tmp_path: Path, where: str) -> None:
    config = dict(CONFIG)
    if where == "config":
        config["added_tokens_decoder"] = CONFIG["added_tokens_decoder"] | {"400": ADDED}
    if where == "control":  # as Mistral's [INST] are
        config["additional_special_tokens"] = ["<|im_start|>"]
    hf = write_model(tmp_path / "hf", config, control_symbols=["<|im_start|>"] if where == "control" else [])
    if where == "added_tokens.json":
        (hf / "added_tokens.json").write_text('{"<|im_start|>": 400}')
    if where == "map":
        (hf / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": [ADDED]}))
    expected = r"tokenizer.model: the files beside it add the token '<\|im_start\|>', which .* Make a tokenizer.json"
    with pytest.raises(UsageError, match=expected):
        import_hf(hf, tmp_path / "start")
    with pytest.raises(UsageError, match=expected):
        tokenize(hf, tmp_path)


def test_the_advice_for_added_tokens_can_be_taken(tmp_path: Path, config: TrainConfig) -> None:
    """transformers makes a tokenizer.json, which is preferred, and of which texts have the added token."""
    added = {"added_tokens_decoder": CONFIG["added_tokens_decoder"] | {"400": ADDED}}
    hf = write_model(tmp_path / "hf", CONFIG | added)
    theirs = transformers.AutoTokenizer.from_pretrained(hf)
    theirs.save_pretrained(hf)
    import_hf(hf, start := tmp_path / "start")
    text = "the mill <|im_start|>grinds"
    texts = write_texts(tmp_path / "texts")
    (texts / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    tokenize_corpus(texts, start, tmp_path / "few", ONE, bos="model")
    (shard,) = open_shards(tmp_path / "few")[1]
    assert theirs.convert_tokens_to_ids("<|im_start|>") in shard[0].tolist()
    assert shard[0].tolist() == [*theirs(text).input_ids, 2]


def test_a_tokenizer_json_goes_out_with_all_that_lies_beside_it(tmp_path: Path, config: TrainConfig) -> None:
    """Shards of the model's folder are of the same tokenizer as the imported checkpoint: its tokenizer.json."""
    hf = write_model(tmp_path / "hf", CONFIG | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "a"})
    (hf / "tokenizer.json").write_text(content_of("Llama 2"), encoding="utf-8")
    (hf / "additional_chat_templates").mkdir()
    (hf / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    import_hf(hf, start := tmp_path / "start")
    train_and_export(config, start, tokenize(hf, tmp_path), again := tmp_path / "again")
    assert files_of(again) == files_of(hf)
    assert len(files_of(hf)) == 4


@pytest.mark.parametrize("template", ["", "{{ messages }}"])
def test_training_continues_from_an_export_of_ours_on_the_same_shards(
    tmp_path: Path, config: TrainConfig, template: str
) -> None:
    """Of a SentencePiece model the export has a tokenizer.json, too; with a chat template or without."""
    hf = write_model(tmp_path / "hf", CONFIG)
    (hf / "tokenizer_config.json").unlink()
    if template:
        (hf / "chat_template.jinja").write_text(template)
    import_hf(hf, start := tmp_path / "start")
    tokens = tokenize(start, tmp_path)
    train_and_export(config, start, tokens, exported := tmp_path / "exported")
    names = ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"]
    assert sorted(files_of(exported)) == ["chat_template.jinja"] * bool(template) + names
    assert read_config([exported / "tokenizer_config.json"])["split_special_tokens"] == (not template)
    import_hf(exported, own := tmp_path / "own")
    assert (own / "tokenizer.model").exists() and not (own / "tokenizer.json").exists()
    assert (own / "chat_template.jinja").exists() == bool(template)
    further = replace(config, out_dir=tmp_path / "further")
    train_and_export(further, own, tokens, again := tmp_path / "again")
    assert files_of(again) == files_of(exported)


def test_a_template_that_someone_adds_to_an_export_of_ours_is_kept(tmp_path: Path) -> None:
    hf = write_model(tmp_path / "hf", CONFIG)
    (hf / "tokenizer_config.json").unlink()
    import_hf(hf, tmp_path / "start")
    export_hf(tmp_path / "start", exported := tmp_path / "exported")
    (exported / "chat_template.jinja").write_text("{{ messages }}")
    import_hf(exported, tmp_path / "own")
    assert (tmp_path / "own/tokenizer.model").exists() and not (tmp_path / "own/tokenizer.json").exists()
    assert (tmp_path / "own/chat_template.jinja").read_text() == "{{ messages }}"
    fields = json.loads((exported / "tokenizer_config.json").read_text())
    (exported / "tokenizer_config.json").write_text(json.dumps(fields | {"unk_token": "</s>"}))
    import_hf(exported, tmp_path / "other")  # what says something of its own is a model like any other
    assert (tmp_path / "other/tokenizer.json").exists() and (tmp_path / "other/chat_template.jinja").exists()


@pytest.mark.every(3)
def test_an_export_with_ranks_of_tiktoken_is_imported_with_them(tmp_path: Path, config: TrainConfig) -> None:
    write_ranks(ranks := tmp_path / "any.tiktoken", 50_256)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    tokenize_corpus(write_texts(tmp_path / "texts"), ranks, tokens := tmp_path / "tokens", ONE)
    model = ModelConfig(layers=1, width=8, heads=2)
    data = replace(config.data, train=tokens, holdout=tokens)
    train(replace(config, model=model, data=data, optim=replace(config.optim, steps=1, warmup_steps=0)))
    export_hf(config.out_dir, exported := tmp_path / "exported")
    assert (exported / "tiktoken.model").read_bytes() == ranks.read_bytes()
    assert (exported / "chat_template.jinja").exists()
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    assert theirs(PROSE[0]).input_ids == open_tokenizer(ranks).encode(PROSE[0])
    import_hf(exported, own := tmp_path / "own")
    train_and_export(replace(config, out_dir=tmp_path / "further"), own, tokens, again := tmp_path / "again")
    assert files_of(again) == files_of(exported)
