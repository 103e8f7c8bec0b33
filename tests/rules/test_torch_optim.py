"""The rule for optimizers: all of their state, none of it invented, and which gradients are dead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from contracts.rule_contract import RuleContract
from torpor.inventory import Entry, Inventory, take_inventory
from torpor.kinds import Fate, Role
from torpor.rules.base import Actor, Rule
from torpor.rules.standard import standard_rules
from torpor.rules.torch_optim import TorchOptimRule
from zoo import OPTIMIZERS, Situation, flat_buffers, trained


class TestContract(RuleContract):
    def make_rule(self) -> Rule:
        return TorchOptimRule()

    def make_actor(self) -> Actor:
        situation = trained(OPTIMIZERS["adamw-tensor-lr"])
        assert situation.step is not None
        situation.step()
        return situation.actor


class TestContractWithMasters(TestContract):
    def make_actor(self) -> Actor:
        situation = flat_buffers()
        assert situation.step is not None
        situation.step()
        return situation.actor


class Watched:
    """A small model, its optimizer, and the rules watching it."""

    def __init__(self, *, dead_grads_after_step: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4, bias=False)
        self.weight = self.model.weight
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.actor = Actor({"model": self.model}, {"optimizer": self.optimizer})
        self.rules = standard_rules(dead_grads_after_step=dead_grads_after_step)
        self.undo = [rule.attach(self.actor) for rule in self.rules]

    def backward(self) -> None:
        self.model(torch.ones(2, 4)).square().sum().backward()

    def grad(self) -> Entry:
        assert self.weight.grad is not None
        entry = take_inventory(self.actor, self.rules).find(self.weight.grad)
        assert entry is not None
        return entry


def _components(situation: Situation) -> dict[str, list[Entry]]:
    return take_inventory(situation.actor, standard_rules()).by_component()


def _state_tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for child in value.values():
            yield from _state_tensors(child)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from _state_tensors(child)


def _check_state_is_covered(optimizer: torch.optim.Optimizer, inventory: Inventory) -> None:
    tensors = list(_state_tensors(dict(optimizer.state)))
    assert tensors
    for tensor in tensors:
        entry = inventory.find(tensor)
        assert entry is not None
        assert (entry.role, entry.component, entry.fate) == (Role.MOMENT, "optimizer", Fate.MOVED)


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "sgd"])
def test_every_tensor_of_the_state_is_claimed(name: str) -> None:
    situation = trained(OPTIMIZERS[name])
    assert situation.step is not None
    situation.step()
    situation.step()
    inventory = take_inventory(situation.actor, standard_rules())
    _check_state_is_covered(situation.actor.optimizers["optimizer"], inventory)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_does_not_exist_is_not_created(name: str) -> None:
    situation = trained(OPTIMIZERS[name])
    optimizer = situation.actor.optimizers["optimizer"]
    before = repr(dict(optimizer.state))  # Adagrad has state from the start
    take_inventory(situation.actor, standard_rules())
    assert repr(dict(optimizer.state)) == before


def test_eight_bit_state_is_claimed() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    situation = trained(lambda p: bnb.optim.AdamW8bit(p, lr=1e-2, min_8bit_size=64))
    assert situation.step is not None
    situation.step()
    optimizer = situation.actor.optimizers["optimizer"]
    assert any(t.dtype is torch.uint8 for t in _state_tensors(dict(optimizer.state)))
    _check_state_is_covered(optimizer, take_inventory(situation.actor, standard_rules()))


def test_state_is_named_by_its_parameter() -> None:
    situation = trained(OPTIMIZERS["sgd-momentum"])
    assert situation.step is not None
    situation.step()
    assert {e.name for e in _components(situation)["optimizer"]} == {
        f"optimizer.state[model.{key}].momentum_buffer" for key in ("0.weight", "0.bias", "2.weight", "2.bias")
    }


def test_a_tensor_among_the_options_is_claimed_and_is_no_moment() -> None:
    situation = trained(OPTIMIZERS["adamw-tensor-lr"])
    [entry] = _components(situation)["optimizer"]
    assert entry.role is Role.OTHER
    assert "optimizer.param_groups[0].lr" in entry.names


def test_tensors_hung_on_an_optimizer_are_claimed() -> None:
    watched = Watched()
    watched.optimizer.ema = {"w": torch.zeros(4)}  # type: ignore[attr-defined]
    entry = take_inventory(watched.actor, watched.rules).find(watched.optimizer.ema["w"])  # type: ignore[attr-defined]
    assert entry is not None
    assert (entry.name, entry.component) == ("optimizer.ema.w", "optimizer")


def test_parameters_of_no_model_are_masters() -> None:
    situation = flat_buffers()
    assert situation.step is not None
    situation.step()
    components = _components(situation)
    masters = [e for e in components["optimizer"] if e.role is Role.MASTER]
    assert len(masters) == 6
    assert {e.fate for e in masters} == {Fate.MOVED}
    assert [e.role for e in components["grads"]] == [Role.GRAD]


class _Wrapping(torch.optim.Optimizer):
    """An optimizer around another, as sharpness-aware ones are."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):  # type: ignore[no-untyped-def,override]
        return self.inner.step(closure)


