"""The rule for modules."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations

from contracts.rule_contract import RuleContract
from torpor.inventory import Inventory, take_inventory
from torpor.kinds import Fate, Role
from torpor.rules.base import Actor, Rule, Standing
from torpor.rules.torch_nn import TorchNNRule
from zoo import ZooModel


class TestContract(RuleContract):
    def make_rule(self) -> Rule:
        return TorchNNRule()

    def make_actor(self) -> Actor:
        model = ZooModel()
        model.emb(torch.arange(3)).sum().backward()
        model.lazy = nn.LazyLinear(3)
        return Actor({"model": model})


def _inventory(model: nn.Module) -> Inventory:
    return take_inventory(Actor({"model": model}), [TorchNNRule()])


def test_every_live_tensor_of_the_zoo_is_in_the_inventory() -> None:
    model = ZooModel()
    inventory = _inventory(model)
    for name, tensor in model.live().items():
        entry = inventory.find(tensor)
        assert entry is not None, name
        assert entry.nbytes == tensor.untyped_storage().nbytes()
        assert f"model.{name}" in entry.names


def test_roles_and_components() -> None:
    model = ZooModel()
    model.emb(torch.arange(3)).sum().backward()
    inventory = _inventory(model)
    expected = {
        model.emb.weight: (Role.PARAM, "params"),
        model.frozen: (Role.PARAM, "params"),
        model.emb.weight.grad: (Role.GRAD, "grads"),
        model.mask: (Role.BUFFER, "buffers"),
        model.inv_freq: (Role.BUFFER, "buffers"),
        model.scale: (Role.OTHER, "buffers"),
        model.notes.running: (Role.OTHER, "buffers"),
    }
    for tensor, meaning in expected.items():
        assert tensor is not None
        entry = inventory.find(tensor)
        assert entry is not None
        assert (entry.role, entry.component) == meaning
        assert entry.fate is Fate.MOVED


def test_a_tied_weight_is_one_entry_with_both_names() -> None:
    model = ZooModel()
    entry = _inventory(model).find(model.head.weight)
    assert entry is not None
    assert entry.names == ("model.emb.weight", "model.head.weight")
    assert len(entry.claims) == 2


def test_only_places_without_a_meaning_yield_to_the_user() -> None:
    standing = {c.name: c.standing for c in TorchNNRule().claims(Actor({"m": ZooModel()}))}
    assert standing["m.scalar"] is Standing.KNOWN
    assert standing["m.mask"] is Standing.KNOWN
    assert standing["m.inv_freq"] is Standing.FOUND
    assert standing["m.scale"] is Standing.FOUND


def test_main_grad_is_a_gradient() -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight.main_grad = torch.zeros(4, 4)
    [entry] = _inventory(model).by_component()["grads"]
    assert (entry.name, entry.role) == ("model.weight.main_grad", Role.GRAD)


def test_parametrized_weights_are_claimed_by_their_originals() -> None:
    model = parametrizations.weight_norm(nn.Linear(4, 6))
    names = {e.name for e in _inventory(model).entries}
    assert names == {
        "model.bias",
        "model.parametrizations.weight.original0",
        "model.parametrizations.weight.original1",
    }


def test_lazy_and_meta_parameters_are_named_and_left() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(2, 2, device="meta"))
    inventory = _inventory(model)
    assert inventory.entries == []
    assert {claim.name for claim in inventory.left} == {
        "model.0.weight",
        "model.0.bias",
        "model.1.weight",
        "model.1.bias",
    }
    assert {claim.fate for claim in inventory.left} == {Fate.LEFT}


def test_rnn_weights_behind_their_flat_list_are_parameters() -> None:
    model = nn.LSTM(3, 5)
    assert {e.component for e in _inventory(model).entries} == {"params"}


def test_a_module_hidden_in_a_list_is_found() -> None:
    model = nn.Linear(2, 2)
    model.teacher = [nn.Linear(3, 3)]
    entry = _inventory(model).find(model.teacher[0].weight)
    assert entry is not None
    assert (entry.name, entry.component) == ("model.teacher[0].weight", "params")


def test_two_models_that_share_a_trunk_share_its_entries() -> None:
    trunk = nn.Linear(4, 4, bias=False)
    actor = Actor({"policy": nn.Sequential(trunk), "value": nn.Sequential(trunk, nn.Linear(4, 1, bias=False))})
    inventory = take_inventory(actor, [TorchNNRule()])
    entry = inventory.find(trunk.weight)
    assert entry is not None
    assert entry.names == ("policy.0.weight", "value.0.weight")
    assert len(inventory.entries) == 2
