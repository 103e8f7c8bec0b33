"""The rule for FSDP2 in one process: a world of one rank holds the same objects."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from contracts.rule_contract import RuleContract
from torpor.errors import UnsupportedError
from torpor.inventory import take_inventory
from torpor.kinds import Fate, Role
from torpor.rules.base import Actor, Rule
from torpor.rules.fsdp import FSDPRule, gathered_bytes, reshard
from torpor.rules.standard import standard_rules


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _gathered() -> nn.Module:
    """After a forward without a backward the root keeps what it gathered."""
    model = nn.Linear(64, 65)
    fully_shard(model)
    with torch.no_grad():
        model(torch.ones(1, 64))
    return model


class TestContract(RuleContract):
    def make_rule(self) -> Rule:
        return FSDPRule()

    def make_actor(self) -> Actor:
        return Actor({"model": _gathered()})


def test_shards_stay_parameters_while_the_module_shows_the_gathered_ones() -> None:
    model = _gathered()
    shard = model._get_fsdp_state()._fsdp_param_groups[0].fsdp_params[0].sharded_param
    optimizer = torch.optim.SGD([shard])
    entry = take_inventory(Actor({"model": model}, {"optimizer": optimizer}), standard_rules()).find(shard)
    assert entry is not None
    assert (entry.name, entry.role, entry.component) == ("model.weight._local_tensor", Role.PARAM, "params")


def test_resharding_frees_and_says_so_once() -> None:
    model = _gathered()
    actor = Actor({"model": model})
    nbytes = 4 * (64 * 65 + 65)
    assert gathered_bytes(actor) == nbytes
    [row] = reshard(actor)
    assert (row.component, row.fate, row.storages, row.freed_bytes) == ("params", Fate.DROPPED, 2, nbytes)
    assert gathered_bytes(actor) == 0
    assert reshard(actor) == []


def test_a_model_handed_over_as_extra_keeps_its_component() -> None:
    [row] = reshard(Actor(extra={"reference": {"policy": _gathered()}}))
    assert row.component == "reference"


def test_cpu_offload_is_refused_with_the_reason() -> None:
    model = fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(UnsupportedError, match=r"model\.weight is under CPUOffloadPolicy.*host memory"):
        FSDPRule().attach(Actor({"model": model}))


def test_nothing_of_fsdp_is_imported() -> None:
    program = (
        "import sys, torch\n"
        "from torpor.rules.fsdp import FSDPRule\n"
        "from torpor.rules.base import Actor\n"
        "assert list(FSDPRule().claims(Actor({'m': torch.nn.Linear(1, 1)}))) == []\n"
        "assert 'torch.distributed.fsdp' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
