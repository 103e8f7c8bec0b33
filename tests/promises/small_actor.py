"""The actor that the tests of the promises share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from zoo import bits

#: One weight of the small actor spans several pages, so that its sleep frees something.
WIDTH = 128


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
