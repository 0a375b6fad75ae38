import hashlib
import json
import resource
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from pipeline.config import load_config
from pipeline.errors import GristmillError, InputError, OutputError, UsageError
from pipeline.tokens import TokenizerRecord
from training.checkpoint import CheckpointRecord, Checkpoints, load_model
from training.config import ModelConfig, TrainConfig
from training.data import Batches, BatchSplit, TokenSequences
from training.export_hf import export_hf
from training.hugging_face import form_of
from training.import_hf import import_hf
from training.initialize import fill_initial
from training.layout import ParallelConfig
from training.metrics import METRICS, read_metrics
from training.model import Decoder
from training.peers import alone
from training.piece import Piece, Weight
from training.piece_storage import model_state
from training.train import train

SIZES = ModelConfig(layers=2, width=24, heads=4, hidden=40, init_std=0.3, norm_eps=1e-4)
MODELS = {
    "llama": replace(SIZES, preset="llama"),
    "llama, grouped": replace(SIZES, preset="llama", kv_heads=2, rope_base=500.0),
    "llama, tied, biases": replace(SIZES, preset="llama", tied=True, bias=True),
    "gpt2": replace(SIZES, preset="gpt2"),
    "gpt2, untied": replace(SIZES, preset="gpt2", tied=False),
}
LLAMA = {
    "vocab_size": 50, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 12, "initializer_range": 0.3, "rms_norm_eps": 1e-4,
}  # fmt: skip
GPT2 = {"vocab_size": 50, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 12, "initializer_range": 0.3}
END = 7


def ids(rows: int = 3, length: int = 12) -> Tensor:
    return torch.randint(50, (rows, length), generator=torch.Generator().manual_seed(3))


def build(config: ModelConfig) -> Decoder:
    """A model whose norms and biases are not the trivial ones they begin with."""
    with torch.device("meta"):
        model = Decoder(config.resolve(50, 12))
    model.to_empty(device="cpu")
    model.tie()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill_initial(parameter, name, Piece.whole(tuple(parameter.shape)), model.config, 1)
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def weights(model: Decoder) -> list[Weight]:
    return [Weight(name, p, p, Piece.whole(tuple(p.shape)), True) for name, p in model.named_parameters()]


def save(model: Decoder, folder: Path, tokenizer: TokenizerRecord | None = None) -> Path:
    record = CheckpointRecord(
        step=5,
        updates=5,
        processes=1,
        layout={},
        stability={},
        unigram_loss=1.5,
        model=asdict(model.config),
        tokenizer=tokenizer or TokenizerRecord("t.model", "0", 50, END),
    )
    with alone() as peers:
        Checkpoints(folder / "checkpoints", 1, peers.world, print).save(record, model_state(weights(model)))
    return folder


def load_ours(folder: Path) -> Decoder:
    """A model of what `folder` says it holds."""
    with alone() as peers:
        model = build(ModelConfig(**json.loads(next(folder.glob("step-*/record.json")).read_text())["model"]))
        assert load_model(folder, model_state(weights(model)), peers.world, print).step == 0
    return model


def load_theirs(folder: Path) -> transformers.PreTrainedModel:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report  # nothing missing, nothing unused
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_ours_and_gives_the_same_logits(tmp_path: Path, name: str) -> None:
    model = build(MODELS[name])
    assert name.partition(",")[0] in export_hf(save(model, tmp_path / "run"), tmp_path / "hf")
    theirs = load_theirs(tmp_path / "hf")
    with torch.no_grad():
        assert (theirs(ids()).logits - model(ids())).abs().max() < 1e-5
    assert theirs.config.eos_token_id == END and theirs.generation_config.pad_token_id == END
    found = theirs.generate(torch.tensor([[END, 1]]), max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        assert found[0, 2] == model(found[:, :2])[0, -1].argmax()


THEIRS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "llama, grouped": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**LLAMA, num_key_value_heads=2, rope_theta=500.0, tie_word_embeddings=True)
    ),
    "llama, biases": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "gpt2, untied": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**GPT2, n_inner=40, tie_word_embeddings=False)
    ),
}


