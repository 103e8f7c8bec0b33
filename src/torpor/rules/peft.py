"""Adapters of the PEFT library: the parameters that train beside a frozen base."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from torpor.kinds import Role
from torpor.rules.base import Actor, Claim
from torpor.rules.walk import Place, claims_on, module_tensors

_COMPONENT = "adapters"
_LAYERS = (
    ("peft.tuners.tuners_utils", "BaseTunerLayer"),
    ("peft.utils.other", "AuxiliaryTrainingWrapper"),
)
"""Classes that say in `adapter_layer_names` which of their members belong to adapters."""
_PROMPT_MODEL = ("peft.peft_model", "PeftModel")
_PROMPT_MEMBERS = ("prompt_encoder",)


class PeftRule:
    """Claims adapters as role `adapter`, component `adapters`, so that they can stay while the base sleeps.

    Which parts of a layer are adapters is PEFT's own word (`adapter_layer_names`). PEFT is never imported
    here: a model that uses it has imported it. The base stays with the rule of `torch.nn`; frozen, it is
    `clean` from the second sleep on, and a merge into it shows in its fingerprint.
    """

    name = "peft"

    def attach(self, actor: Actor) -> Callable[[], None]:
        return lambda: None

    def claims(self, actor: Actor) -> Iterator[Claim]:
        layers = tuple(_loaded(*place) for place in _LAYERS)
        prompt_model = _loaded(*_PROMPT_MODEL)
        for name, model in actor.models.items():
            for path, module in model.named_modules(prefix=name):
                if isinstance(module, layers):
                    yield from _claims(path, module, module.adapter_layer_names)
                elif isinstance(module, prompt_model):
                    yield from _claims(path, module, _PROMPT_MEMBERS)


class _NotLoaded:
    """Stands for a class of a library that nobody imported: nothing is an instance of it."""


def _loaded(module_name: str, class_name: str) -> Any:
    module = sys.modules.get(module_name)
    if module is None:
        return _NotLoaded
    return getattr(module, class_name)


def _claims(path: str, module: nn.Module, members: tuple[str, ...]) -> Iterator[Claim]:
    prefixes = tuple(f"{path}.{member}" if path else member for member in members)
    for held in module_tensors(path, module):
        if held.place in (Place.ATTRIBUTE, Place.GRADIENT) or not _is_under(held.name, prefixes):
            continue
        yield from claims_on(held.name, held.tensor, Role.ADAPTER, _COMPONENT)


def _is_under(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
