"""Logits and every gradient of imported models equal transformers', in float64."""

from pathlib import Path

import pytest
import torch

from tests.training.hf_models import THEIRS, build_theirs, ids, load_ours
from training.hugging_face.families import FAMILIES
from training.hugging_face.hf_tensors import hf_tensors
from training.hugging_face.import_hf import import_hf

# transformers computes in float32: Llama's norms and rotary angles, GPT-NeoX's angles, BLOOM's softmax
LIMITS = {"llama": 1e-5, "gpt_neox": 1e-5, "bloom": 1e-5}


@pytest.mark.parametrize("name", THEIRS)
def test_logits_and_gradients_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model_type = name.partition(",")[0]
    theirs = build_theirs(name, tmp_path / "hf").double()
    import_hf(tmp_path / "hf", tmp_path / "start")
    ours = load_ours(tmp_path / "start").double()
    limit = LIMITS.get(model_type, 1e-12)
    with torch.no_grad():
        logits, expected = ours(ids()), theirs(ids()).logits
    assert (logits - expected).abs().max() < limit * expected.abs().max()
    targets = ids().roll(-1, 1)
    ours(ids(), targets).sum().backward()
    torch.nn.functional.cross_entropy(theirs(ids()).logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    gradients = {parameter: values.grad for parameter, values in ours.named_parameters()}
    compared, largest = 0, max(float(grad.abs().max()) for grad in gradients.values() if grad is not None)
    for tensor in hf_tensors(FAMILIES[model_type], ours.config):
        head = tensor.name == FAMILIES[model_type].head  # transformers 5 has another name for GPT-NeoX's, but in files
        grad = (theirs.get_output_embeddings().weight if head else theirs.get_parameter(tensor.name)).grad
        assert isinstance(grad, torch.Tensor)
        for parameter, expected in tensor.parameters_of(grad).items():
            found = gradients[parameter]
            assert found is not None and (found - expected).abs().max() <= limit * largest, parameter
            compared += 1
    assert compared == len(gradients)
