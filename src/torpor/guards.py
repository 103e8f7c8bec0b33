"""Computing with a sleeping module, and saving it past the sleeper, raises at once.

Hooks are set while something sleeps and taken away at the wake, so that an awake actor pays nothing.
They see what goes through `Module.__call__`, `Optimizer.step` and the `state_dict` methods; a function
that reads a sleeping tensor directly is beyond them, and reads zeros (`madvise`, `vmm`) or fails (`resize`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torpor.before import Before
from torpor.rules.base import Actor
from torpor.rules.megatron import ddp_modules
from torpor.rules.walk import plain

#: Called with the owner's name, its component and the operation; raises, or waits until it may go on.
Check = Callable[[str, str, str], None]


class Guards:
    """The hooks of one actor."""

    def __init__(self, actor: Actor, check: Check) -> None:
        self._actor = actor
        self._check = check
        self._handles: list[Any] = []
        self._suspended = False

    def arm(self, asleep: Mapping[int, str]) -> None:
        """Guard every module and optimizer that owns one of the sleeping storages.

        Args:
            asleep: component by `UntypedStorage._cdata`.
        """
        self.disarm()
        if not asleep:
            return
        for name, model in self._actor.models.items():
            self._guard_model(name, model, asleep)
        for name, optimizer in self._actor.optimizers.items():
            component = _first_asleep(_tensors_of(optimizer), asleep)
            if component is not None:
                self._guard_optimizer(name, optimizer, component)
        self._guard_methods(frozenset(asleep.values()))

    def disarm(self) -> None:
        """Take every hook away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let the sleeper itself walk through `state_dict()`; it reads shapes there, never contents."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def _raise_if_asleep(self, name: str, component: str, operation: str) -> None:
        if not self._suspended:
            self._check(name, component, operation)

    def _guard_model(self, name: str, model: nn.Module, asleep: Mapping[int, str]) -> None:
        root_component = None
        for path, module in model.named_modules():
            # not `module.buffers()`: Megatron-Core's data parallelism has a list of that name
            tensors = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
            component = _first_asleep(tensors, asleep)
            if component is None:
                continue
            root_component = root_component or component
            if module is not model:
                self._hook_forward(f"{name}.{path}", module, component)
        if root_component is not None:
            self._hook_forward(name, model, root_component)
            self._hook_state_dict(name, model, root_component)

    def _hook_forward(self, name: str, module: nn.Module, component: str) -> None:
        def refuse_forward(_module: nn.Module, _inputs: object) -> None:
            self._raise_if_asleep(name, component, "forward")

        self._handles.append(module.register_forward_pre_hook(refuse_forward, prepend=True))

    def _hook_state_dict(self, name: str, model: nn.Module, component: str) -> None:
        def refuse_saving(*_: object) -> None:
            self._raise_if_asleep(name, component, "state_dict")

        def refuse_loading(*_: object) -> None:
            self._raise_if_asleep(name, component, "load_state_dict")

        self._handles.append(model.register_state_dict_pre_hook(refuse_saving))  # type: ignore[no-untyped-call]
        self._handles.append(model.register_load_state_dict_pre_hook(refuse_loading))  # type: ignore[no-untyped-call]

    def _guard_optimizer(self, name: str, optimizer: torch.optim.Optimizer, component: str) -> None:
        doors: tuple[tuple[str, Callable[..., Any]], ...] = (
            ("step", optimizer.register_step_pre_hook),
            ("state_dict", optimizer.register_state_dict_pre_hook),
            ("load_state_dict", optimizer.register_load_state_dict_pre_hook),
        )
        for operation, register in doors:
            self._handles.append(register(self._refusal(name, [component], operation)))

    def _guard_methods(self, asleep: Collection[str]) -> None:
        """Objects without hooks of their own: Megatron-Core's optimizers and its data parallelism.

        An optimizer of theirs reads gradients and parameters before it steps the torch optimizers inside.
        """
        doors: list[tuple[str, Any, str, tuple[str, ...]]] = [
            (name, wrapper, operation, ("params", "adapters", "grads", "optimizer"))
            for name, wrapper in self._actor.wrappers.items()
            for operation in ("step", "state_dict", "load_state_dict", "reload_model_params")
        ]
        for name, ddp in ddp_modules(self._actor):
            doors.append((name, ddp, "zero_grad_buffer", ("grads",)))
            doors.append((name, ddp, "start_param_sync", ("params", "adapters")))
        for name, owner, operation, behind in doors:
            components = [component for component in behind if component in asleep]
            if components:
                self._handles.append(Before(owner, operation, self._refusal(name, components, operation)))

    def _refusal(self, name: str, components: Sequence[str], operation: str) -> Callable[..., None]:
        def refuse(*_: Any, **__: Any) -> None:
            for component in components:
                self._raise_if_asleep(name, component, operation)

        return refuse


def _first_asleep(tensors: list[torch.Tensor], asleep: Mapping[int, str]) -> str | None:
    for tensor in tensors:
        for _, part, why_left in plain("", tensor):
            component = None if why_left else asleep.get(part.untyped_storage()._cdata)
            if component is not None:
                return component
    return None


def _tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters first, then whatever tensors the state of each holds directly."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = [
        value
        for values in optimizer.state.values()
        if isinstance(values, dict)
        for value in values.values()
        if isinstance(value, torch.Tensor)
    ]
    return [*params, *state]
