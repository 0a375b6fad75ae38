"""Probabilities of tokens are those of transformers' processors of logits; the draws are those of the seed."""

import pytest
import torch
from torch import Tensor
from transformers.generation import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from training.generation.sampling import (
    SamplingOptions,
    draw_token,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
    text_generator,
)

SEEN = [3, 9, 3, 40]


def logits() -> Tensor:
    return 3 * torch.randn(50, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(0.7),
        SamplingOptions(1.3, top_k=5),
        SamplingOptions(0.9, top_p=0.6),
        SamplingOptions(1.0, top_p=1e-9),
        SamplingOptions(0.8, top_k=12, top_p=0.9, repetition_penalty=1.5),
        SamplingOptions(1.0, top_k=500, repetition_penalty=0.8),
    ],
)
def test_probabilities_are_those_of_transformers(options: SamplingOptions) -> None:
    theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(options.repetition_penalty)])
    theirs.append(TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        theirs.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        theirs.append(TopPLogitsWarper(options.top_p))
    expected = theirs(torch.tensor([SEEN]), logits()[None])[0].softmax(-1)
    found = penalize_repetition(logits(), SEEN, options.repetition_penalty) / options.temperature
    found = keep_top_p(keep_top_k(found, options.top_k), options.top_p).softmax(-1)
    torch.testing.assert_close(found, expected)
    draws = [draw_token(logits(), SEEN, options, text_generator(1, number)) for number in range(300)]
    assert {int(token) for token in expected.nonzero()} >= {*draws}
    if expected.count_nonzero() > 3:
        assert len({*draws}) > 2


def test_the_most_probable_token_needs_no_random_number() -> None:
    generator = text_generator(1, 0)
    before = generator.get_state()
    assert draw_token(logits(), SEEN, SamplingOptions(0.0), generator) == int(logits().argmax())
    assert draw_token(logits(), SEEN, SamplingOptions(1e-320), generator) == int(logits().argmax())
    assert torch.equal(generator.get_state(), before)


def test_frequencies_are_the_probabilities() -> None:
    values = torch.tensor([2.0, 1.0, 0.0, -torch.inf])
    generator = text_generator(5, 1)
    drawn = torch.tensor([draw_token(values, SEEN, SamplingOptions(1.0), generator) for _ in range(4000)])
    torch.testing.assert_close(drawn.bincount(minlength=4) / 4000, values.softmax(-1), atol=0.03, rtol=0)


def test_random_numbers_of_a_text_depend_on_seed_and_number() -> None:
    draws = {torch.rand(1, generator=text_generator(seed, number)).item() for seed in range(3) for number in range(3)}
    assert len(draws) == 9
