"""What `torch.nn.Module` holds: parameters, gradients, buffers, and plain attributes that hold tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torpor.kinds import Role
from torpor.rules.base import Actor, Claim, Standing
from torpor.rules.walk import Held, Place, claims_on, module_tensors

_KNOWN = Standing.KNOWN
_FOUND = Standing.FOUND
_MEANING: dict[Place, tuple[Role, str, Standing]] = {
    Place.PARAMETER: (Role.PARAM, "params", _KNOWN),
    Place.BUFFER: (Role.BUFFER, "buffers", _KNOWN),
    Place.SCRATCH: (Role.BUFFER, "buffers", _FOUND),
    Place.ATTRIBUTE: (Role.OTHER, "buffers", _FOUND),
    Place.GRADIENT: (Role.GRAD, "grads", _FOUND),
}
_MAIN_GRAD = ".main_grad"


class TorchNNRule:
    """Claims every tensor that the actor's modules reach.

    A non-persistent buffer, a plain attribute and a gradient are claimed by their place only: the user's
    `derived` may say that they can be dropped or rebuilt, the optimizer's rule that a gradient is dead.
    """

    name = "torch_nn"

    def attach(self, actor: Actor) -> Callable[[], None]:
        return lambda: None

    def claims(self, actor: Actor) -> Iterator[Claim]:
        for name, model in actor.models.items():
            for held in module_tensors(name, model):
                yield from claims_of(held)


def claims_of(held: Held, component: str | None = None) -> Iterable[Claim]:
    """The claims on one tensor of a module; `component` in place of the usual one, gradients excepted."""
    role, usual, standing = _MEANING[held.place]
    if held.place is Place.ATTRIBUTE and held.name.endswith(_MAIN_GRAD):
        role, usual = Role.GRAD, "grads"
    home = usual if component is None or role is Role.GRAD else component
    return claims_on(held.name, held.tensor, role, home, standing=standing)
