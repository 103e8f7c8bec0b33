"""The one walker: from Python objects to the plain strided tensors they hold.

Three layers, each used by the rules:

- `leaves` goes through containers (mappings, lists, tuples, sets, deques, dataclass instances,
  `SimpleNamespace`) and stops at tensors, modules and optimizers. Other objects are not entered: their
  attributes may be anything, an engine or a data loader included. Hand their tensors in as `extra`.
- `plain` resolves one tensor to the tensors that own memory: subclasses through `__tensor_flatten__`
  (DTensor, torchao, jagged nested tensors), sparse tensors to indices and values.
- `module_tensors` is everything a module holds, registered or not.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from enum import IntEnum, auto
from types import SimpleNamespace
from typing import NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from torpor.kinds import Fate, Role, plain_members
from torpor.rules.base import Claim, Standing

Spot: TypeAlias = tuple[str, torch.Tensor, str]
"""Name, tensor, and why it is to be left alone; with an empty reason the tensor is plain and owns memory."""

Leaf: TypeAlias = torch.Tensor | nn.Module | torch.optim.Optimizer

_PLAIN_TYPES = frozenset({torch.Tensor, nn.Parameter})
_SEQUENCES = (list, tuple, deque, Set)
_ATOMS = frozenset({int, float, bool, str, bytes, type(None)})
"""Passed over at once: a vocabulary or a list of token ids is long, and is walked at each sleep."""
_MODULE_FIELDS = frozenset(vars(nn.Module()))
_COMPRESSED_PARTS = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


@plain_members
class Place(IntEnum):
    """Where in a module a tensor hangs."""

    PARAMETER = auto()
    BUFFER = auto()
    SCRATCH = auto()
    """A buffer registered with `persistent=False`: in no `state_dict`."""
    ATTRIBUTE = auto()
    GRADIENT = auto()


class Held(NamedTuple):
    """One tensor of a module, still unresolved."""

    place: Place
    name: str
    tensor: torch.Tensor


def plain(name: str, tensor: torch.Tensor) -> Iterator[Spot]:
    """The tensors with memory of their own behind `tensor`, which may be of any kind."""
    if is_plain(tensor):
        yield name, tensor, "on the meta device: no memory" if tensor.is_meta else ""
    else:
        yield from _resolved(name, tensor)


def claims_on(
    name: str,
    tensor: torch.Tensor,
    role: Role,
    component: str,
    fate: Fate = Fate.MOVED,
    reason: str = "",
    standing: Standing = Standing.KNOWN,
) -> Iterable[Claim]:
    """One claim on each tensor with memory behind `tensor`; fate `left` where there is none."""
    if is_plain(tensor) and not tensor.is_meta:
        return (Claim(name, tensor, role, component, fate, reason, standing=standing),)
    return [
        Claim(part_name, part, role, component, Fate.LEFT, why_left)
        if why_left
        else Claim(part_name, part, role, component, fate, reason, standing=standing)
        for part_name, part, why_left in plain(name, tensor)
    ]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is what rules claim: strided, no subclass, its elements in its own storage."""
    return type(tensor) in _PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_nested


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a shard (or a copy) of a distributed tensor. Imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _resolved(name: str, tensor: torch.Tensor) -> Iterator[Spot]:
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        yield name, tensor, "lazy: not initialized yet"
    elif hasattr(type(tensor), "__tensor_flatten__"):
        inner_names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for inner_name in inner_names:
            inner = getattr(tensor, inner_name)
            if isinstance(inner, torch.Tensor):
                yield from plain(f"{name}.{inner_name}", inner)
    elif tensor.layout is torch.sparse_coo:
        yield from plain(f"{name}.indices", tensor._indices())
        yield from plain(f"{name}.values", tensor._values())
    elif tensor.layout in _COMPRESSED_PARTS:
        for part in _COMPRESSED_PARTS[tensor.layout]:
            yield from plain(f"{name}.{part}", getattr(tensor, part)())
    elif tensor.layout is not torch.strided:
        yield name, tensor, f"opaque memory of layout {tensor.layout}"
    elif tensor.is_nested:
        yield from plain(f"{name}.values", tensor.values())
    else:
        yield name, tensor, _why_without_memory(tensor)


def _why_without_memory(tensor: torch.Tensor) -> str:
    """For a subclass that does not say what it holds: whether its own storage is real."""
    storage = tensor.untyped_storage()
    if storage.device.type == "meta":
        return "on the meta device: no memory"
    try:
        storage.data_ptr()
    except RuntimeError:  # torch's answer for a wrapper without storage; there is no question to ask first
        return f"a {type(tensor).__name__} without __tensor_flatten__: its memory cannot be found"
    return ""


def leaves(name: str, value: object) -> Iterator[tuple[str, Leaf]]:
    """Tensors, modules and optimizers in nested containers, and in the attributes of those tensors.

    Each container is entered once, so cycles end; a tensor is given once for each place it hangs in.
    """
    return _leaves(name, value, {})


