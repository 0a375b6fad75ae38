from itertools import pairwise
from typing import Any

import pytest
import torch

from training.model.attention_mask import Mask
from training.model.decoder import Decoder, meta_decoder
from training.model.documents import Documents
from training.model.model_config import ModelConfig
from training.model.positions import Alibi

POSITIONS = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 0, 1, 2, 0]])


BIAS = Alibi(ModelConfig(heads=4))(torch.zeros(1, 8, 1).double())
SIZES = {"layers": 2, "width": 32, "heads": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2},
    "window": {"window": 2},
    "alibi": {"positions": "alibi"},
    "gpt2": {"preset": "gpt2"},
    "offset": {"preset": "gpt2", "position_offset": 2},
    "query layer": {"preset": "gpt2", "query_layer": True},
}


def decoder(variant: str, **changes: Any) -> Decoder:
    torch.manual_seed(1)
    return Decoder(ModelConfig(**SIZES, **VARIANTS[variant], **changes).resolve(60, 8)).double()


def test_documents_are_found_where_positions_restart() -> None:
    documents = Documents.of(POSITIONS)
    assert documents.bounds is not None and documents.bounds.dtype == torch.int32
    assert documents.bounds.tolist() == [0, 3, 4, 8, 16, 17, 18, 20, 23, 24]
    windowed = Documents.of(torch.tensor([[5, 6, 0], [2, 3, 4]]))  # a sequence may start within a document
    assert windowed.bounds is not None and windowed.bounds.tolist() == [0, 2, 3, 6]


@pytest.mark.parametrize("window", [0, 3])
def test_a_token_sees_those_before_it_in_its_document(window: int) -> None:
    hidden = Mask(window, documents=Documents.of(POSITIONS)).hidden(8, POSITIONS.device)
    for row, positions in enumerate(POSITIONS.tolist()):
        for query in range(8):
            first = query - min(positions[query], window - 1 if window else query)
            assert (~hidden[row, 0, query]).nonzero().flatten().tolist() == list(range(first, query + 1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_each_document_alone(variant: str) -> None:
    model, ids = (
        decoder(variant, init_std=0.2),
        torch.randint(60, POSITIONS.shape, generator=torch.Generator().manual_seed(1)),
    )
    together, bounds = model(ids, positions=POSITIONS).flatten(0, 1), Documents.of(POSITIONS).bounds
    assert bounds is not None
    alone = [model(ids.flatten()[None, start:stop])[0] for start, stop in pairwise(bounds.tolist())]
    assert torch.allclose(together, torch.cat(alone), rtol=0, atol=1e-12)
    assert not torch.allclose(together, model(ids).flatten(0, 1), atol=1e-3)


@pytest.mark.parametrize("mask", [Mask(), Mask(window=3), Mask(bias=BIAS)])
def test_a_mask_in_memory_computes_the_same(mask: Mask) -> None:
    q, k, v = (torch.randn(1, heads, 24, 8, dtype=torch.float64) for heads in (4, 2, 2))
    documents = Documents.of(POSITIONS)
    split, masked = (mask._replace(documents=d).attend(q, k, v) for d in (documents, documents._replace(bounds=None)))
    assert torch.allclose(split, masked, rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", ["llama", "window", "alibi", "offset"])
def test_dropout_leaves_documents_apart(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = decoder(variant, dropout=0.3, init_std=0.2), torch.zeros(POSITIONS.shape, dtype=torch.int64)
    monkeypatch.setattr("training.model.dropout.Dropout.forward", lambda self, x, sample_ids: x)
    with_weights_in_memory = model(ids, sample_ids=torch.arange(3), positions=POSITIONS)
    assert torch.allclose(with_weights_in_memory, model.eval()(ids, positions=POSITIONS), rtol=0, atol=1e-12)


def test_shapes_are_inferred_without_values() -> None:
    model = meta_decoder(decoder("llama").config)
    assert model(POSITIONS.to("meta"), positions=POSITIONS.to("meta")).shape == (3, 8, 60)
