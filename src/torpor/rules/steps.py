"""Where an actor is in its training step: what rules ask who must not disturb the middle of one."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from torpor.rules.base import Actor


class StepWatch:
    """Sees what begins a step of one actor, and the steps of the optimizers that end it. Rules may share one.

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
        self._handles: list[RemovableHandle] = []
        self._users = 0

    @property
    def in_a_step(self) -> bool:
        """Something began a step and not every optimizer has stepped since."""
        return self._begun

    @property
    def after_a_step(self) -> bool:
        """Every optimizer has stepped and nothing began another step since."""
        return self._ended

    def attach(self, actor: Actor) -> Callable[[], None]:
        """Start watching, or go on; the last undo forgets what was seen."""
        if not self._users:
            self._watch(actor)
        self._users += 1

        def undo() -> None:
            self._users -= 1
            if not self._users:
                self._forget()

        return undo

    def _watch(self, actor: Actor) -> None:
        self._awaited = WeakSet(o for o in actor.optimizers.values() if any(g["params"] for g in o.param_groups))
        self._handles += [optimizer.register_step_post_hook(self._on_step) for optimizer in self._awaited]
        for model in actor.models.values():
            if isinstance(model._modules.get("module"), nn.Module):
                self._handles.append(model.register_forward_pre_hook(self._on_forward, prepend=True))
            trained = [p for p in model.parameters() if p.requires_grad and p.is_leaf]
            self._handles += [p.register_post_accumulate_grad_hook(self._on_gradient) for p in trained]  # type: ignore[no-untyped-call]

    def _forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._begun = self._ended = False
        self._stepped.clear()

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