def build_theirs(name: str, folder: Path, **sizes: int) -> transformers.PreTrainedModel:
    torch.manual_seed(4)
    config = THEIRS[name]().config
    for key in sizes.keys() & config.to_dict().keys():
        setattr(config, key, sizes[key])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", THEIRS)
def test_theirs_becomes_ours_with_the_same_logits_and_the_same_loss(tmp_path: Path, name: str) -> None:
    theirs = build_theirs(name, tmp_path / "hf")
    said = import_hf(tmp_path / "hf", tmp_path / "start")
    assert f"--init_from {tmp_path / 'start'} --model.preset {name.partition(',')[0]}" in said
    ours = load_ours(tmp_path / "start")
    with torch.no_grad():
        logits, wanted = ours(ids()), theirs(ids(), labels=ids())
        assert (logits - wanted.logits).abs().max() < 1e-5
        loss = ours(ids()[:, :-1], ids()[:, 1:]) / ids()[:, 1:].numel()  # as training computes it
    assert abs(float(loss - wanted.loss)) < 1e-5


def told_config(said: str, config: TrainConfig) -> TrainConfig:
    """What import_hf says to train with, read as a command line."""
    told = said.partition("train it with ")[2].split()
    given = {"data.train": config.data.train, "data.holdout": config.data.holdout, "out_dir": config.out_dir}
    words = [word for key, value in {**given, "data.seq_len": 16}.items() for word in (f"--{key}", str(value))]
    return load_config(TrainConfig, [*told, *words], prog="train.py")


@pytest.mark.parametrize("name", THEIRS)
def test_training_begins_with_their_loss(tmp_path: Path, config: TrainConfig, name: str) -> None:
    wide = {"vocab_size": 300, "max_position_embeddings": 20, "n_positions": 20}
    theirs = build_theirs(name, tmp_path / "hf", **wide)
    told = told_config(import_hf(tmp_path / "hf", tmp_path / "start"), config)
    config = replace(config, model=told.model, init_from=told.init_from, optim=replace(config.optim, steps=1))
    train(config)
    (loss,) = [line["loss"] for line in read_metrics(config.out_dir / METRICS) if line["kind"] == "step"]
    sequences = TokenSequences(config.data.train, 16)
    split = BatchSplit.of(config.data, ParallelConfig(dp=1, micro_batches=1))
    batch = Batches(sequences, split, 0, config.seed).step(0)
    with torch.no_grad():
        logits = theirs(batch.ids).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    assert abs(loss - float(wanted)) < 1e-5


@pytest.mark.parametrize("name", ["llama, tied, biases", "gpt2, untied"])
def test_out_and_in_again_is_the_same_to_the_bit_whatever_the_files(tmp_path: Path, name: str) -> None:
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
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_gpt2_as_it_was_published_is_read(tmp_path: Path) -> None:
    """Its file has names without "transformer.", and the causal masks."""
    theirs = build_theirs("gpt2", tmp_path / "hf")
    stored = safetensors.torch.load_file(tmp_path / "hf/model.safetensors")
    stored = {name.removeprefix("transformer."): value for name, value in stored.items()}
    stored |= {f"h.{i}.attn.bias": torch.ones(1, 1, 12, 12).tril() for i in range(2)}
    safetensors.torch.save_file(stored, tmp_path / "hf/model.safetensors")
    import_hf(tmp_path / "hf", tmp_path / "start")
    with torch.no_grad():
        assert (load_ours(tmp_path / "start")(ids()) - theirs(ids()).logits).abs().max() < 1e-5


def test_a_half_precision_file_is_read_into_float32(tmp_path: Path) -> None:
    torch.manual_seed(4)
    THEIRS["llama"]().bfloat16().save_pretrained(tmp_path / "hf", max_shard_size="10KB")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    import_hf(tmp_path / "hf", tmp_path / "start")
    with torch.no_grad():
        assert (load_ours(tmp_path / "start")(ids()) - theirs(ids()).logits).abs().max() < 1e-5


