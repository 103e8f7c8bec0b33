"""Where an actor is in its training step: what rules ask who must not disturb the middle of one."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

import torch
from torch import nn

from torpor.rules.base import Actor


class StepWatch:
    """Sees forwards that gradients will follow, and the steps of the optimizers that end what those began.

    A step begins with the first forward in which gradients are enabled and ends when every optimizer of the
    actor has stepped. The hook sits on the innermost wrapped module of each model, so it is seen whichever
    wrapper is called. Where a CUDA graph replays a whole iteration no forward is seen: ask who captured it.
    """

    def __init__(self) -> None:
        self._begun = False
        self._ended = False
        self._awaited: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._stepped: WeakSet[torch.optim.Optimizer] = WeakSet()

    @property
    def in_a_step(self) -> bool:
        """A forward with gradients has run and not every optimizer has stepped since."""
        return self._begun

    @property
    def after_a_step(self) -> bool:
        """Every optimizer has stepped and no forward with gradients has run since."""
        return self._ended

    def attach(self, actor: Actor) -> Callable[[], None]:
        """Start watching; the undo forgets what was seen."""
        self._awaited = WeakSet(o for o in actor.optimizers.values() if any(g["params"] for g in o.param_groups))
        handles = [
            innermost(model).register_forward_pre_hook(self._on_forward, prepend=True)
            for model in actor.models.values()
        ]
        handles += [optimizer.register_step_post_hook(self._on_step) for optimizer in self._awaited]

        def undo() -> None:
            for handle in handles:
                handle.remove()
            self._begun = self._ended = False
            self._stepped.clear()

        return undo

    def _on_forward(self, module: nn.Module, inputs: object) -> None:
        if torch.is_grad_enabled() and not self._begun:
            self._begun, self._ended = True, False
            self._stepped.clear()

    def _on_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._stepped.add(optimizer)
        if len(self._stepped) == len(self._awaited):
            self._begun, self._ended = False, True
            self._stepped.clear()


def innermost(model: nn.Module) -> nn.Module:
    """What data parallelism and precision wrappers, which call it `module`, are wrapped around."""
    while isinstance(inner := model._modules.get("module"), nn.Module):
        model = inner
    return model