_Entered: TypeAlias = dict[int, object]
"""`id` of each container that was entered -> the container, alive: a freed one's `id` would come again."""


def _leaves(name: str, value: object, entered: _Entered) -> Iterator[tuple[str, Leaf]]:
    if isinstance(value, torch.Tensor):
        yield name, value
        if value.__dict__:
            yield from _children(name, vars(value), entered)
    elif isinstance(value, nn.Module | torch.optim.Optimizer):
        yield name, value
    else:
        yield from _children(name, value, entered)


def _children(name: str, value: object, entered: _Entered) -> Iterator[tuple[str, Leaf]]:
    if id(value) in entered:
        return
    items = _items(value)
    if items is None:
        return
    entered[id(value)] = value
    for key, child in items:
        if isinstance(child, torch.Tensor) and not child.__dict__:  # most are; spares a generator each
            yield name + key, child
        else:
            yield from _leaves(name + key, child, entered)


def _items(value: object) -> Iterator[tuple[str, object]] | None:
    """The suffix of the name and the value of each child of a container; None for what is no container."""
    if isinstance(value, Mapping):
        numbered = enumerate(value.items())
        return ((key_suffix(key, i), child) for i, (key, child) in numbered if type(child) not in _ATOMS)
    if isinstance(value, _SEQUENCES):
        return ((f"[{i}]", child) for i, child in enumerate(value) if type(child) not in _ATOMS)
    if isinstance(value, SimpleNamespace):
        return ((f".{key}", child) for key, child in vars(value).items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    return None


def _fields(value: object) -> Iterator[tuple[str, object]]:
    """Fields that are set, slots included, and what else was hung on the instance."""
    declared = {field.name for field in dataclasses.fields(value)}  # type: ignore[arg-type]
    for key in declared:
        if hasattr(value, key):  # a field with init=False may never have been set
            yield f".{key}", getattr(value, key)
    for key, child in getattr(value, "__dict__", {}).items():  # absent with slots=True
        if key not in declared:
            yield f".{key}", child


def is_container(value: object) -> bool:
    """Whether `leaves` would enter `value`."""
    return _items(value) is not None


def key_suffix(key: object, index: int) -> str:
    """How a mapping's key appears in a name; a key that is no text or number appears by type and position."""
    if isinstance(key, str):
        return f".{key}"
    if isinstance(key, int | float):
        return f"[{key!r}]"
    return f"[{type(key).__name__} {index}]"


def gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """The `.grad` of a tensor, if it has one."""
    if tensor.is_leaf or tensor.retains_grad:  # torch warns when any other tensor is asked
        return tensor.grad
    return None


def module_tensors(name: str, module: nn.Module) -> Iterator[Held]:
    """Every tensor of `module`: parameters, buffers, attributes, the gradients of all of these.

    Modules in plain containers are walked too: `parameters()` does not see them, their memory is there all
    the same. Parameters' own attributes (`main_grad`) count as attributes.
    """
    pending = [(name, module)]
    walked: set[nn.Module] = set()
    entered: _Entered = {}
    while pending:
        prefix, root = pending.pop()
        for path, child in root.named_modules(memo=walked, prefix=prefix):
            for held in _held(path, child, entered):
                if isinstance(held, Held):
                    yield held
                    grad = gradient(held.tensor)
                    if grad is not None:
                        yield Held(Place.GRADIENT, f"{held.name}.grad", grad)
                else:
                    pending.append(held)


def _held(path: str, module: nn.Module, entered: _Entered) -> Iterator[Held | tuple[str, nn.Module]]:
    dot = f"{path}." if path else ""
    attributes: list[tuple[str, object]] = []
    for held in _registered(dot, module):
        yield held
        if held.tensor.__dict__:
            attributes.append((held.name, vars(held.tensor)))
    attributes += [
        (dot + key, value)
        for key, value in vars(module).items()
        if key not in _MODULE_FIELDS and type(value) not in _ATOMS
    ]
    for key, value in attributes:
        for leaf_name, leaf in _leaves(key, value, entered):
            if isinstance(leaf, torch.Tensor):
                yield Held(Place.ATTRIBUTE, leaf_name, leaf)
            elif isinstance(leaf, nn.Module):
                yield leaf_name, leaf


def _registered(dot: str, module: nn.Module) -> Iterator[Held]:
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield Held(Place.PARAMETER, dot + key, parameter)
    scratch = module._non_persistent_buffers_set
    for key, buffer in module._buffers.items():
        if buffer is not None:
            yield Held(Place.SCRATCH if key in scratch else Place.BUFFER, dot + key, buffer)


def parameter_names(models: Mapping[str, nn.Module]) -> dict[int, str]:
    """`id` of each parameter that a walk over `models` reaches -> its first name.

    Good as long as the models are not changed: torch keeps the Python object of a live parameter.
    """
    names: dict[int, str] = {}
    for model_name, model in models.items():
        for held in module_tensors(model_name, model):
            if held.place is Place.PARAMETER:
                names.setdefault(id(held.tensor), held.name)
    return names