def test_the_tokenizer_goes_along_both_ways(tmp_path: Path) -> None:
    tokens, content = tmp_path / "tokens", b"a SentencePiece model"
    tokens.mkdir()
    (tokens / "grain.model").write_bytes(content)
    record = TokenizerRecord("grain.model", hashlib.sha256(content).hexdigest(), 50, END)
    run = save(build(MODELS["llama"]), tmp_path / "run", record)
    export_hf(run, tmp_path / "hf", tokens)
    assert (tmp_path / "hf/tokenizer.model").read_bytes() == content
    import_hf(tmp_path / "hf", tmp_path / "start")
    assert (tmp_path / "start/tokenizer.model").read_bytes() == content
    with alone() as peers:
        model = build(MODELS["llama"])
        found = load_model(tmp_path / "start", model_state(weights(model)), peers.world, print).tokenizer
    assert (found.path, found.sha256, found.end_of_document) == ("tokenizer.model", record.sha256, END)
    (tokens / "grain.model").write_bytes(b"another")
    with pytest.raises(UsageError, match="is not the tokenizer"):
        export_hf(run, tmp_path / "other", tokens)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run", "start", "tokens"]


def test_mixtures_have_no_form_and_it_is_said_why(tmp_path: Path) -> None:
    run = save(build(replace(SIZES, preset="gpt2", positions="rope", kv_heads=2)), tmp_path / "run")
    with pytest.raises(UsageError) as told:
        export_hf(run, tmp_path / "hf")
    assert "LlamaForCausalLM has norm 'rms' and not 'layer', mlp 'swiglu' and not 'gelu'" in str(told.value)
    assert "positions 'learned' and not 'rope', as many key heads as heads (4) and not 2" in str(told.value)
    assert not (tmp_path / "hf").exists()
    with pytest.raises(UsageError, match="bias True and not False"):
        form_of(replace(SIZES, preset="gpt2", bias=False).resolve(50, 12))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"model_type": "mistral"}, UsageError, "model_type is 'mistral'; wanted one of llama, gpt2"),
        ({"hidden_act": "gelu"}, UsageError, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, UsageError, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, UsageError, "rope_scaling"),
        ({"attention_bias": True, "mlp_bias": False}, UsageError, "mlp_bias is False"),
        ({"head_dim": 8}, UsageError, "head_dim is 8"),
        ({"hidden_size": 32, "head_dim": 8}, InputError, "is of shape"),
        ({"hidden_size": "24"}, InputError, "its sizes make no model"),
        ({"num_attention_heads": 5}, InputError, "is not divisible by model.heads 5"),
        ({"num_hidden_layers": 3}, InputError, r"no model\.layers\.2.* \(9 missing, 0 too many\)"),
        ({"num_hidden_layers": 1}, InputError, r"which such a model has not \(0 missing, 9 too many\)"),
    ],
)
def test_what_ours_would_compute_otherwise_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[GristmillError], said: str
) -> None:
    build_theirs("llama", tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(error, match=said):
        import_hf(tmp_path / "hf", tmp_path / "start")
    assert not (tmp_path / "start").exists()


def test_wrong_folders_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="wanted a Hugging Face model's folder"):
        import_hf(tmp_path / "nowhere", tmp_path / "start")
    with pytest.raises(UsageError, match="wanted a checkpoint"):
        export_hf(tmp_path / "nowhere", tmp_path / "hf")
    build_theirs("gpt2", tmp_path / "hf")
    with pytest.raises(UsageError, match="give a new or empty folder"):
        export_hf(tmp_path / "nowhere", tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match="is damaged"):
        import_hf(tmp_path / "hf", tmp_path / "start")
    file.unlink()
    with pytest.raises(UsageError, match="wanted weights as safetensors"):
        import_hf(tmp_path / "hf", tmp_path / "start")
    (tmp_path / "hf/config.json").write_text("[")
    with pytest.raises(InputError, match="is damaged"):
        import_hf(tmp_path / "hf", tmp_path / "start")


def test_no_room_for_an_export_is_an_error(tmp_path: Path) -> None:
    run = save(build(MODELS["gpt2"]), tmp_path / "run")
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, room[1]))  # what a full disk is like
    try:
        with pytest.raises(OutputError, match="cannot write"):
            export_hf(run, tmp_path / "hf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    assert not (tmp_path / "hf").exists()
    export_hf(run, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]
