"""Exported and imported models compute the same logits and the same loss."""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from msgspec.structs import replace as replace_struct

from gristmill.config import load_config
from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, UsageError
from gristmill.io.token_shards import TokenizerRecord, open_shards
from gristmill.io.tokenizer_file import open_tokenizer
from preprocessing.tokenize_corpus import tokenize_corpus
from tests.tokenizers_of_models import BEGIN, PROSE, content_of
from tests.tokenizers_of_models import END as END_OF_TEXT
from tests.training.hf_models import (
    END,
    MODELS,
    THEIRS,
    build,
    build_theirs,
    ids,
    load_ours,
    load_theirs,
    save,
    weights,
)
from tests.training.hugging_face.test_tokenizer_json import train as train_tokenizer
from training.checkpoint.checkpoint import load_model
from training.checkpoint.checkpoint_group import single_process_group
from training.checkpoint.shard_storage import model_state
from training.config import TrainConfig
from training.data.batch_schedule import BatchSplit
from training.data.batches import Batches
from training.data.sequences import TokenSequences
from training.experimental.parallel_config import ParallelConfig
from training.hugging_face.export_hf import ExportDtype, export_hf
from training.hugging_face.import_hf import import_hf
from training.reporting.metrics_file import METRICS, read_metrics
from training.train import train


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_an_exported_model_with_the_same_logits(tmp_path: Path, name: str) -> None:
    model = build(MODELS[name])
    assert name.partition(",")[0] in export_hf(save(model, tmp_path / "run"), tmp_path / "hf")
    theirs = load_theirs(tmp_path / "hf")
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids()).logits, model(ids()), rtol=1e-5, atol=2e-5)
    assert theirs.config.eos_token_id == END and theirs.generation_config.pad_token_id == END
    found = theirs.generate(torch.tensor([[END, 1]]), max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        assert found[0, 2] == model(found[:, :2])[0, -1].argmax()


def test_a_model_whose_end_is_no_token_and_that_mixes_dtypes_keeps_them(tmp_path: Path) -> None:
    build_theirs("llama", tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config | {"eos_token_id": config["vocab_size"]}))
    tensors = safetensors.torch.load_file(path := tmp_path / "hf/model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].bfloat16()
    safetensors.torch.save_file(tensors, path)
    import_hf(tmp_path / "hf", tmp_path / "start")
    load_ours(tmp_path / "start")
    export_hf(tmp_path / "start", tmp_path / "again")
    found = safetensors.torch.load_file(tmp_path / "again/model.safetensors")
    assert all(torch.equal(found[name], values.float()) for name, values in tensors.items())
    assert load_theirs(tmp_path / "again").config.eos_token_id == config["vocab_size"]


@pytest.mark.parametrize("name", THEIRS)
def test_an_imported_model_has_the_same_logits_and_loss(tmp_path: Path, name: str) -> None:
    theirs = build_theirs(name, tmp_path / "hf")
    said = import_hf(tmp_path / "hf", tmp_path / "start")
    assert said.endswith(f"--init_from {tmp_path / 'start'}")
    ours = load_ours(tmp_path / "start")
    with torch.no_grad():
        logits, wanted = ours(ids()), theirs(ids(), labels=ids())
        assert (logits - wanted.logits).abs().max() < 1e-5
        loss = ours.train()(ids()[:, :-1], ids()[:, 1:]) / ids()[:, 1:].numel()
    assert abs(float(loss - wanted.loss)) < 1e-5


def printed_config(said: str, config: TrainConfig) -> TrainConfig:
    """Parse the options that import_hf prints as a command line."""
    told = said.partition("train it with ")[2].split()
    given = {"data.train": config.data.train, "data.holdout": config.data.holdout, "out_dir": config.out_dir}
    words = [word for key, value in {**given, "data.seq_len": 16}.items() for word in (f"--{key}", str(value))]
    return load_config(TrainConfig, [*told, *words], prog="train.py")


@pytest.mark.parametrize(
    "name", ["llama, biases", "llama, scaled", "mistral", "qwen3_moe", "deepseek_v3", "gpt_oss", "gpt2, untied"]
)
def test_training_starts_at_the_imported_model_s_loss(tmp_path: Path, config: TrainConfig, name: str) -> None:
    wide = {"vocab_size": 300, "max_position_embeddings": 20, "n_positions": 20, "seq_length": 20}
    theirs = build_theirs(name, tmp_path / "hf", **wide)
    told = printed_config(import_hf(tmp_path / "hf", tmp_path / "start"), config)
    config = replace(config, model=told.model, init_from=told.init_from, optim=replace(config.optim, steps=1))
    train(config)
    (loss,) = [line["loss"] for line in read_metrics(config.out_dir / METRICS) if line["kind"] == "step"]
    sequences = TokenSequences(config.data.train, 16)
    split = BatchSplit.of(config.data, ParallelConfig(dp=1, micro_batches=1))
    batch = Batches(sequences, split, 0, config.seed).batch(0)
    with torch.no_grad():
        logits = theirs(batch.ids).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    assert abs(loss - float(wanted)) < 1e-5


@pytest.mark.parametrize("name", ["llama, tied, biases", "mixtral", "deepseek_v3", "gpt_oss", "gpt2, untied"])
def test_an_export_in_several_files_imports_bit_for_bit(tmp_path: Path, name: str) -> None:
    model = build(MODELS[name])
    export_hf(save(model, tmp_path / "run"), tmp_path / "hf", shard_size="6KB")
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert len(files) > 3 and sorted(set(index["weight_map"].values())) == files
    stored = {
        key: value for file in files for key, value in safetensors.torch.load_file(tmp_path / "hf" / file).items()
    }
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in stored.values())
    assert load_theirs(tmp_path / "hf") is not None
    import_hf(tmp_path / "hf", tmp_path / "start")
    again = load_ours(tmp_path / "start")
    assert again.config == replace(model.config, dropout=0.0)
    pairs = zip(model.state_dict().items(), again.state_dict().items(), strict=True)
    assert all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)


