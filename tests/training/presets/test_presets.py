"""Published models by name have the published numbers of parameters."""

import re
from pathlib import Path

import pytest

from gristmill.config import load_config
from gristmill.errors import UsageError
from training.model.decoder import active_parameters, meta_decoder
from training.model.model_config import ModelConfig
from training.parallel.parameter_shapes import stage_parameters
from training.presets.presets import PRESETS

DOCS = Path(__file__).parents[3] / "docs/guides/models.md"
PUBLISHED = [name for name, preset in PRESETS.items() if preset.parameters]


def parameters(name: str) -> int:
    return sum(p.numel() for p in meta_decoder(ModelConfig(preset=name).resolve(1, 1)).parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_the_published_number_of_parameters(name: str) -> None:
    published, count = PRESETS[name].parameters, parameters(name)
    assert abs(count - published) < published / 100 + PRESETS[name].rounded_to / 2
    model = ModelConfig(preset=name).resolve(1, 1)
    assert sum(p.numel for p in stage_parameters(model, range(model.layers), first=True, last=True)) == count
    row = f"| `{name}` | {count:,} | {published:,} | {count / published:.4f} | {PRESETS[name].source} |"
    assert row in DOCS.read_text().splitlines(), f"docs/guides/models.md lacks the row {row}"


@pytest.mark.parametrize("name", [name for name in PUBLISHED if PRESETS[name].active])
def test_a_sparse_model_uses_the_published_number_of_parameters_for_a_token(name: str) -> None:
    model = ModelConfig(preset=name).resolve(1, 1)
    published, count = PRESETS[name].active, active_parameters(meta_decoder(model))
    count -= model.vocab_size * model.width if PRESETS[name].active_of == "all but the embedding" else 0
    assert abs(count - published) < published / 100 + 10**8 / 2
    row = f"| {name} | {count:,} | {published:,} | {count / published:.4f} |"
    assert row in DOCS.read_text().splitlines(), f"docs/guides/models.md lacks the row {row}"


def test_the_documentation_has_no_other_presets() -> None:
    assert re.findall(r"^\| `(.*?)` \| [\d,]+ \|", DOCS.read_text(), re.MULTILINE) == PUBLISHED


def test_options_beside_a_preset_take_the_place_of_its_values() -> None:
    model = load_config(ModelConfig, ["--preset", "gpt2-124m", "--layers", "2", "--vocab_size", "60000"]).resolve(9, 8)
    assert (model.layers, model.width, model.heads, model.vocab_size, model.context) == (2, 768, 12, 60_000, 1024)


@pytest.mark.parametrize(
    ("name", "said"),
    [("gpt2-124", "did you mean gpt2-124m?"), ("Lama", "did you mean llama?"), ("%", "expected one of llama, gpt2")],
)
def test_an_unknown_preset_names_the_most_similar(name: str, said: str) -> None:
    with pytest.raises(UsageError) as told:
        ModelConfig(preset=name).resolve(9, 8)
    assert f"model.preset is {name!r}, but there is no such preset; {said}" in str(told.value)


def test_a_tokenizer_or_sequence_that_does_not_fit_a_published_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"model.vocab_size 50257 is below the tokenizer's 60000"):
        ModelConfig(preset="gpt2-124m").resolve(60_000, 8)
    with pytest.raises(UsageError, match=r"model.context 1024 is below data.seq_len 2048"):
        ModelConfig(preset="gpt2-124m").resolve(50_257, 2048)
