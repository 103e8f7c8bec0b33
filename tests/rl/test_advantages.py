"""Advantages within a group, and over what a critic expected."""

from __future__ import annotations

import pytest
import torch

from torpor.rl.advantages import generalized_advantages, group_advantages


def test_centred_and_scaled_within_each_group() -> None:
    rewards = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    scaled = group_advantages(rewards, normalize_std=True)
    assert scaled.mean(dim=1).tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    assert scaled.std(dim=1, correction=0).tolist() == pytest.approx([1.0, 1.0], abs=1e-4)


def test_without_scaling_only_the_mean_goes() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    assert group_advantages(rewards, normalize_std=False).tolist() == [[0.75, -0.25, -0.25, -0.25]]


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.7])
@pytest.mark.parametrize("group_size", [3, 7, 8])
def test_equal_rewards_teach_exactly_nothing(normalize_std: bool, reward: float, group_size: int) -> None:
    rewards = torch.full((2, group_size), reward)
    assert not group_advantages(rewards, normalize_std=normalize_std).any()


def _written_out(rewards: list[float], values: list[float], discount: float, gae_lambda: float) -> list[float]:
    """The sum of the definition, term by term."""
    after = [*values[1:], 0.0]
    deltas = [r + discount * v_next - v for r, v, v_next in zip(rewards, values, after, strict=True)]
    return [
        sum((discount * gae_lambda) ** (later - token) * deltas[later] for later in range(token, len(deltas)))
        for token in range(len(deltas))
    ]


@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 0.95), (0.9, 0.5), (0.9, 0.0), (0.5, 1.0), (0.0, 0.7)])
def test_generalized_advantages_are_the_sum_written_out(discount: float, gae_lambda: float) -> None:
    generator = torch.Generator().manual_seed(2)
    rewards = torch.randn(9, generator=generator).tolist()
    values = torch.randn(9, generator=generator).tolist()
    found = generalized_advantages(rewards, values, discount=discount, gae_lambda=gae_lambda)
    assert found == pytest.approx(_written_out(rewards, values, discount, gae_lambda))


def test_the_ends_of_the_trade_off_are_what_they_are_called() -> None:
    rewards, values = [0.0, 0.0, 1.0], [0.3, 0.5, 0.6]
    to_the_end = generalized_advantages(rewards, values, discount=1.0, gae_lambda=1.0)
    assert to_the_end == pytest.approx([0.7, 0.5, 0.4])  # the reward to come less the value
    one_ahead = generalized_advantages(rewards, values, discount=1.0, gae_lambda=0.0)
    assert one_ahead == pytest.approx([0.2, 0.1, 0.4])  # the next value less this one