def test_the_state_of_a_wrapped_optimizer_is_claimed_and_its_gradients_die() -> None:
    weight = nn.Parameter(torch.zeros(3))
    outer = _Wrapping(torch.optim.SGD([weight], lr=0.1, momentum=0.9))
    actor, rules = Actor({}, {"outer": outer}), standard_rules()
    for rule in rules:
        rule.attach(actor)
    weight.grad = torch.ones(3)
    outer.step()
    fates = {e.name: e.fate for e in take_inventory(actor, rules).entries}
    assert fates == {
        "outer.param_groups[0].params[0]": Fate.MOVED,
        "outer.inner.state[outer.param_groups[0].params[0]].momentum_buffer": Fate.MOVED,
        "outer.param_groups[0].params[0].grad": Fate.ZEROED,
    }


class _Proxy(torch.optim.Optimizer):
    """An optimizer that is one by class only, as accelerate's is."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self):  # type: ignore[no-untyped-def,override]
        return self.inner.param_groups

    @property
    def state(self):  # type: ignore[no-untyped-def,override]
        return self.inner.state


def test_a_proxy_is_passed_over_for_what_it_wraps() -> None:
    weight = nn.Parameter(torch.zeros(3))
    proxy = _Proxy(torch.optim.SGD([weight], lr=0.1, momentum=0.9))
    actor, rules = Actor({}, {"optimizer": proxy}), standard_rules()
    for rule in rules:
        rule.attach(actor)
    weight.grad = torch.ones(3)
    proxy.inner.step()
    fates = {e.name: e.fate for e in take_inventory(actor, rules).entries}
    assert sorted(fates.values()) == [Fate.MOVED, Fate.MOVED, Fate.ZEROED]
    assert "optimizer.inner.param_groups[0].params[0]" in fates


# Gradients


def test_a_gradient_is_dead_after_the_step() -> None:
    watched = Watched()
    watched.backward()
    watched.optimizer.step()
    entry = watched.grad()
    assert (entry.fate, entry.role, entry.component) == (Fate.ZEROED, Role.GRAD, "grads")
    assert "has consumed it" in entry.reason
    assert entry.name == "model.weight.grad"


def test_before_any_step_a_gradient_is_moved() -> None:
    watched = Watched()
    watched.backward()
    assert (watched.grad().fate, watched.grad().reason) == (Fate.MOVED, "no step was seen")


def test_an_accumulation_after_the_step_is_preserved() -> None:
    watched = Watched()
    watched.backward()
    watched.optimizer.step()
    watched.backward()
    assert (watched.grad().fate, watched.grad().reason) == (Fate.MOVED, "in the middle of an accumulation")


def test_a_new_gradient_at_the_old_address_is_preserved() -> None:
    watched = Watched()
    watched.backward()
    assert watched.weight.grad is not None
    memory = watched.weight.grad.untyped_storage()
    watched.optimizer.step()
    watched.optimizer.zero_grad()
    watched.weight.grad = torch.empty(0).set_(memory, 0, (4, 4))  # type: ignore[call-overload]
    assert watched.grad().fate is Fate.MOVED


def test_a_new_gradient_with_the_old_identity_and_version_is_preserved() -> None:
    watched = Watched()
    watched.backward()
    assert watched.weight.grad is not None
    identity, version = id(watched.weight.grad), watched.weight.grad._version
    watched.optimizer.step()
    watched.optimizer.zero_grad()
    others = [torch.ones(4, 4) for _ in range(100)]  # one of them takes the freed object's place
    [reborn] = [t for t in others if id(t) == identity]
    assert reborn._version == version
    watched.weight.grad = reborn
    assert watched.grad().fate is Fate.MOVED


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroing_and_accumulating_again_is_preserved(set_to_none: bool) -> None:
    watched = Watched()
    for _ in range(3):
        watched.backward()
        watched.optimizer.step()
        assert watched.grad().fate is Fate.ZEROED
        watched.optimizer.zero_grad(set_to_none=set_to_none)
        watched.backward()
        assert watched.grad().fate is Fate.MOVED


def test_a_user_who_wrote_to_a_gradient_after_the_step_keeps_it() -> None:
    watched = Watched()
    watched.backward()
    watched.optimizer.step()
    assert watched.weight.grad is not None
    watched.weight.grad[0, 0] = 3.0
    assert watched.grad().fate is Fate.MOVED


def test_the_option_keeps_gradients() -> None:
    watched = Watched(dead_grads_after_step=False)
    watched.backward()
    watched.optimizer.step()
    assert (watched.grad().fate, watched.grad().reason) == (Fate.MOVED, "dead_grads_after_step is off")


def test_without_its_optimizer_a_gradient_is_moved() -> None:
    model = nn.Linear(4, 4, bias=False)
    model(torch.ones(1, 4)).sum().backward()
    actor, rules = Actor({"model": model}), standard_rules()
    torch.optim.SGD(model.parameters()).step()
    assert model.weight.grad is not None
    entry = take_inventory(actor, rules).find(model.weight.grad)
    assert entry is not None
    assert entry.fate is Fate.MOVED


def test_every_optimizer_that_has_the_parameter_must_have_stepped() -> None:
    watched = Watched()
    second = torch.optim.SGD(watched.model.parameters(), lr=0.1)
    watched.actor = Actor(watched.actor.models, {"first": watched.optimizer, "second": second})
    for rule in watched.rules:
        rule.attach(watched.actor)
    watched.backward()
    watched.optimizer.step()
    assert watched.grad().fate is Fate.MOVED
    assert "no step was seen" in watched.grad().reason
    second.step()
    assert watched.grad().fate is Fate.ZEROED


def test_a_gradient_that_a_module_also_keeps_is_preserved() -> None:
    watched = Watched()
    watched.backward()
    watched.model.last_grad = watched.weight.grad
    watched.optimizer.step()
    assert watched.grad().fate is Fate.MOVED
    assert "model.last_grad" in watched.grad().reason


def test_a_gradient_handed_in_is_preserved() -> None:
    watched = Watched()
    watched.backward()
    watched.actor = Actor(watched.actor.models, watched.actor.optimizers, {"mine": [watched.weight.grad]})
    watched.optimizer.step()
    assert watched.grad().fate is Fate.MOVED
    assert "mine[0]" in watched.grad().reason


def test_a_gradient_in_a_larger_buffer_is_dead_only_with_all_of_it() -> None:
    watched = Watched()
    buffer = torch.zeros(20)
    watched.weight.grad = buffer[:16].view(4, 4)
    watched.optimizer.step()
    assert watched.grad().fate is Fate.MOVED
    assert "64 of the storage's 80 bytes" in watched.grad().reason


def test_flat_gradients_seen_from_masters_and_parameters_are_dead_together() -> None:
    situation = flat_buffers()
    rules = standard_rules()
    for rule in rules:
        rule.attach(situation.actor)
    assert situation.step is not None
    situation.step()
    [entry] = take_inventory(situation.actor, rules).by_component()["grads"]
    assert entry.fate is Fate.ZEROED
    next(iter(situation.actor.models["model"].parameters())).main_grad.add_(1.0)
    [entry] = take_inventory(situation.actor, rules).by_component()["grads"]
    assert entry.fate is Fate.MOVED


def test_a_sparse_gradient_is_moved() -> None:
    model = nn.Embedding(8, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    actor, rules = Actor({"model": model}, {"optimizer": optimizer}), standard_rules()
    for rule in rules:
        rule.attach(actor)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    grads = take_inventory(actor, rules).by_component()["grads"]
    assert {e.name for e in grads} == {"model.weight.grad.indices", "model.weight.grad.values"}
    assert {e.fate for e in grads} == {Fate.MOVED}


def test_a_gradient_without_a_version_is_moved() -> None:
    watched = Watched()
    with torch.inference_mode():
        watched.weight.grad = torch.ones(4, 4)
    watched.optimizer.step()
    assert watched.grad().fate is Fate.MOVED


def test_the_undo_forgets_what_was_seen() -> None:
    watched = Watched()
    watched.backward()
    watched.optimizer.step()
    for undo in watched.undo:
        undo()
    assert watched.grad().reason == "no step was seen"


def test_a_models_own_parameters_are_no_masters() -> None:
    watched = Watched()
    assert [c.role for c in TorchOptimRule().claims(watched.actor)] == []


def test_after_the_undo_no_step_is_seen() -> None:
    watched = Watched()
    for undo in watched.undo:
        undo()
    watched.backward()
    watched.optimizer.step()
    assert watched.grad().reason == "no step was seen"
    assert not watched.optimizer._optimizer_step_post_hooks


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_sharded_parameters_state_and_gradients_resolve_to_their_local_shards() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(7, 5)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    actor, rules = Actor({"model": model}, {"optimizer": optimizer}), standard_rules()
    for rule in rules:
        rule.attach(actor)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    inventory = take_inventory(actor, rules)
    assert inventory.left == []
    for parameter in model.parameters():
        assert parameter.grad is not None
        entry, grad = inventory.find(parameter), inventory.find(parameter.grad)
        moment = inventory.find(optimizer.state[parameter]["exp_avg"])
        assert entry is not None
        assert grad is not None
        assert moment is not None
        assert entry.role is Role.PARAM
        assert entry.storage._cdata == parameter.to_local().untyped_storage()._cdata  # type: ignore[attr-defined]
        assert grad.fate is Fate.ZEROED
        assert moment.role is Role.MOMENT
    model.weight.grad._local_tensor.add_(1.0)  # type: ignore[union-attr]
    grad = take_inventory(actor, rules).find(model.weight.grad)  # type: ignore[arg-type]
    assert grad is not None
    assert grad.fate is Fate.MOVED
