"""What the tests of the promises share: a small actor, and its bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from torpor import Sleeper

#: One weight of the small actor spans several pages, so that its sleep frees something.
WIDTH = 128


def bits(tensor: torch.Tensor) -> bytes:
    """The contents of a tensor, any dtype or stride, NaN included. `numpy()` sees a copy: it locks a storage's size."""
    return tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class SmallActor:
    """A two-layer model with a buffer that is in no state dict, and its optimizer."""

    def __init__(self, make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.model.register_buffer("scratch", torch.rand(5000), persistent=False)
        params = list(self.model.parameters())
        self.optimizer = make_optimizer(params) if make_optimizer else torch.optim.AdamW(params, lr=1e-2)

    def backward(self, k: int) -> float:
        loss = self.model(torch.full((4, WIDTH), 0.1 * (k + 1))).square().mean()
        loss.backward()
        return loss.item()

    def step(self, k: int) -> float:
        self.optimizer.zero_grad()
        loss = self.backward(k)
        self.optimizer.step()
        return loss

    def bits(self) -> list[bytes]:
        """Parameters, buffers and optimizer state, in a fixed order."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *state]
        return [bits(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]


@pytest.fixture
def actor() -> SmallActor:
    return SmallActor()


@pytest.fixture
def trained(actor: SmallActor) -> SmallActor:
    """The small actor after one step, its gradients still there."""
    actor.step(0)
    return actor


@pytest.fixture
def sleeper(trained: SmallActor, tmp_path: Path) -> Iterator[Sleeper]:
    """A sleeper over the trained actor, with the default file store; it has seen a step, so gradients are dead."""
    with Sleeper(trained.model, optimizer=trained.optimizer, store_dir=tmp_path) as made:
        trained.step(1)
        yield made
