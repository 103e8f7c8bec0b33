"""Megatron-Core's optimizers: which torch optimizers are inside, and which fp32 master each parameter has.

The library is never imported here: whoever hands over one of its optimizers has imported it. Read in 0.19.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torpor.errors import UsageError
from torpor.kinds import Fate, Role
from torpor.rules.base import Claim, Standing
from torpor.rules.loaded import loaded
from torpor.rules.walk import claims_on, is_plain, leaves

_OPTIMIZER = ("megatron.core.optimizer.optimizer", "MegatronOptimizer")
_COMPONENT = "optimizer"
_OFFLOADED = "in host memory already: the optimizer is offloaded to the CPU"


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A stretch of a low-precision parameter, and the fp32 master whose rounded value it is after each step."""

    part: torch.Tensor
    """A view into the parameter's memory, of the master's shape."""
    master: torch.Tensor | None
    """None where the optimizer keeps it itself (precision-aware): its low half alone, maybe."""


class MegatronOptimizer(Protocol):
    """What is used here of `megatron.core.optimizer.MegatronOptimizer`, which is no `torch.optim.Optimizer`."""

    def step(self) -> Any:
        """One step of every optimizer inside."""

    def state_dict(self) -> Any:
        """For a checkpoint."""


def unwrapped(
    optimizers: Mapping[str, Any],
) -> tuple[dict[str, torch.optim.Optimizer], dict[str, MegatronOptimizer]]:
    """Torch's optimizers, those inside Megatron's included; and Megatron's own, by the names they were given.

    One torch optimizer inside goes under the name of its wrapper, several are numbered.

    Raises:
        UsageError: something that is neither.
    """
    kind = loaded(*_OPTIMIZER)
    found: dict[str, torch.optim.Optimizer] = {}
    wrappers: dict[str, MegatronOptimizer] = {}
    for name, optimizer in optimizers.items():
        if isinstance(optimizer, torch.optim.Optimizer):
            found[name] = optimizer
        elif kind is not None and isinstance(optimizer, kind):
            wrappers[name] = optimizer
            inner = [part for part in map(_torch_optimizer, parts(optimizer)) if part is not None]
            found |= {name: inner[0]} if len(inner) == 1 else {f"{name}[{i}]": part for i, part in enumerate(inner)}
        else:
            raise UsageError(
                f"{name} is a {type(optimizer).__name__}: hand over optimizers of torch or of Megatron-Core", name=name
            )
    return found, wrappers


def parts(optimizer: Any) -> Iterator[Any]:
    """The optimizers of a chain, and of chains in it; of anything else itself."""
    chain = vars(optimizer).get("chained_optimizers")
    if chain is None:
        yield optimizer
        return
    for link in chain:
        yield from parts(link)


def _torch_optimizer(part: Any) -> torch.optim.Optimizer | None:
    """None for the stub of a rank without trainable parameters."""
    return part if isinstance(part, torch.optim.Optimizer) else part.optimizer


def pieces(optimizer: Any) -> Iterator[Piece]:
    """Every stretch of a parameter that is the rounded value of a master, this rank's share of them.

    None of quantized parameters, or of fp32 parameters: each is its own master.
    """
    for part in parts(optimizer):
        fields = vars(part)
        shards, sharded_masters = fields.get("shard_float16_groups"), fields.get("shard_fp32_from_float16_groups")
        wholes, whole_masters = fields.get("float16_groups"), fields.get("fp32_from_float16_groups")
        yield from _pairs(shards or wholes or (), sharded_masters or whole_masters or ())


def _pairs(models: Sequence[Sequence[Any]], masters: Sequence[Sequence[Any]]) -> Iterator[Piece]:
    for model_group, master_group in zip(models, masters, strict=True):
        for part, master in zip(model_group, master_group, strict=True):
            if part is not None and is_plain(part):
                yield Piece(part.detach(), master)


def master_claims(name: str, optimizer: Any, names: Mapping[int, str]) -> Iterator[Claim]:
    """Masters, under the names of their parameters where the optimizer has whole ones."""
    for part in parts(optimizer):
        fields = vars(part)
        models = fields.get("model_float16_groups") or fields.get("float16_groups") or ()
        masters = fields.get("shard_fp32_from_float16_groups") or fields.get("fp32_from_float16_groups") or ()
        for model_group, master_group in zip(models, masters, strict=True):
            for parameter, master in zip(model_group, master_group, strict=True):
                if master is not None:
                    label = f"master of {names.get(id(parameter), name)}"
                    yield from claims_on(label, master, Role.MASTER, _COMPONENT)


def scaling_claims(name: str, optimizer: Any) -> Iterator[Claim]:
    """The loss scale and the flags beside it."""
    for part in parts(optimizer):
        if isinstance(part, torch.optim.Optimizer):
            continue
        scaler = vars(part).get("grad_scaler")
        held = {key: value for key, value in vars(part).items() if isinstance(value, torch.Tensor)}
        held |= {f"grad_scaler.{key}": value for key, value in vars(scaler).items()} if scaler is not None else {}
        for key, value in held.items():
            if isinstance(value, torch.Tensor):
                yield from claims_on(f"{name}.{key}", value, Role.OTHER, _COMPONENT)


def offloaded_claims(name: str, optimizer: Any) -> Iterator[Claim]:
    """What a hybrid device optimizer has on the host: it stays there, whatever else sleeps."""
    for part in parts(optimizer):
        for inner in vars(_torch_optimizer(part) or part).get("cpu_optimizers") or ():
            held = {"params": [group["params"] for group in inner.param_groups], "state": list(inner.state.values())}
            for label, leaf in leaves(f"{name}.cpu_optimizers", held):
                for tensor in _with_gradient(leaf):
                    if tensor.device.type == "cpu":
                        yield Claim(
                            label, tensor, Role.MASTER, _COMPONENT, Fate.KEPT, _OFFLOADED, standing=Standing.OWNED
                        )


def _with_gradient(leaf: object) -> Iterator[torch.Tensor]:
    if isinstance(leaf, torch.Tensor) and is_plain(leaf):
        yield leaf.detach()
        if leaf.grad is not None:
            yield leaf.grad
