"""From logits to tokens: the right frequencies, the right log-probabilities, nothing that was cut away."""

from __future__ import annotations

import pytest
import torch

from torpor.errors import UsageError
from torpor.rl.rollout import sampling as module
from torpor.rl.rollout.base import SamplingParams
from torpor.rl.rollout.sampling import sample, uniforms

NUM_DRAWS = 40_000


def _draws(logits: torch.Tensor, **options: float) -> tuple[torch.Tensor, torch.Tensor]:
    params = SamplingParams(max_new_tokens=1, seed=5, **options)
    return sample(logits.expand(NUM_DRAWS, -1), uniforms(params, NUM_DRAWS)[0], params)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_tokens_come_as_often_as_their_probability_says(temperature: float) -> None:
    logits = torch.tensor([1.0, -1.0, 0.3, 2.0, -9.0])
    tokens, logprobs = _draws(logits, temperature=temperature)
    expected = (logits / temperature).softmax(-1)
    share = tokens.bincount(minlength=5) / NUM_DRAWS
    # Five standard deviations of a share over NUM_DRAWS draws.
    assert ((share - expected).abs() < 5 * (expected * (1 - expected) / NUM_DRAWS).sqrt() + 1e-9).all()
    torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_top_k_keeps_the_k_most_probable_and_renormalises() -> None:
    logits = torch.tensor([1.0, -1.0, 0.3, 2.0])
    tokens, logprobs = _draws(logits, top_k=2)
    assert set(tokens.tolist()) == {0, 3}
    expected = torch.tensor([1.0, 2.0]).log_softmax(-1)
    torch.testing.assert_close(logprobs, torch.where(tokens == 0, expected[0], expected[1]))


@pytest.mark.parametrize(("top_p", "kept"), [(0.49, {3}), (0.51, {3, 0}), (0.81, {3, 0, 2}), (1.0, {3, 0, 2, 1})])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    probabilities = torch.tensor([0.3, 0.05, 0.15, 0.5])
    tokens, logprobs = _draws(probabilities.log(), top_p=top_p)
    assert set(tokens.tolist()) == kept
    total = sum(float(probabilities[token]) for token in kept)
    torch.testing.assert_close(logprobs.exp(), probabilities[tokens] / total)


def test_a_tiny_top_p_still_leaves_the_most_probable_token() -> None:
    tokens, logprobs = _draws(torch.tensor([0.0, 0.0, 1.0]), top_p=1e-9)
    assert set(tokens.tolist()) == {2}
    assert logprobs.abs().max() == 0


@pytest.mark.parametrize("noise", [0.0, 1 - 2**-24])
def test_a_token_without_probability_is_never_drawn(noise: float) -> None:
    """At both ends of the random numbers, over totals that rounding leaves above and below 1."""
    logits = torch.randn(500, 300, generator=torch.Generator().manual_seed(1)) * 3
    logits[:, :5] = logits[:, -5:] = -torch.inf
    totals = logits.log_softmax(-1).exp().cumsum(-1)[:, -1]
    assert totals.max() > 1 > totals.min()
    tokens, logprobs = sample(logits, torch.full((500,), noise), SamplingParams(max_new_tokens=1))
    assert tokens.min() >= 5
    assert tokens.max() < 295
    assert logprobs.isfinite().all()


def test_greedy_needs_no_noise_and_reports_the_model() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = sample(logits, torch.zeros(4), SamplingParams(max_new_tokens=1, temperature=0))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).max(-1).values)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(13, 50, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(max_new_tokens=1, top_p=0.9)
    noise = uniforms(params, 13)[0]
    whole = sample(logits, noise, params)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4 * 50 * 4)
    for a, b in zip(whole, sample(logits, noise, params), strict=True):
        assert torch.equal(a, b)


def test_noise_of_a_sequence_does_not_depend_on_the_length_of_others() -> None:
    short, long = (uniforms(SamplingParams(max_new_tokens=n, seed=3), 5) for n in (4, 9))
    assert torch.equal(short, long[:4])


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"num_samples": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
    ],
)
def test_parameters_that_cannot_be_are_refused_by_name(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        SamplingParams(**{"max_new_tokens": 1, **options})
