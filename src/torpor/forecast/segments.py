"""What an allocator-level saver copies: whole segments of PyTorch's caching allocator.

Such a saver stands behind `cudaMalloc` and sees segments, not tensors: a segment with one live byte is copied
whole (torch_memory_saver `csrc/core.cpp`, `pause`). The model: each role in fresh segments, tensors in the
order their library makes them, nothing freed in between. Real pools interleave, which only adds bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torpor.forecast.actor import Forecast
from torpor.forecast.fates import WORKSPACE_BYTES
from torpor.forecast.layout import Layout, Shard, shards, stages
from torpor.forecast.recipes import BF16_BYTES, FP32_BYTES, round_up
from torpor.kinds import Role

MIB = 1024**2

#: Constants of `c10/cuda/CUDACachingAllocator` (PyTorch 2.x).
BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = 1 * MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_FROM_BYTES = 10 * MIB
SEGMENT_ROUNDING_BYTES = 2 * MIB


@dataclass(slots=True)
class Pool:
    """The segments that a series of allocations takes, none of them freed."""

    segment_bytes: int = 0
    _small: list[int] = field(default_factory=list)
    _large: list[int] = field(default_factory=list)

    def allocate(self, nbytes: int) -> None:
        """Place one tensor: best fit among the rests of segments, else a new segment."""
        size = round_up(max(nbytes, 1), BLOCK_BYTES)
        small = size <= SMALL_REQUEST_BYTES
        rests = self._small if small else self._large
        place = bisect_left(rests, size)
        rest = rests.pop(place) if place < len(rests) else self._grow(size)
        rest -= size
        if rest >= BLOCK_BYTES if small else rest > SMALL_REQUEST_BYTES:
            insort(rests, rest)

    def _grow(self, size: int) -> int:
        if size <= SMALL_REQUEST_BYTES:
            segment = SMALL_SEGMENT_BYTES
        elif size < OWN_SEGMENT_FROM_BYTES:
            segment = LARGE_SEGMENT_BYTES
        else:
            segment = round_up(size, SEGMENT_ROUNDING_BYTES)
        self.segment_bytes += segment
        return segment


def segment_bytes(tensors: Iterable[int]) -> int:
    """Bytes of the segments that hold tensors of these sizes, in this order."""
    pool = Pool()
    for nbytes in tensors:
        pool.allocate(nbytes)
    return pool.segment_bytes


@dataclass(frozen=True, slots=True)
class RoleSegments:
    """Bytes of one role on a rank, and of the segments that hold them."""

    role: Role
    tensor_bytes: int
    segment_bytes: int


def segment_view(forecast: Forecast, stage: int | None = None) -> list[RoleSegments]:
    """Tensor and segment bytes by role on a rank of `stage` (default: of the fullest one's)."""
    stage = forecast.fullest.stage if stage is None else stage
    held = shards(stages(forecast.model, forecast.layout)[stage], forecast.layout)
    account = next(rank for rank in forecast.ranks if rank.stage == stage)
    series = {
        Role.PARAM: _params(forecast, held),
        Role.GRAD: _grads(forecast, held),
        Role.MASTER: _state(forecast, held, account.bytes_of(Role.MASTER), 1),
        Role.MOMENT: _state(forecast, held, account.bytes_of(Role.MOMENT), 2),
        Role.QUANTIZED_CACHE: cache_tensors(forecast, held),
        Role.WORKSPACE: [WORKSPACE_BYTES],
    }
    found = []
    for role, tensors in series.items():
        sizes = list(tensors)
        if sizes:
            found.append(RoleSegments(role, sum(sizes), segment_bytes(sizes)))
    return found


def cache_tensors(forecast: Forecast, held: Iterable[Shard]) -> Iterator[int]:
    """Sizes of the tensors in the quantized caches of a rank, in the order of the layers."""
    recipe, layers = forecast.recipe, len(forecast.model.layers)
    if not recipe.cache or recipe.primary_weights:
        return
    for shard in held:
        if recipe.quantizes(shard.layer, shard.weight, layers):
            sizes = recipe.tensors(shard.rows, shard.cols, recipe.directions(shard.weight))
            for _ in range(shard.count):
                yield from sizes


def _params(forecast: Forecast, held: list[Shard]) -> Iterator[int]:
    """One contiguous buffer for each data-parallel group under the distributed optimizer; frozen, quantized
    and fp32 parameters, and all without it, are tensors of their own."""
    recipe, layers = forecast.recipe, len(forecast.model.layers)
    buffers = {False: 0, True: 0}
    for shard in held:
        if recipe.primary_weights and recipe.quantizes(shard.layer, shard.weight, layers):
            for _ in range(shard.count):
                yield from recipe.tensors(shard.rows, shard.cols, recipe.directions(shard.weight))
        elif _in_buffer(forecast.layout, shard):
            buffers[shard.weight.expert] += BF16_BYTES * shard.elements
        else:
            width = FP32_BYTES if shard.weight.fp32 else BF16_BYTES
            yield from [width * shard.rows * shard.cols] * shard.count
    yield from filter(None, buffers.values())


def _in_buffer(layout: Layout, shard: Shard) -> bool:
    return layout.distributed_optimizer and shard.weight.trainable and not shard.weight.fp32


def _grads(forecast: Forecast, held: list[Shard]) -> Iterator[int]:
    """One contiguous buffer for each data-parallel group and gradient width."""
    buffers: dict[tuple[bool, bool], int] = {}
    for shard in held:
        if shard.weight.trainable:
            width = FP32_BYTES if shard.weight.fp32 else forecast.optimizer.grad_bytes
            key = (shard.weight.expert, shard.weight.fp32)
            buffers[key] = buffers.get(key, 0) + width * shard.elements
    yield from buffers.values()


def _state(forecast: Forecast, held: list[Shard], total_bytes: int, tensors: int) -> Iterator[int]:
    """State of one rank: for each piece of a parameter that it owns, `tensors` tensors, in all `total_bytes`.

    A data-parallel rank owns a contiguous range of the flat buffer, so whole parameters but for two.
    """
    pieces = [piece for expert in (False, True) for piece in _first_range(held, forecast.layout, expert=expert)]
    elements = sum(pieces)
    if not total_bytes or not elements:
        return
    for piece in pieces:
        yield from [total_bytes * piece // elements // tensors] * tensors


def _first_range(held: list[Shard], layout: Layout, *, expert: bool) -> Iterator[int]:
    """Elements of each parameter in the first range; Megatron fills its buffers from the last layer on."""
    group = [shard for shard in held if shard.weight.trainable and shard.weight.expert == expert]
    left = sum(shard.elements for shard in group) // layout.optimizer_shards(expert=expert)
    for shard in reversed(group):
        for _ in range(shard.count):
            piece = min(left, shard.rows * shard.cols)
            if piece == 0:
                return
            left -= piece
            yield piece
