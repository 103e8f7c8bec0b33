from __future__ import annotations

import torch

from torpor.ledger import Leftover
from torpor.leftovers import MIN_BYTES, find_leftovers, large_tensors

_CPU = frozenset({"cpu"})
_SHAPE = (MIN_BYTES + 11,)


def _mine(found: list[Leftover]) -> list[Leftover]:
    return [left for left in found if left.shape == _SHAPE]


def test_what_is_there_and_not_known_is_left() -> None:
    tensor = torch.zeros(_SHAPE, dtype=torch.uint8)
    view = tensor[:1]
    large = large_tensors(_CPU)
    assert {id(tensor), id(view)} <= {id(reference()) for reference in large}
    assert len(_mine(find_leftovers(large, set()))) == 1
    assert not _mine(find_leftovers(large, {tensor.untyped_storage()._cdata}))


def test_what_is_small_or_elsewhere_is_passed_over() -> None:
    small = torch.zeros(MIN_BYTES - 1, dtype=torch.uint8)
    tensor = torch.zeros(_SHAPE, dtype=torch.uint8)
    assert id(small) not in {id(reference()) for reference in large_tensors(_CPU)}
    assert id(tensor) not in {id(reference()) for reference in large_tensors({"cuda"})}


def test_what_was_dropped_since_is_not_left() -> None:
    gone, emptied = torch.zeros(_SHAPE, dtype=torch.uint8), torch.zeros(_SHAPE, dtype=torch.uint8)
    large = large_tensors(_CPU)
    del gone
    assert len(_mine(find_leftovers(large, set()))) == 1
    emptied.untyped_storage().resize_(0)
    assert not _mine(find_leftovers(large, set()))
