"""What the user hands over as `extra`: tensors, modules and containers of them, each a component."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from torpor.errors import UsageError
from torpor.kinds import Role
from torpor.rules.base import Actor, Claim
from torpor.rules.torch_nn import claims_of
from torpor.rules.walk import Held, Place, claims_on, gradient, is_container, leaves, module_tensors

_OTHER = Role.OTHER


class TensorsRule:
    """Claims what is in `Actor.extra`; the component is the name it was handed over under.

    A `Parameter` is a `param` here too, a tensor that an optimizer of the actor steps is a `master`.
    """

    name = "tensors"

    def attach(self, actor: Actor) -> Callable[[], None]:
        """Check what was handed over.

        Raises:
            UsageError: something that holds no tensors, or is handed over elsewhere.
        """
        for component, value in actor.extra.items():
            if isinstance(value, torch.optim.Optimizer):
                raise UsageError(f"extra['{component}'] is an optimizer: hand it over as an optimizer", name=component)
            if not (isinstance(value, torch.Tensor | nn.Module) or is_container(value)):
                raise UsageError(
                    f"extra['{component}'] is a {type(value).__name__}: hand over tensors, modules, "
                    "or containers, dataclasses and namespaces of them",
                    name=component,
                )
        return lambda: None

    def claims(self, actor: Actor) -> Iterator[Claim]:
        stepped = {id(p) for o in actor.optimizers.values() for group in o.param_groups for p in group["params"]}
        for component, value in actor.extra.items():
            for name, leaf in leaves(component, value):
                if isinstance(leaf, torch.Tensor):
                    yield from claims_on(name, leaf, _role(leaf, stepped), component)
                    grad = gradient(leaf)
                    if grad is not None:
                        yield from claims_of(Held(Place.GRADIENT, f"{name}.grad", grad))
                elif isinstance(leaf, nn.Module):
                    for held in module_tensors(name, leaf):
                        yield from claims_of(held, component)


def _role(tensor: torch.Tensor, stepped: set[int]) -> Role:
    # most have the plain type: `isinstance` of a Parameter runs Python code of torch
    if type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter):
        return Role.PARAM
    return Role.MASTER if id(tensor) in stepped else _OTHER
