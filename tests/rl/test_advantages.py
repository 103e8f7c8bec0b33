"""Advantages within a group."""

from __future__ import annotations

import pytest
import torch

from torpor.rl.advantages import group_advantages


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
