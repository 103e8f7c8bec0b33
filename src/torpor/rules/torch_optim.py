"""What `torch.optim.Optimizer` holds: state, masters, tensor options; and which gradients are dead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch

from torpor.kinds import Fate, Role
from torpor.rules.base import Actor, Claim
from torpor.rules.walk import (
    claims_on,
    gradient,
    is_dtensor,
    is_plain,
    key_suffix,
    leaves,
    parameter_names,
    plain,
)

_FIELDS = frozenset({"state", "param_groups"})
_COMPONENT = "optimizer"
_DECOUPLED = ".decoupled_grad"
"""Where an optimizer of TransformerEngine or Megatron-Core looks for a gradient of another dtype than its parameter."""
_HOOKS = "_optimizer_step_post_hooks"
_DEAD = "dead: optimizer.step() has consumed it and nothing was accumulated since"
_ACCUMULATING = "in the middle of an accumulation"
_NO_STEP = "no step was seen"
_ASKED_TO_KEEP = "dead_grads_after_step is off"
_NOT_PLAIN = "a gradient of this kind is not zero when its memory is"


class TorchOptimRule:
    """Claims the state of the actor's optimizers and the gradients of what they step. Creates no state.

    A gradient is `zeroed` when every optimizer of the actor that has its parameter has stepped, and it is the
    same tensor at the same version as then. Versions count what torch writes; a raw kernel or a write
    through `.data` into a gradient between `step()` and a sleep is not seen.
    """

    name = "torch_optim"

    def __init__(self, *, dead_grads_after_step: bool = True) -> None:
        """
        Args:
            dead_grads_after_step: whether gradients may be given up after a step. Turn it off for a loop that
                reads gradients after a sleep, or accumulates into them without `zero_grad()`.
        """
        self._dead_grads_after_step = dead_grads_after_step
        self._steps: WeakKeyDictionary[torch.optim.Optimizer, _Step] = WeakKeyDictionary()

    def attach(self, actor: Actor) -> Callable[[], None]:
        """Watch the steps of the optimizers; the undo forgets what was seen."""
        handles = [o.register_step_post_hook(self._on_step) for _, o in _optimizers(actor)]

        def undo() -> None:
            for handle in handles:
                handle.remove()
            self._steps.clear()

        return undo

    def claims(self, actor: Actor) -> Iterator[Claim]:
        if not actor.optimizers:
            return
        names = parameter_names(actor.models)
        in_models = frozenset(names)
        optimizers = list(_optimizers(actor))
        for name, optimizer in optimizers:
            for position, parameter in _parameters(optimizer):
                names.setdefault(id(parameter), name + position)
        for name, optimizer in optimizers:
            yield from _state(name, optimizer, names)
            yield from _masters(optimizer, names, in_models)
            yield from self._gradients(optimizer, names)

    def _on_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._steps[optimizer] = _Step(optimizer)

    def _gradients(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[Claim]:
        step = self._steps.get(optimizer)
        for _, parameter in _parameters(optimizer):
            grad = gradient(parameter)
            if grad is not None:
                fate, reason = self._judge(grad, step)
                yield from claims_on(f"{names[id(parameter)]}.grad", grad, Role.GRAD, "grads", fate, reason)

    def _judge(self, grad: torch.Tensor, step: _Step | None) -> tuple[Fate, str]:
        if not self._dead_grads_after_step:
            return Fate.MOVED, _ASKED_TO_KEEP
        if step is None:
            return Fate.MOVED, _NO_STEP
        if not step.consumed(grad):
            return Fate.MOVED, _ACCUMULATING
        return (Fate.ZEROED, _DEAD) if is_plain(grad) or is_dtensor(grad) else (Fate.MOVED, _NOT_PLAIN)


_Versions: TypeAlias = tuple[int, ...]


class _Step:
    """The gradients that one step read: which tensors, at which versions. Holds none of them alive."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._seen: dict[int, tuple[ReferenceType[torch.Tensor], _Versions | None]] = {}
        for _, parameter in _parameters(optimizer):
            grad = parameter.grad
            if grad is not None:
                self._seen[id(grad)] = ref(grad), _versions(grad)

    def consumed(self, grad: torch.Tensor) -> bool:
        """Whether the step read this tensor and nothing wrote to it since."""
        seen = self._seen.get(id(grad))
        if seen is None or seen[0]() is not grad:
            return False
        return seen[1] is not None and seen[1] == _versions(grad)


def _versions(tensor: torch.Tensor) -> _Versions | None:
    """What changes when torch writes to `tensor`, or to what a subclass holds; None if nothing tells."""
    if tensor.is_inference():
        return None
    if is_plain(tensor):
        return (tensor._version,)
    return tensor._version, *(part._version for _, part, _ in plain("", tensor) if part is not tensor)


def _optimizers(actor: Actor) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """The actor's optimizers and those they wrap, each once.

    A proxy that never ran `Optimizer.__init__` (accelerate's) has neither hooks nor state of its own: it is
    passed over for what it wraps.
    """
    pending = list(actor.optimizers.items())[::-1]
    seen: set[int] = set()
    while pending:
        name, optimizer = pending.pop()
        if id(optimizer) in seen:
            continue
        seen.add(id(optimizer))
        if _HOOKS in vars(optimizer):
            yield name, optimizer
        for inner_name, leaf in _other_leaves(name, optimizer):
            if isinstance(leaf, torch.optim.Optimizer):
                pending.append((inner_name, leaf))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            yield f".param_groups[{i}].params[{j}]", parameter


def _other_leaves(name: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, object]]:
    """Leaves outside the state and the parameters: options (a tensor `lr`), attributes."""
    for i, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        yield from leaves(f"{name}.param_groups[{i}]", options)
    attributes = {key: value for key, value in vars(optimizer).items() if key not in _FIELDS}
    yield from leaves(name, attributes)


def _state(name: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[Claim]:
    for index, (key, value) in enumerate(optimizer.state.items()):
        suffix = f"[{names[id(key)]}]" if id(key) in names else key_suffix(key, index)
        yield from _moments(leaves(f"{name}.state{suffix}", value), Role.MOMENT)
    yield from _moments(_other_leaves(name, optimizer), Role.OTHER, skip=names)


def _moments(found: Iterator[tuple[str, object]], role: Role, skip: Mapping[int, str] | None = None) -> Iterator[Claim]:
    for name, leaf in found:
        if isinstance(leaf, torch.Tensor) and not (skip and id(leaf) in skip):
            if name.endswith(_DECOUPLED):
                yield from claims_on(name, leaf, Role.GRAD, "grads")
            else:
                yield from claims_on(name, leaf, role, _COMPONENT)


def _masters(optimizer: torch.optim.Optimizer, names: Mapping[int, str], in_models: frozenset[int]) -> Iterator[Claim]:
    for _, parameter in _parameters(optimizer):
        if id(parameter) not in in_models:
            yield from claims_on(names[id(parameter)], parameter, Role.MASTER, _COMPONENT)