def test_a_layer_that_predicts_a_further_token_is_left_out(tmp_path: Path) -> None:
    """DeepSeek-V3's files have it as one more layer (multi-token prediction)."""
    build_theirs("deepseek_v3", tmp_path / "hf")
    tensors = safetensors.torch.load_file(path := tmp_path / "hf/model.safetensors")
    further = {name.replace("layers.1.", "layers.2."): x.clone() for name, x in tensors.items() if "layers.1." in name}
    safetensors.torch.save_file(tensors | further | {"model.layers.2.eh_proj.weight": torch.ones(2)}, path)
    said = import_hf(tmp_path / "hf", tmp_path / "start")
    assert f"left out: {len(further) + 1} tensors of a layer that predicts a further token, such as model.lay" in said
    assert load_ours(tmp_path / "start").config.layers == 2


def test_the_original_gpt2_file_is_imported(tmp_path: Path) -> None:
    """OpenAI's file has names without "transformer." and contains the causal masks."""
    theirs = build_theirs("gpt2", tmp_path / "hf")
    stored = safetensors.torch.load_file(tmp_path / "hf/model.safetensors")
    stored = {name.removeprefix("transformer."): value for name, value in stored.items()}
    stored |= {f"h.{i}.attn.bias": torch.ones(1, 1, 12, 12).tril() for i in range(2)}
    safetensors.torch.save_file(stored, tmp_path / "hf/model.safetensors")
    import_hf(tmp_path / "hf", tmp_path / "start")
    with torch.no_grad():
        assert (load_ours(tmp_path / "start")(ids()) - theirs(ids()).logits).abs().max() < 1e-5


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_weights_are_exported_in_the_dtype_asked_for(tmp_path: Path, name: ExportDtype, dtype: torch.dtype) -> None:
    model = build(MODELS["gpt2"])
    export_hf(save(model, tmp_path / "run"), tmp_path / "hf", dtype=name, shard_size="6KB")
    theirs = load_theirs(tmp_path / "hf")
    assert theirs.dtype == dtype
    stored = model.get_parameter("embed.positions.weight")
    assert torch.equal(theirs.get_parameter("transformer.wpe.weight"), stored.to(dtype))
    import_hf(tmp_path / "hf", tmp_path / "start")
    again = load_ours(tmp_path / "start")
    assert all(torch.equal(a.to(dtype).float(), b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_bfloat16_file_is_imported_as_float32(tmp_path: Path) -> None:
    torch.manual_seed(4)
    THEIRS["llama"]().bfloat16().save_pretrained(tmp_path / "hf", max_shard_size="10KB")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    import_hf(tmp_path / "hf", tmp_path / "start")
    with torch.no_grad():
        assert (load_ours(tmp_path / "start")(ids()) - theirs(ids()).logits).abs().max() < 1e-5


def test_a_tokenizer_that_is_left_out_is_said(tmp_path: Path) -> None:
    build_theirs("gpt2", tmp_path / "hf")
    lines = import_hf(tmp_path / "hf", tmp_path / "none").splitlines()
    assert len(lines) == 2 and "left out" not in lines[0]
    (tmp_path / "hf/vocab.json").write_text("{}")
    said, *rest = import_hf(tmp_path / "hf", tmp_path / "start").splitlines()
    assert said.startswith("its vocab.json is left out: load its tokenizer by transformers'") and len(rest) == 2
    (tmp_path / "hf/tokenizer.json").write_text(content_of("GPT-2"))
    assert "left out" not in import_hf(tmp_path / "hf", tmp_path / "both")


def test_the_tokenizer_is_copied_by_export_and_import(tmp_path: Path) -> None:
    tokens, content = tmp_path / "tokens", train_tokenizer().serialized_model_proto()
    tokens.mkdir()
    (tokens / "grain.model").write_bytes(content)
    record = TokenizerRecord("grain.model", hashlib.sha256(content).hexdigest(), 50, END)
    run = save(build(MODELS["llama"]), tmp_path / "run", record)
    export_hf(run, tmp_path / "hf", tokens)
    assert (tmp_path / "hf/tokenizer.model").read_bytes() == content
    import_hf(tmp_path / "hf", tmp_path / "start")
    assert (tmp_path / "start/tokenizer.model").read_bytes() == content
    with single_process_group() as group:
        model = build(MODELS["llama"])
        found = load_model(tmp_path / "start", model_state(weights(model)), group, print).tokenizer
    assert (found.path, found.sha256, found.end_of_document) == ("tokenizer.model", record.sha256, END)
    (tokens / "grain.model").write_bytes(b"another")
    with pytest.raises(UsageError, match="is not the tokenizer"):
        export_hf(run, tmp_path / "other", tokens)
    record = replace_struct(record, sha256=hashlib.sha256(b"another").hexdigest())
    run = save(build(MODELS["llama"]), tmp_path / "run/another", record)
    with pytest.raises(UsageError, match="is no tokenizer"):
        export_hf(run, tmp_path / "other", tokens)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run", "start", "tokens"]


def test_a_head_that_is_not_the_embedding_is_imported_though_the_config_says_tied(tmp_path: Path) -> None:
    """Fine-tuned models have one: transformers 4 ignores it, and the one that was trained is in the file."""
    build_theirs("llama", tmp_path / "hf")
    path, config = tmp_path / "hf/model.safetensors", json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = safetensors.torch.load_file(path)
    own = import_hf(tmp_path / "hf", tmp_path / "own")
    assert own.startswith("its lm_head.weight is not its embedding, though tie_word_embeddings is true")
    wanted = build_theirs("llama", tmp_path / "untied")
    with torch.no_grad():
        assert (load_ours(tmp_path / "own")(ids()) - wanted(ids()).logits).abs().max() < 1e-5
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    import_hf(tmp_path / "hf", tmp_path / "tied")
    assert "head.weight" not in dict(load_ours(tmp_path / "tied").named_parameters())


def test_tensors_that_are_left_out_are_said(tmp_path: Path) -> None:
    build_theirs("llama", tmp_path / "hf")
    path = tmp_path / "hf/model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    said = import_hf(tmp_path / "hf", tmp_path / "start")
    assert said.startswith("left out: 1 tensor computed anew, such as model.layers.0.self_attn.rotary_emb.inv_freq")


def test_a_tensor_is_read_from_the_file_that_the_index_names(tmp_path: Path) -> None:
    """A later file may have a stale copy of it, and the index a tensor that no file holds: both are said."""
    theirs = build_theirs("llama", tmp_path / "hf")
    tensors = safetensors.torch.load_file(path := tmp_path / "hf/model.safetensors")
    path.unlink()
    name = "model.layers.1.mlp.up_proj.weight"
    first = {key: value for key, value in tensors.items() if "layers.1." not in key or key == name}
    last = {key: value for key, value in tensors.items() if key not in first} | {name: tensors[name] + 1.0}
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": last}
    for file, part in files.items():
        safetensors.torch.save_file(part, tmp_path / "hf" / file)
    weight_map = {key: file for file, part in reversed(files.items()) for key in part}
    index = tmp_path / "hf/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map | {"model.layers.7.x": next(iter(files))}}))
    said = import_hf(tmp_path / "hf", tmp_path / "start").splitlines()
    assert said[:2] == [
        f"left out: 1 tensor that {index.name} places in another file, such as {name} of {[*files][1]}",
        f"left out: 1 tensor that {index.name} names and its files do not hold, such as model.layers.7.x",
    ]
    with torch.no_grad():
        assert (load_ours(tmp_path / "start")(ids()) - theirs(ids()).logits).abs().max() < 1e-5
    index.write_text(json.dumps({"weight_map": weight_map | {"model.norm.weight": [*files][1]}}))
    with pytest.raises(InputError, match=r"the files hold no model.norm.weight \(1 missing, 0 too many\)"):
        import_hf(tmp_path / "hf", tmp_path / "other")


IDS = {"bos_token_id": 3, "eos_token_id": [7, 9], "pad_token_id": 11}
GENERATION = IDS | {"do_sample": True, "temperature": 0.6, "top_p": 0.9}


@pytest.mark.parametrize(("name", "tokenizer"), [("gpt2", "GPT-2"), ("llama", "Llama 3"), ("qwen3", "Qwen")])
def test_an_imported_model_trains_on_text_and_is_exported_with_its_ids_and_tokenizer(
    tmp_path: Path, config: TrainConfig, name: str, tokenizer: str
) -> None:
    """Text, the model's own tokenizer.json, shards, training with samples, and back: what came in goes out."""
    wide = {"vocab_size": 512, "max_position_embeddings": 20, "n_positions": 20}
    build_theirs(name, hf := tmp_path / "hf", **wide)
    (hf / "config.json").write_text(json.dumps(json.loads((hf / "config.json").read_text()) | IDS))
    (hf / "generation_config.json").write_text(json.dumps(GENERATION))
    (hf / "tokenizer.json").write_text(content_of(tokenizer), encoding="utf-8")
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "bos_token": BEGIN}
    (hf / "tokenizer_config.json").write_text(json.dumps(special | {"model_max_length": 20}))
    (hf / "chat_template.jinja").write_text("{{ messages[0].content }}")
    told = printed_config(import_hf(hf, start := tmp_path / "start"), config)
    texts = tmp_path / "texts/a.jsonl"
    texts.parent.mkdir()
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in PROSE * 20), encoding="utf-8")
    tokenize_corpus(texts.parent, start, tmp_path / "tokens", RunOptions(workers=1, quiet=True), bos="model")
    train(
        replace(
            config, model=told.model, init_from=start, optim=replace(config.optim, steps=2),
            data=replace(config.data, train=tmp_path / "tokens", holdout=tmp_path / "tokens"),
        )
    )  # fmt: skip
    export_hf(config.out_dir, again := tmp_path / "again")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (again / file).read_bytes() == (hf / file).read_bytes()
    fields = transformers.AutoConfig.from_pretrained(again)
    assert {key: getattr(fields, key) for key in IDS} == IDS
    generation = transformers.GenerationConfig.from_pretrained(again)
    assert {key: getattr(generation, key) for key in GENERATION} == GENERATION
    found = transformers.AutoTokenizer.from_pretrained(again)
    shard = open_shards(tmp_path / "tokens")[1][0]
    assert [shard[i].tolist() for i in range(len(PROSE))] == [
        [found.bos_token_id, *found(text, add_special_tokens=False).input_ids, found.eos_token_id] for text in PROSE
    ]


def test_a_model_of_our_own_with_a_tokenizer_json_is_read_by_auto_tokenizer(tmp_path: Path) -> None:
    data = content_of("Llama 3").encode()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mine.json").write_bytes(data)
    record = TokenizerRecord("mine.json", hashlib.sha256(data).hexdigest(), 500, 0, 1)
    export_hf(save(build(MODELS["llama"]), tmp_path / "run", record), tmp_path / "hf")
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (found.bos_token, found.eos_token, found.model_max_length) == (BEGIN, END_OF_TEXT, 12)
    assert found.backend_tokenizer.encode(PROSE[0]).ids == open_tokenizer(tmp_path / "run/mine.json").encode(PROSE[0])
    assert transformers.AutoConfig.from_pretrained(tmp_path / "hf").bos_token_id == 1


def test_everything_that_is_exported_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        export_hf(save(build(MODELS["llama"]), tmp_path / "run"), tmp_path / "hf", shard_size="20KB")
    finally:
        os.umask(before)
    files = [path for folder in ("run", "hf") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert sum(path.suffix == ".safetensors" for path in files) > 1
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == dict.fromkeys(
        (path.name for path in files), "0o644"
    )
