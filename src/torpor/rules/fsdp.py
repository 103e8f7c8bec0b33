"""What FSDP2 (`torch.distributed.fsdp.fully_shard`) holds, and how its gathered parameters are given up.

`fully_shard` turns a parameter into a `DTensor` shard whose local tensor is a window on a padded buffer; the
walker finds that storage through the module. The rest hangs on objects the walker does not enter:

- the shard itself, while the module shows the gathered parameter in its place;
- gradients that were accumulated without a reduction, and the partly reduced ones of HSDP: state;
- the gathered parameters: a copy of the shards of all ranks, made again by the next forward. `reshard` gives it up.

Private names of torch are read here and nowhere else: `FSDPParam`, `FSDPParamGroup` (torch 2.11 to 2.13).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torpor.errors import StateError, UnsupportedError
from torpor.kinds import Fate, Role
from torpor.ledger import Row
from torpor.rules.base import Actor, Claim
from torpor.rules.walk import claims_on, leaves

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

_PARAMS, _GRADS = "params", "grads"
_UNREDUCED = "accumulated without a reduction"
_PADDING = "padding between gradient shards: nobody reads it"
_DEAD_POST_FORWARD = "dead: FSDP has gone back to its shards"
_REASON_GATHERED = "gathered from the shards: FSDP gathers it again on its next use"


@dataclass(frozen=True, slots=True)
class _Sharded:
    """One parameter under FSDP. Example: `_Sharded("model.layers.0.weight", "params", fsdp_param)`."""

    name: str
    component: str
    param: FSDPParam


class FSDPRule:
    """Claims what FSDP2 keeps out of the walker's sight. Imports nothing of FSDP: a model that uses it has."""

    name = "fsdp"

    def attach(self, actor: Actor) -> Callable[[], None]:
        """Check the offload policy.

        Raises:
            UnsupportedError: `CPUOffloadPolicy`: FSDP moves those shards itself, and they leave the device after
                each use.
        """
        for group in _groups(_modules(actor)):
            for sharded in _sharded(group):
                if sharded.param.offload_to_cpu:
                    raise UnsupportedError(
                        f"{sharded.name} is under CPUOffloadPolicy: FSDP keeps its shard in host memory and copies it "
                        "at each use, so a sleep would free nothing and copy it once more. Use fully_shard without "
                        "offload_policy= and let the sleeper move the shards",
                        name=sharded.name,
                    )
        return lambda: None

    def claims(self, actor: Actor) -> Iterator[Claim]:
        for group in _groups(_modules(actor)):
            yield from _partial_sums(group)
            for sharded in _sharded(group):
                yield from _shards(sharded)
                yield from _gathered(sharded)
                yield from _unreduced(sharded)
            yield from _paddings(group)


def reshard(actor: Actor) -> list[Row]:
    """Give up gathered parameters that are still resident; a row of the ledger for each component.

    Resident they are after a forward without a backward, for modules with `reshard_after_forward=False` (the root
    has it by default). FSDP gathers them again, from equal shards to equal bits. What it decides depends on
    nothing that differs between ranks, so that the next gathering finds all of them.

    Raises:
        StateError: a gathered parameter is not what its shard says, so that a run without the sleep would go on
            with other values. Nothing was given up.
    """
    groups = list(_groups(_modules(actor)))
    for group in groups:
        group.handle.wait_for_unshard()  # a prefetch that nobody has waited for; a no-op otherwise
        for sharded in _sharded(group):
            if _is_stale(sharded.param):
                raise StateError(
                    f"{sharded.name}: its gathered copy differs from its shard: an optimizer stepped, or somebody "
                    "wrote, while FSDP had it gathered (set_reshard_after_backward(False)?). Call reshard() on "
                    "the FSDP module before the step",
                    name=sharded.name,
                )
    sums: dict[str, tuple[int, int]] = {}
    for group in groups:
        resident = [t for sharded in _sharded(group) for t in _buffers(sharded.param)]
        nbytes = sum(tensor.untyped_storage().nbytes() for tensor in resident)
        group.handle.reshard()
        freed_bytes = nbytes - sum(tensor.untyped_storage().nbytes() for tensor in resident)
        if freed_bytes:
            count, total = sums.get(group.component, (0, 0))
            sums[group.component] = count + len(resident), total + freed_bytes
    return [
        Row(component, Role.PARAM, Fate.DROPPED, count, nbytes, freed_bytes=nbytes, reason=_REASON_GATHERED)
        for component, (count, nbytes) in sums.items()
    ]


