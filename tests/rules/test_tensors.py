"""The rule for what the user hands in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from contracts.rule_contract import RuleContract
from torpor.errors import UsageError
from torpor.inventory import take_inventory
from torpor.kinds import Role
from torpor.rules.base import Actor, Rule
from torpor.rules.standard import standard_rules
from torpor.rules.tensors import TensorsRule


class TestContract(RuleContract):
    def make_rule(self) -> Rule:
        return TensorsRule()

    def make_actor(self) -> Actor:
        return Actor(extra={"cache": {"pages": [torch.zeros(3), torch.zeros(0)]}, "ref": nn.Linear(2, 2)})


def test_the_users_name_is_the_component() -> None:
    ref, table = nn.Linear(2, 2, bias=False), torch.zeros(3)
    inventory = take_inventory(Actor(extra={"ref": ref, "tables": [table]}), [TensorsRule()])
    meanings = {e.name: (e.role, e.component) for e in inventory.entries}
    assert meanings == {"ref.weight": (Role.PARAM, "ref"), "tables[0]": (Role.OTHER, "tables")}


def test_what_an_optimizer_steps_is_a_master_and_stays_where_the_user_put_it() -> None:
    masters = [torch.zeros(3, requires_grad=True)]
    masters[0].grad = torch.zeros(3)
    actor = Actor({}, {"optimizer": torch.optim.SGD(masters)}, {"masters": masters})
    inventory = take_inventory(actor, standard_rules())
    meanings = {e.name: (e.role, e.component) for e in inventory.entries}
    assert meanings == {"masters[0]": (Role.MASTER, "masters"), "masters[0].grad": (Role.GRAD, "grads")}


def test_a_parameter_handed_in_is_a_parameter() -> None:
    adapters = [nn.Parameter(torch.zeros(3))]
    actor = Actor({}, {"optimizer": torch.optim.SGD(adapters)}, {"adapters": SimpleNamespace(a=adapters)})
    [entry] = take_inventory(actor, standard_rules()).entries
    assert (entry.name, entry.role, entry.component) == ("adapters.a[0]", Role.PARAM, "adapters")


def test_a_tensor_that_a_model_has_too_belongs_to_the_model() -> None:
    model = nn.Linear(2, 2, bias=False)
    actor = Actor({"model": model}, extra={"mine": [model.weight.detach()]})
    [entry] = take_inventory(actor, standard_rules()).entries
    assert (entry.component, entry.names) == ("params", ("model.weight", "mine[0]"))


@pytest.mark.parametrize("value", [3, "text", None, object(), lambda: torch.zeros(3)])
def test_what_holds_no_tensors_is_refused_by_name(value: object) -> None:
    with pytest.raises(UsageError, match=r"extra\['oops'\]") as caught:
        TensorsRule().attach(Actor(extra={"oops": value}))
    assert caught.value.name == "oops"  # type: ignore[attr-defined]


def test_an_optimizer_is_refused_with_the_way_out() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    with pytest.raises(UsageError, match="as an optimizer"):
        TensorsRule().attach(Actor(extra={"opt": optimizer}))
