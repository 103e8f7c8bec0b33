"""The user's own caches: tensors that can be dropped or computed again, declared with `derived`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.utils.weak import TensorWeakRef

from torpor.errors import UsageError
from torpor.kinds import Fate, Role
from torpor.rules.base import Actor, Claim, Gate, Rebuild, Standing
from torpor.rules.walk import is_container, is_plain, leaves, plain


@dataclass(frozen=True, slots=True)
class Derived:
    """What `derived` returns: hand it to the actor. Holds no tensor alive."""

    name: str
    tensors: Callable[[], object]
    """What the cache holds now; None or an empty container while it is empty."""
    drop: Callable[[], None] | None
    rebuild: Callable[..., None] | None
    sources: Callable[[], object]
    gates: tuple[Gate, ...]
    component: str
    role: Role


def derived(
    name: str,
    tensors: object,
    *,
    drop: Callable[[], None] | None = None,
    rebuild: Callable[..., None] | None = None,
    sources: object = (),
    gates: Iterable[Gate] = (),
    component: str = "caches",
    role: Role = Role.WORKSPACE,
) -> Derived:
    """Declare tensors whose contents are not needed in a sleep, because something else can make them again.

    The declaration is your word on a module's plain attribute or non-persistent buffer. It does not reach
    further: what is also a parameter, a persistent buffer, optimizer state or handed in as `extra` is moved,
    and the ledger says which claim forbade more.

    Args:
        name: for messages, claims and ledgers; unique in an actor.
        tensors: a tensor, a container of tensors, or better a callable that returns what the cache holds now
            (None or empty while it is empty). Tensors given directly are not kept alive.
        drop: clears the owner's cache; the owner fills it again on its next use. Called once a sleep.
        rebuild: `rebuild(out, *sources)` writes into `out` the same bits again, from `sources` and constants
            only; it is called under `torch.no_grad()`. `tensors` must then be one tensor that fills its storage.
        sources: for `rebuild`: the tensors it reads, in the form of `tensors`.
        gates: conditions that must all hold; with one closed the tensors are moved, for the gate's reason.
        component: the component that the tensors sleep and wake with.
        role: what they are.

    Raises:
        UsageError: an argument that cannot be; the message has the name of the declaration.
    """
    _check_texts(name, component, role)
    checked_gates = tuple(gates)
    _check_ways(name, drop, rebuild, checked_gates)
    if drop is not None and not (isinstance(sources, tuple | list) and not sources):
        raise _misuse(name, "sources= is for rebuild=, not for drop=")
    get_tensors, get_sources = _getter(name, "tensors", tensors), _getter(name, "sources", sources)
    quiet_rebuild = None if rebuild is None else torch.no_grad()(rebuild)
    return Derived(name, get_tensors, drop, quiet_rebuild, get_sources, checked_gates, component, role)


class DerivedRule:
    """Claims what the records in `Actor.derived` hold."""

    name = "derived"

    def attach(self, actor: Actor) -> Callable[[], None]:
        """Check the records.

        Raises:
            UsageError: something that `derived` did not make, or two records of one name.
        """
        seen: set[str] = set()
        for index, record in enumerate(actor.derived):
            if not isinstance(record, Derived):
                raise UsageError(
                    f"derived[{index}] is a {type(record).__name__}: hand over what torpor.derived(...) returned",
                    name=f"derived[{index}]",
                )
            if record.name in seen:
                raise _misuse(record.name, "declared twice; give each declaration its own name")
            seen.add(record.name)
        return lambda: None

    def claims(self, actor: Actor) -> Iterator[Claim]:
        for record in actor.derived:
            if isinstance(record, Derived):
                yield from _claims(record)


def _claims(record: Derived) -> Iterator[Claim]:
    held = list(_tensors(record.name, "tensors", record.name, record.tensors()))
    if record.drop is not None:
        fate, reason, rebuild = Fate.DROPPED, "declared: its owner makes it again on the next use", None
    elif held:
        fate, reason, rebuild = _rebuild(record, held)
    for tensor_name, tensor in held:
        for name, part, why_left in plain(tensor_name, tensor):
            if why_left:
                yield Claim(name, part, record.role, record.component, Fate.LEFT, why_left)
            else:
                yield Claim(
                    name,
                    part,
                    record.role,
                    record.component,
                    fate,
                    reason,
                    drop=record.drop,
                    rebuild=rebuild,
                    gates=record.gates,
                    standing=Standing.DECLARED,
                )


def _rebuild(record: Derived, held: list[tuple[str, torch.Tensor]]) -> tuple[Fate, str, Rebuild | None]:
    assert record.rebuild is not None  # `derived` took exactly one of drop and rebuild
    if len(held) > 1:
        raise _misuse(record.name, f"rebuild= computes one tensor, tensors= gives {len(held)}: declare each by itself")
    if held and not is_plain(held[0][1]):
        raise _misuse(record.name, f"rebuild= needs a plain tensor, tensors= gives a {type(held[0][1]).__name__}")
    sources = record.sources()
    if sources is None or (isinstance(sources, list | tuple) and any(source is None for source in sources)):
        return Fate.MOVED, f"derived '{record.name}': a source of its rebuild= is gone", None
    tensors = tuple(tensor for _, tensor in _tensors(record.name, "sources", "source", sources))
    return Fate.REBUILT, "declared: computed again from its sources", Rebuild(record.rebuild, tensors)


def _tensors(record_name: str, option: str, name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if value is None:
        return
    if not (isinstance(value, torch.Tensor) or is_container(value)):
        raise _misuse(record_name, f"{option}= gave a {type(value).__name__}, not tensors")
    for leaf_name, leaf in leaves(name, value):
        if not isinstance(leaf, torch.Tensor):
            raise _misuse(record_name, f"{option}= holds a {type(leaf).__name__} at {leaf_name}, not tensors")
        yield leaf_name, leaf


def _getter(name: str, option: str, value: object) -> Callable[[], object]:
    """A callable for `value` that keeps no tensor alive."""
    if callable(value) and not isinstance(value, torch.Tensor):
        return value
    if value is None:
        raise _misuse(name, f"{option}= is None; for a cache that fills later give a callable")
    references = [TensorWeakRef(tensor) for _, tensor in _tensors(name, option, "", value)]
    if isinstance(value, torch.Tensor):
        return references[0]
    return lambda: [reference() for reference in references]


def _check_texts(name: object, component: object, role: object) -> None:
    if not isinstance(name, str) or not name:
        raise UsageError(f"derived: the name is {name!r}; give a text that is not empty", name=str(name))
    if not isinstance(component, str) or not component:
        raise _misuse(name, f"component={component!r}; give a text that is not empty")
    if not isinstance(role, Role):
        raise _misuse(name, f"role={role!r} is no Role; there are {', '.join(Role)}")


def _check_ways(name: str, drop: object, rebuild: object, gates: tuple[object, ...]) -> None:
    if (drop is None) == (rebuild is None):
        raise _misuse(name, "give exactly one of drop= and rebuild=")
    way, option = (drop, "drop") if rebuild is None else (rebuild, "rebuild")
    if not callable(way):
        raise _misuse(name, f"{option}= is a {type(way).__name__}, not a callable")
    for gate in gates:
        if not isinstance(gate, Gate):
            raise _misuse(name, f"gates= has a {type(gate).__name__}, not a Gate")


def _misuse(name: str, what: str) -> UsageError:
    return UsageError(f"derived '{name}': {what}", name=name)
