"""What a rule is: it names the storages of one library's state, and the cheapest fate that is safe for each.

A rule never copies and never frees. It looks at an `Actor`, yields `Claim`s, and gives each the fate that
loses nothing. Where several claims meet on one storage the inventory takes the most careful one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import torch

from torpor.kinds import Fate, Role, plain_members


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition for a cheap fate. Closed, the fate is `moved`, and the ledger gives the reason.

    Example: `Gate(lambda: not captured(), "a CUDA graph was captured: a replay reads the old address")`.
    """

    is_open: Callable[[], bool]
    reason_when_closed: str


@dataclass(frozen=True, slots=True)
class Rebuild:
    """How to compute a storage again, bit for bit, from tensors that are themselves asleep or awake.

    `fn(out, *sources)` writes into `out` (the claimed tensor, or a host copy of the same shape, stride and
    dtype while it is read asleep) and must use nothing but `sources`, which come in the same way.
    """

    fn: Callable[..., None]
    sources: tuple[torch.Tensor, ...]
    agree: Callable[[bool], bool] = bool
    """Whether a rebuild that gave the right bits here did so on every rank that takes part in `fn`."""
    refresh: Callable[..., None] | None = None
    """`refresh(*sources)` computes the contents anew before they are given up, where what is out of date now is dead.
    Several rebuilds of the same sources may share one."""
    narrow: Callable[[int, int], Rebuild] | None = None
    """`narrow(begin, end)` rebuilds those elements of `out` alone, for reading one of many tensors in it."""


@plain_members
class Standing(IntEnum):
    """How much the author of a claim knows, from the weakest to the strongest.

    Example: a module's plain attribute `scale` is `FOUND`; if the user declared that attribute with
    `torpor.derived`, the `DECLARED` claim decides and the found one has no say.
    """

    FOUND = 0
    """Only where the tensor hangs (a plain attribute, a `.grad`). Has a say in the fate unless the storage is
    declared or owned, or a rule that knows the same role claims it."""
    KNOWN = 1
    """What the tensor is: a parameter, a registered buffer, optimizer state, what the user handed in."""
    DECLARED = 2
    """A word on this very tensor in its place: the user's, or a rule's that knows the owner of the attribute."""
    OWNED = 3
    """Who allocated the memory and what every view of it is for: the buffer behind many parameters, say. Claims
    of the same role on its views have no say; claims of other roles do."""


@dataclass(slots=True, eq=False)
class Claim:
    """One tensor that a rule knows. Treat it as immutable: it is not frozen because that costs four times as
    long to make, and a sleep makes one for each of maybe 100,000 tensors.

    Example: `Claim("model.lm_head.weight", tensor, Role.PARAM, "params")`.
    """

    name: str
    tensor: torch.Tensor
    """A plain strided tensor: rules resolve subclasses (DTensor, quantized) to what they hold."""
    role: Role
    component: str
    fate: Fate = Fate.MOVED
    """The cheapest fate that loses nothing. `moved` covers `clean`: unchanged bytes are found by fingerprint.
    `left`: there is no memory to treat here (meta, lazy, opaque), and `tensor` may be of any kind."""
    reason: str = ""
    """Why this fate is safe, or why a cheaper one is not; goes into the ledger."""
    drop: Callable[[], None] | None = None
    """For `dropped`: clears the owner's cache. Called once per distinct callable, before any copy."""
    rebuild: Rebuild | None = None
    """For `rebuilt`."""
    gates: tuple[Gate, ...] = ()
    standing: Standing = Standing.KNOWN


@dataclass(frozen=True, slots=True)
class Actor:
    """What the user hands over, by name. Names appear in claims, ledgers and errors."""

    models: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: Mapping[str, torch.optim.Optimizer] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)
    """Component name -> tensors, or nested containers of tensors."""
    derived: Sequence[object] = ()
    """What `torpor.derived(...)` returned (`rules.derived.Derived`)."""
    wrappers: Mapping[str, Any] = field(default_factory=dict)
    """Optimizers handed over that are not torch's own and step some that are: those are in `optimizers`."""


class Rule(Protocol):
    """One library's knowledge. Instances may keep state between sleeps (a step counter, say)."""

    name: str

    def attach(self, actor: Actor) -> Callable[[], None]:
        """Start watching what must be watched between sleeps; returns the undo."""

    def claims(self, actor: Actor) -> Iterator[Claim]:
        """Every tensor of `actor` this rule knows, now. May yield one storage many times."""
