"""Models and files that cannot be converted are refused with a reason."""

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from gristmill.errors import GristmillError, InputError, OutputError, UsageError
from tests.training.hf_models import MODELS, SIZES, build, build_theirs, save
from training.hugging_face.export_hf import export_hf
from training.hugging_face.hf_config import find_family
from training.hugging_face.import_hf import import_hf


def test_a_mixture_of_parts_cannot_be_exported(tmp_path: Path) -> None:
    run = save(build(replace(SIZES, preset="gpt2", positions="rope", kv_heads=2)), tmp_path / "run")
    with pytest.raises(UsageError) as told:
        export_hf(run, tmp_path / "hf")
    assert "LlamaForCausalLM has norm 'rms' and not 'layer', mlp 'swiglu' and not 'gelu'" in str(told.value)
    assert "GPT2LMHeadModel has kv_heads 4 and not 2, positions 'learned' and not 'rope'" in str(told.value)
    assert str(told.value).count("ForCausalLM has ") == 2  # the nearest three of thirteen
    assert not (tmp_path / "hf").exists()
    with pytest.raises(UsageError, match="bias True and not False"):
        find_family(replace(SIZES, preset="gpt2", bias=False).resolve(50, 12))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"model_type": "mamba"}, UsageError, "model_type is 'mamba'; expected one of llama, "),
        (
            {"logit_scale": 0.5},
            UsageError,
            "its logit_scale is 0.5, a field that is not known for llama",
        ),
        ({"hidden_act": "gelu"}, UsageError, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, UsageError, "rope_type is 'dynamic'; our model imple"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1}}, UsageError, "rope_scaling has mscale 1"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, InputError, r"model.rope_factor is 1.0 and"),
        ({"rms_norm_eps": 0.0}, InputError, r"model.norm_eps is 0.0; expected more than 0"),
        ({"attention_bias": True}, InputError, "no model.layers.0.self_attn.k_proj.bias"),
        ({"head_dim": 8}, InputError, "has shape"),
        ({"hidden_size": 32, "head_dim": 8}, InputError, "has shape"),
        ({"hidden_size": "24"}, InputError, "its sizes do not fit together"),
        ({"num_hidden_layers": 2.5}, InputError, "its sizes do not fit together"),
        ({"rms_norm_eps": "x"}, InputError, "its sizes do not fit together"),
        ({"tie_word_embeddings": "yes"}, InputError, "its sizes do not fit together"),
        ({"rms_norm_eps": -1.0}, InputError, "model.norm_eps is -1.0; expected 0 or more"),
        ({"rope_parameters": [1]}, UsageError, "rope_parameters is"),
        ({"model_type": ["llama"]}, UsageError, "model_type is"),
        ({"num_attention_heads": 5}, InputError, "model.heads 5 is not divisible by model.kv_heads 4"),
        ({"num_hidden_layers": 3}, InputError, r"no model\.layers\.2.* \(9 missing, 0 too many\)"),
        ({"num_hidden_layers": 1}, InputError, r"which this model does not have \(0 missing, 9 too many\)"),
    ],
)
def test_unsupported_options_and_sizes_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[GristmillError], said: str
) -> None:
    build_theirs("llama", tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(error, match=said):
        import_hf(tmp_path / "hf", tmp_path / "start")
    assert not (tmp_path / "start").exists()


def test_missing_or_damaged_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected the folder of a Hugging Face model"):
        import_hf(tmp_path / "nowhere", tmp_path / "start")
    with pytest.raises(UsageError, match="expected a checkpoint"):
        export_hf(tmp_path / "nowhere", tmp_path / "hf")
    build_theirs("gpt2", tmp_path / "hf")
    with pytest.raises(UsageError, match="give a new or empty folder"):
        export_hf(tmp_path / "nowhere", tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match="is damaged"):
        import_hf(tmp_path / "hf", tmp_path / "start")
    file.unlink()
    with pytest.raises(UsageError, match="expected weights as safetensors"):
        import_hf(tmp_path / "hf", tmp_path / "start")
    for text in ("[", "[" * 100_000):
        (tmp_path / "hf/config.json").write_text(text)
        with pytest.raises(InputError, match="is damaged"):
            import_hf(tmp_path / "hf", tmp_path / "start")


@pytest.mark.parametrize("text", ['{"weight_map": []}', '{"weight_map": {"a": 1}}', "{}"])
def test_a_damaged_index_of_weights_is_an_error(tmp_path: Path, text: str) -> None:
    build_theirs("gpt2", tmp_path / "hf")
    (tmp_path / "hf/model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match="its weight_map names no files"):
        import_hf(tmp_path / "hf", tmp_path / "start")


def test_weights_that_are_codes_are_refused(tmp_path: Path) -> None:
    build_theirs("llama", tmp_path / "hf")
    tensors = safetensors.torch.load_file(path := tmp_path / "hf/model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(torch.int8)
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(UsageError, match=r"up_proj.weight holds torch.int8; expected float weights"):
        import_hf(tmp_path / "hf", tmp_path / "start")


def test_a_full_disk_during_export_is_an_error(tmp_path: Path) -> None:
    run = save(build(MODELS["gpt2"]), tmp_path / "run")
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, room[1]))  # what a full disk is like
    try:
        with pytest.raises(OutputError, match="cannot write"):
            export_hf(run, tmp_path / "hf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "what was written fills the disk on"
    export_hf(run, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


def test_memory_for_a_file_of_weights_is_asked_for_before_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save(build(MODELS["llama"]), tmp_path / "run")
    monkeypatch.setattr("training.hugging_face.export_hf.free_memory", lambda: 20 << 10)
    with pytest.raises(
        UsageError, match=r"largest file of weights needs .* GiB, .* GiB free: try a smaller --shard_size"
    ):
        export_hf(run, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    export_hf(run, tmp_path / "hf", shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