def gathered_bytes(actor: Actor) -> int:
    """Bytes that `reshard` would give up now."""
    tensors = [t for group in _groups(_modules(actor)) for s in _sharded(group) for t in _buffers(s.param)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


# ------------------------------------------------------------------------------------------------ finding


@dataclass(frozen=True, slots=True)
class _Group:
    """The parameters that FSDP communicates together, and where they hang."""

    names: dict[nn.Module, str]
    """Modules of the model -> their path."""
    component: str
    handle: FSDPParamGroup


def _modules(actor: Actor) -> Iterator[tuple[str, nn.Module, str]]:
    """Name, module and component of its parameters: the models, and modules that were handed over as `extra`."""
    for name, model in actor.models.items():
        yield name, model, _PARAMS
    for component, value in actor.extra.items():
        for name, leaf in leaves(component, value):
            if isinstance(leaf, nn.Module):
                yield name, leaf, component


def _groups(modules: Iterable[tuple[str, nn.Module, str]]) -> Iterator[_Group]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    seen: set[int] = set()  # one group may communicate for several modules
    for name, model, component in modules:
        names: dict[nn.Module, str] = {}
        for path, module in model.named_modules(prefix=name):
            names[module] = path
        for module in names:
            if isinstance(module, fsdp.FSDPModule):
                for group in _groups_of(module):
                    if id(group) not in seen:
                        seen.add(id(group))
                        yield _Group(names, component, group)


def _groups_of(module: FSDPModule) -> list[FSDPParamGroup]:
    state: Any = module._get_fsdp_state()
    if "_fsdp_param_groups" in vars(state):
        return list(state._fsdp_param_groups)
    only = state._fsdp_param_group  # torch before several meshes could be mixed in one module
    return [] if only is None else [only]


def _sharded(group: _Group) -> Iterator[_Sharded]:
    for param in group.handle.fsdp_params:
        info = param._module_info
        path = group.names.get(info.module, type(info.module).__name__)
        yield _Sharded(f"{path}.{info.param_name}" if path else info.param_name, group.component, param)


# ------------------------------------------------------------------------------------------------- claims


def _shards(sharded: _Sharded) -> Iterable[Claim]:
    """The shard, where the module shows something else in its place."""
    if sharded.param.sharded_state.name == "SHARDED":
        return ()
    return claims_on(sharded.name, sharded.param.sharded_param, Role.PARAM, sharded.component)


def _gathered(sharded: _Sharded) -> Iterator[Claim]:
    """The buffers behind gathered parameters, while they have memory."""
    for i, tensor in enumerate(_buffers(sharded.param)):
        name = f"{sharded.name}.gathered[{i}]"
        yield from claims_on(name, tensor, Role.WORKSPACE, sharded.component)
    post_forward = vars(sharded.param).get("_sharded_post_forward_param_data")  # exists once it was used
    if post_forward is not None:
        name = f"{sharded.name}.post_forward_shard"
        dead = sharded.param.sharded_state.name == "SHARDED"
        fate, reason = (Fate.ZEROED, _DEAD_POST_FORWARD) if dead else (Fate.MOVED, "")
        yield from claims_on(name, post_forward, Role.WORKSPACE, sharded.component, fate, reason)


def _buffers(param: FSDPParam) -> list[torch.Tensor]:
    tensors = [*param.all_gather_outputs, *param._unsharded_inner_tensors]
    return [tensor for tensor in tensors if tensor.untyped_storage().nbytes()]


def _unreduced(sharded: _Sharded) -> Iterator[Claim]:
    """Gradients of the gathered parameter: state, while the reduction is put off."""
    found = {"accumulated_grad": sharded.param.unsharded_accumulated_grad}
    gathered = _gathered_param(sharded.param)
    if gathered is not None:
        found["grad"] = gathered.grad
    for name, grad in found.items():
        if grad is not None:
            yield from claims_on(f"{sharded.name}.{name}", grad, Role.GRAD, _GRADS, Fate.MOVED, _UNREDUCED)


def _gathered_param(param: FSDPParam) -> torch.Tensor | None:
    """The gathered parameter, memory or not; None before the first gathering."""
    found: torch.Tensor | None = vars(param).get("_unsharded_param")
    return found


def _partial_sums(group: _Group) -> Iterable[Claim]:
    """HSDP: gradients reduced within a shard group and not yet across the replicas."""
    partial = group.handle._partial_reduce_output
    if partial is None:
        return ()
    first = next(_sharded(group)).name
    return claims_on(f"{first}.partly_reduced_grads", partial, Role.GRAD, _GRADS, Fate.MOVED, _UNREDUCED)


def _paddings(group: _Group) -> Iterator[Claim]:
    """The gaps between gradient shards in the buffer they share: without a claim a dead buffer would be moved.

    One reduction gives one buffer, each shard at the start of its padded place. A gap ends where the next
    gradient begins, so that a layout unlike this one never gives up a gradient.
    """
    buffers: dict[int, list[tuple[int, torch.Tensor, _Sharded]]] = {}
    for sharded in _sharded(group):
        grad = sharded.param.sharded_param.grad
        if grad is not None:
            local = _local(grad)
            key = local.untyped_storage()._cdata
            buffers.setdefault(key, []).append((int(local.storage_offset()), local, sharded))
    for shards in buffers.values():
        shards.sort(key=lambda shard: shard[0])
        ends = [offset for offset, _, _ in shards[1:]]
        ends.append(shards[-1][1].untyped_storage().nbytes() // shards[-1][1].itemsize)
        for (offset, local, sharded), end in zip(shards, ends, strict=True):
            begin = offset + local.numel()
            end = min(end, offset + sharded.param.padded_sharded_param_size.numel())
            if end > begin and local.is_contiguous():
                gap = local.detach().as_strided((end - begin,), (1,), begin)
                yield from claims_on(f"{sharded.name}.grad.padding", gap, Role.WORKSPACE, _GRADS, Fate.ZEROED, _PADDING)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined] # a DTensor, always
    return local


# --------------------------------------------------------------------------------------------- staleness


def _is_stale(param: FSDPParam) -> bool:
    """Whether this rank's part of a resident gathered parameter has other bits than its shard."""
    gathered = _gathered_param(param)
    if gathered is None or param.sharded_state.name != "UNSHARDED" or _has_extension(param):
        return False
    whole = (_local(gathered) if param.is_dtensor else gathered).detach()
    rank, size = _place(param)
    parts = torch.chunk(whole, size, param.fsdp_placement.dim)
    shard = _local(param.sharded_param).detach()
    if rank >= len(parts):
        return False  # more ranks than rows: this one has none
    return not torch.equal(_bits(parts[rank]), _bits(shard.to(whole.dtype)))


def _place(param: FSDPParam) -> tuple[int, int]:
    """Position and number of ranks that share the parameter; 0 of 1 where it is only replicated."""
    mesh = vars(param.mesh_info)
    return mesh.get("shard_mesh_rank", 0), mesh.get("shard_mesh_size", 1)


def _has_extension(param: FSDPParam) -> bool:
    """Whether a tensor subclass decides what is gathered (quantized weights): its parts are not the shard's."""
    return "_extensions_data" in vars(param)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
