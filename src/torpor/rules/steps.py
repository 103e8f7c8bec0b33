"""Where an actor is in its training step: what rules ask who must not disturb the middle of one."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

import torch
from torch import nn

from torpor.rules.base import Actor


class StepWatch:
    """Sees what begins a step, and the steps of the optimizers that end it.

    A step begins with the first gradient that reaches a parameter, or with the first forward of a wrapped model
    (Megatron-Core's or torch's data parallelism) in which gradients are enabled. It ends when every optimizer of
    the actor has stepped. Modules that are not wrapped get no hook: TransformerEngine captures none that has one.
    Where a CUDA graph replays a whole iteration nothing of it is seen: ask who captured it.
    """

    def __init__(self) -> None:
        self._begun = False
        self._ended = False
        self._awaited: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._stepped: WeakSet[torch.optim.Optimizer] = WeakSet()

    @property
    def in_a_step(self) -> bool:
        """Something began a step and not every optimizer has stepped since."""
        return self._begun

    @property
    def after_a_step(self) -> bool:
        """Every optimizer has stepped and nothing began another step since."""
        return self._ended

    def attach(self, actor: Actor) -> Callable[[], None]:
        """Start watching; the undo forgets what was seen."""
        self._awaited = WeakSet(o for o in actor.optimizers.values() if any(g["params"] for g in o.param_groups))
        handles = [optimizer.register_step_post_hook(self._on_step) for optimizer in self._awaited]
        for model in actor.models.values():
            if isinstance(model._modules.get("module"), nn.Module):
                handles.append(model.register_forward_pre_hook(self._on_forward, prepend=True))
            trained = [p for p in model.parameters() if p.requires_grad and p.is_leaf]
            handles += [p.register_post_accumulate_grad_hook(self._on_gradient) for p in trained]  # type: ignore[no-untyped-call]

        def undo() -> None:
            for handle in handles:
                handle.remove()
            self._begun = self._ended = False
            self._stepped.clear()

        return undo

    def _on_forward(self, module: nn.Module, inputs: object) -> None:
        if torch.is_grad_enabled():
            self._begin()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._begin()

    def _begin(self) -> None:
        if not self._begun:
            self._begun, self._ended = True, False
            self._stepped.clear()

    def _on_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._stepped.add(optimizer)
        if len(self._stepped) == len(self._awaited):
            self._begun, self._ended = False, True
            self._stepped.clear()
