"""A lazy wake brings the sources of what it rebuilds before it returns, and leaves the moments for later."""

from __future__ import annotations

import torch

import torpor
from torpor.kinds import Fate, Role

_read: list[int] = []
"""Addresses of the sources that `cast` was given, in the order of its calls."""


def cast(out: torch.Tensor, master: torch.Tensor) -> None:
    _read.append(master.data_ptr())
    out.copy_(master)


def test_masters_come_before_what_is_rebuilt_from_them() -> None:
    master = torch.nn.Parameter(torch.randn(1 << 20))
    weight = master.detach().bfloat16()
    master.grad = torch.ones_like(master)
    optimizer = torch.optim.AdamW([master])
    optimizer.step()
    cast(weight, master.detach())
    declared = torpor.derived("weight", weight, rebuild=cast, sources=[master], component="params", role=Role.PARAM)
    with torpor.Sleeper(optimizer=optimizer, derived=[declared], store="pageable") as sleeper:
        before, kept_master = weight.clone(), master.detach().clone()
        assert Fate.REBUILT in {row.fate for row in sleeper.sleep().rows}
        first = sleeper.wake(lazy=True)
        later = sleeper.finish()
        assert _read[-1] == master.data_ptr(), "the master itself, not a copy from the store"
        assert Role.MASTER in {row.role for row in first.rows}
        assert later is not None
        assert {row.role for row in later.rows} == {Role.MOMENT}
        assert torch.equal(weight, before)
        assert torch.equal(master, kept_master)
