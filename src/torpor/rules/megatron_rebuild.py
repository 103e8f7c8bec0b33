"""Low-precision parameters from fp32 masters: a cast, and where data parallelism shards the masters a gather."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import distributed

from torpor.rules.base import Rebuild
from torpor.rules.megatron_optim import Piece

_NO_MASTER = "not rebuilt: no optimizer of the actor has a master of"
_QUANTIZED = "not rebuilt: its parameters are quantized"
_KEPT_BY_OPTIMIZER = "not rebuilt: the optimizer keeps the masters itself, maybe low halves only"
_GROUPS_SLEEP = "not rebuilt: the process groups that gather it wake after it"
_OWN_MASTER = "not rebuilt: in fp32 a parameter is its own master"

_Span: TypeAlias = tuple[int, int]
"""First element and the one after the last, in the flat buffer."""
_Stretch: TypeAlias = tuple[int, int, int]
"""A span, and the element of a master that its first one is the rounded value of."""


@dataclass(frozen=True, slots=True)
class Uncovered:
    """Why there is no rebuild."""

    reason: str


def parameter_rebuild(parameter: torch.Tensor, found: Sequence[Piece]) -> Rebuild | Uncovered:
    """For a parameter with memory of its own."""
    if parameter.dtype is torch.float32:
        return Uncovered(_OWN_MASTER)
    masters = _masters(found)
    if masters is None:
        return Uncovered(_KEPT_BY_OPTIMIZER)
    if len(masters) != 1 or masters[0].numel() != parameter.numel():
        return Uncovered(f"{_NO_MASTER} it")
    return Rebuild(_cast, masters)


def buffer_rebuild(
    buffer: Any, found: Sequence[Piece], names: Mapping[int, str], *, groups_sleep: bool
) -> Rebuild | Uncovered:
    """For the flat buffer `buffer.param_data`, from the masters of this rank and, by a gather, of the others.

    With more than one rank the rebuild is a collective call of the buffer's data-parallel group.

    Args:
        buffer: one of the buffers of Megatron-Core's data parallelism.
        found: the stretches of it that have masters here.
        names: of its parameters, by `id`.
        groups_sleep: whether process groups sleep too: they are the last to wake.
    """
    flat = buffer.param_data
    if flat.dtype is torch.float32:
        return Uncovered(_OWN_MASTER)
    if not flat.is_floating_point():
        return Uncovered(_QUANTIZED)
    masters = _masters(found)
    if masters is None:
        return Uncovered(_KEPT_BY_OPTIMIZER)
    if groups_sleep and buffer.data_parallel_group.size() > 1:
        return Uncovered(_GROUPS_SLEEP)
    spans = [_span(piece.part, flat) for piece in found]
    missing = _missing(buffer, spans, names)
    if missing:
        return Uncovered(f"{_NO_MASTER} {missing}")
    refill = _Refill([(*span, 0) for span in spans], _bucket_spans(buffer), buffer.data_parallel_group, flat.device)
    return Rebuild(refill, masters, agree=refill.agree, narrow=partial(refill.narrow, masters))


def _masters(found: Sequence[Piece]) -> tuple[torch.Tensor, ...] | None:
    """None if one of them cannot be had."""
    masters = tuple(piece.master for piece in found if piece.master is not None)
    return masters if len(masters) == len(found) else None


def _cast(out: torch.Tensor, master: torch.Tensor) -> None:
    out.copy_(master.detach().view(out.shape))


@dataclass(frozen=True, slots=True, eq=False)
class _Refill:
    """Writes every element of a parameter buffer: zeros between parameters, rounded masters in them."""

    stretches: Sequence[_Stretch]
    """Of the masters of this rank, in their order."""
    buckets: Sequence[_Span]
    """What the ranks gather at a time, each an equal share; nothing for a part of the buffer."""
    group: Any
    device: torch.device
    """Where the group works: a host copy goes by way of it."""

    def __call__(self, out: torch.Tensor, *masters: torch.Tensor) -> None:
        flat = out.view(-1)
        flat.zero_()
        for (begin, end, first), master in zip(self.stretches, masters, strict=True):
            flat[begin:end].copy_(master.detach().view(-1)[first : first + end - begin])
        if self.group.size() == 1:
            return
        for begin, end in self.buckets:
            self._gather(flat[begin:end])
        if not self.buckets:
            self._add_up(flat)

    def agree(self, alike: bool) -> bool:
        """Whether the bits were right on every rank: one that moves them would leave the others waiting at wake."""
        if self.group.size() == 1:
            return alike
        wrong = torch.tensor([not alike], dtype=torch.int32, device=self.device)
        distributed.all_reduce(wrong, group=self.group)
        return not wrong.item()

    def narrow(self, masters: Sequence[torch.Tensor], begin: int, end: int) -> Rebuild:
        """The elements from `begin` up to `end`, from the masters that reach there."""
        stretches, sources = [], []
        for (first, last, offset), master in zip(self.stretches, masters, strict=True):
            low, high = max(begin, first), min(end, last)
            if low < high:
                stretches.append((low - begin, high - begin, offset + low - first))
                sources.append(master)  # whole: while it sleeps it may have no memory to take a view of
        return Rebuild(_Refill(stretches, (), self.group, self.device), tuple(sources))

    def _gather(self, bucket: torch.Tensor) -> None:
        """All ranks' shards of one bucket, as the step's own parameter gather does it."""
        own = bucket.view(self.group.size(), -1)[self.group.rank()].to(self.device, copy=True)
        whole = bucket if bucket.device == self.device else torch.empty_like(bucket, device=self.device)
        distributed.all_gather_into_tensor(whole, own, group=self.group)
        if whole is not bucket:
            bucket.copy_(whole)

    def _add_up(self, flat: torch.Tensor) -> None:
        """Stretches of several ranks, of any lengths: each byte is zero on all ranks but one."""
        summed = flat.view(torch.uint8).to(self.device)
        distributed.all_reduce(summed, group=self.group)
        flat.view(torch.uint8).copy_(summed)


def _span(part: torch.Tensor, flat: torch.Tensor) -> _Span:
    begin = int(part.storage_offset() - flat.storage_offset())
    return begin, begin + part.numel()


def _bucket_spans(buffer: Any) -> list[_Span]:
    return [(bucket.offset, bucket.offset + bucket.grad_data.numel()) for bucket in buffer.buckets]


def _missing(buffer: Any, spans: Sequence[_Span], names: Mapping[int, str]) -> str:
    """The parameters of this rank's shards that `spans` do not fill, in words; empty if there are none."""
    world, rank = buffer.data_parallel_group.size(), buffer.data_parallel_group.rank()
    shards = []
    for begin, end in _bucket_spans(buffer):
        length = (end - begin) // world
        shards.append((begin + rank * length, begin + (rank + 1) * length))
    covered = set(spans)
    lacking = [
        names.get(id(parameter), "a parameter of another module")
        for parameter, (begin, end, *_) in buffer.param_index_map.items()
        for shard in shards
        if (low := max(begin, shard[0])) < (high := min(end, shard[1])) and (low, high) not in covered
    ]
    if not lacking:
        return ""
    return f"{lacking[0]}" + (f" and {len(lacking) - 1} more" if len(lacking) > 1 else "")
