"""What every rule must do. Inherit `RuleContract` in the test of a new rule and give it a rule and an actor."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from torpor.inventory import take_inventory
from torpor.kinds import Fate
from torpor.rules.base import Actor, Claim, Rule

_MAY_CLAIM = {Fate.MOVED, Fate.REBUILT, Fate.DROPPED, Fate.ZEROED, Fate.KEPT, Fate.LEFT}


class RuleContract(ABC):
    """The promises of `torpor.rules.base.Rule`."""

    @abstractmethod
    def make_rule(self) -> Rule:
        """A new rule."""

    @abstractmethod
    def make_actor(self) -> Actor:
        """A new actor, nothing of it referenced elsewhere, of which the rule claims at least one storage."""

    def test_claims_plain_tensors_with_memory(self) -> None:
        for claim in self._claims():
            assert claim.fate in _MAY_CLAIM
            if claim.fate is Fate.LEFT:
                assert claim.reason
                continue
            assert claim.tensor.layout is torch.strided
            assert not claim.tensor.is_nested
            assert not hasattr(type(claim.tensor), "__tensor_flatten__")
            storage = claim.tensor.untyped_storage()
            assert storage.data_ptr() or not storage.nbytes()

    def test_claims_something(self) -> None:
        assert [claim for claim in self._claims() if claim.fate is not Fate.LEFT]

    def test_claims_are_named(self) -> None:
        for claim in self._claims():
            assert claim.name
            assert claim.component
            assert ".." not in claim.name
            assert not claim.name.startswith(".")

    def test_a_cheap_fate_comes_with_its_reason_and_its_means(self) -> None:
        for claim in self._claims():
            if claim.fate in (Fate.ZEROED, Fate.DROPPED, Fate.REBUILT, Fate.KEPT):
                assert claim.reason
            if claim.fate is Fate.DROPPED:
                assert claim.drop is not None
            if claim.fate is Fate.REBUILT:
                assert claim.rebuild is not None

    def test_asking_twice_gives_the_same_claims(self) -> None:
        rule, actor = self.make_rule(), self.make_actor()
        rule.attach(actor)
        assert _summary(list(rule.claims(actor))) == _summary(list(rule.claims(actor)))

    def test_asking_changes_nothing(self) -> None:
        rule, actor = self.make_rule(), self.make_actor()
        undo = rule.attach(actor)
        before = _footprint(actor)
        list(rule.claims(actor))
        undo()
        assert _footprint(actor) == before

    def test_claims_work_unattached_and_after_the_undo(self) -> None:
        rule, actor = self.make_rule(), self.make_actor()
        assert list(rule.claims(actor))
        rule.attach(actor)()
        assert list(rule.claims(actor))

    def test_holds_no_memory_between_calls(self) -> None:
        rule, actor = self.make_rule(), self.make_actor()
        rule.attach(actor)
        inventory = take_inventory(actor, [rule])
        watched = [StorageWeakRef(storage) for entry in inventory.entries for storage in entry.storages]
        del inventory, actor
        gc.collect()
        assert watched
        assert all(storage.expired() for storage in watched)

    def test_an_empty_actor_has_no_claims(self) -> None:
        rule = self.make_rule()
        rule.attach(Actor())
        assert list(rule.claims(Actor())) == []

    def _claims(self) -> list[Claim]:
        rule, actor = self.make_rule(), self.make_actor()
        rule.attach(actor)
        return list(rule.claims(actor))


def _summary(claims: list[Claim]) -> list[tuple[object, ...]]:
    return [(c.name, _identity(c), c.role, c.component, c.fate, c.reason) for c in claims]


def _identity(claim: Claim) -> int:
    return id(claim.tensor) if claim.fate is Fate.LEFT else claim.tensor.untyped_storage()._cdata


def _footprint(actor: Actor) -> dict[str, object]:
    """What a rule must leave as it is: hooks aside, what a checkpoint would hold."""
    footprint: dict[str, object] = {}
    for name, model in actor.models.items():
        state = model.state_dict()
        footprint[name] = {k: (v.data_ptr(), v._version) for k, v in state.items() if not is_lazy(v)}
    for name, optimizer in actor.optimizers.items():
        footprint[name] = sorted((id(key), sorted(map(str, value))) for key, value in optimizer.state.items())
    return footprint
