"""The user's own caches: what a declaration reaches, and where it stops."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from contracts.rule_contract import RuleContract
from torpor.errors import UsageError
from torpor.inventory import Entry, take_inventory
from torpor.kinds import Fate, Role
from torpor.rules.base import Actor, Gate, Rule
from torpor.rules.derived import Derived, DerivedRule, derived
from torpor.rules.standard import standard_rules


class Rotary(nn.Module):
    """A module with what users declare: a frequency table as non-persistent buffer, a cache, a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("inv_freq", torch.zeros(8), persistent=False)
        self.register_buffer("steps", torch.zeros(8))
        self.cache: dict[str, torch.Tensor] = {"cos": torch.zeros(16), "sin": torch.zeros(16)}
        fill(self.inv_freq)


def fill(out: torch.Tensor, *sources: torch.Tensor) -> None:
    out.copy_(1.0 / 10_000 ** (torch.arange(8) / 8))


def nothing() -> None:
    """A drop that forgets to drop."""


class TestContract(RuleContract):
    def make_rule(self) -> Rule:
        return DerivedRule()

    def make_actor(self) -> Actor:
        model = Rotary()
        return Actor(
            {"model": model},
            derived=[
                derived("rope", lambda: model.cache, drop=model.cache.clear),
                derived("inv_freq", lambda: model.inv_freq, rebuild=fill),
                derived("steps", model.steps, drop=nothing),
            ],
        )


def _entry(model: nn.Module, tensor: torch.Tensor, *records: Derived, **extra: Any) -> Entry:
    actor = Actor({"model": model}, extra=extra, derived=records)
    entry = take_inventory(actor, standard_rules()).find(tensor)
    assert entry is not None
    return entry


def test_a_plain_attribute_is_the_users_to_declare() -> None:
    model = Rotary()
    entry = _entry(model, model.cache["cos"], derived("rope", lambda: model.cache, drop=model.cache.clear))
    assert (entry.fate, entry.component, entry.role) == (Fate.DROPPED, "caches", Role.WORKSPACE)
    assert entry.drops == (model.cache.clear,)
    assert entry.names == ("rope.cos", "model.cache.cos")


def test_a_non_persistent_buffer_is_the_users_to_declare() -> None:
    model = Rotary()
    source = model.weight.detach()
    record = derived("rope", lambda: model.inv_freq, rebuild=fill, sources=[source], component="rope")
    entry = _entry(model, model.inv_freq, record)
    assert (entry.fate, entry.component) == (Fate.REBUILT, "rope")
    assert entry.rebuild is not None
    assert entry.rebuild.sources[0] is source
    assert entry.claims[0].tensor is model.inv_freq


@pytest.mark.parametrize(
    ("take", "why"),
    [
        (lambda m: m.weight.detach(), "model.weight (param)"),
        (lambda m: m.steps, "model.steps (buffer)"),
        (lambda m: m.weight.detach()[1:3], "model.weight (param)"),
    ],
)
def test_what_has_a_meaning_of_its_own_is_moved(take: Any, why: str) -> None:
    model = Rotary()
    tensor = take(model)
    entry = _entry(model, tensor, derived("cache", lambda: tensor, drop=nothing))
    assert entry.fate is Fate.MOVED
    assert why in entry.reason
    assert "not dropped" in entry.reason
    assert entry.drops == ()


def test_what_is_handed_in_as_well_is_moved() -> None:
    model = Rotary()
    record = derived("cache", lambda: model.cache["cos"], drop=nothing)
    entry = _entry(model, model.cache["cos"], record, mine=[model.cache["cos"]])
    assert entry.fate is Fate.MOVED
    assert "mine[0]" in entry.reason


def test_optimizer_state_cannot_be_declared_away() -> None:
    model = Rotary()
    optimizer = torch.optim.SGD([model.weight], momentum=0.9)
    model.weight.grad = torch.zeros(4)
    optimizer.step()
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    record = derived("momentum", lambda: momentum, drop=nothing)
    actor = Actor({"model": model}, {"optimizer": optimizer}, derived=[record])
    entry = take_inventory(actor, standard_rules()).find(momentum)
    assert entry is not None
    assert (entry.fate, entry.component) == (Fate.MOVED, "optimizer")


def test_a_view_of_a_larger_storage_is_moved() -> None:
    model, pool = Rotary(), torch.zeros(100)
    entry = _entry(model, pool, derived("part", lambda: pool[:50], drop=nothing))
    assert entry.fate is Fate.MOVED
    assert "200 of the storage's 400 bytes" in entry.reason


def test_two_views_that_cover_the_storage_together_are_dropped() -> None:
    model, pool = Rotary(), torch.zeros(10, 10)
    record = derived("both", lambda: [pool[:6], pool[5:].t()], drop=nothing)
    assert _entry(model, pool, record).fate is Fate.DROPPED


def test_a_closed_gate_moves_with_its_reason_and_is_asked_anew_each_time() -> None:
    model = Rotary()
    captured: list[int] = []
    gate = Gate(lambda: not captured, "a graph was captured")
    record = derived("rope", lambda: model.cache, drop=model.cache.clear, gates=[gate])
    assert _entry(model, model.cache["cos"], record).fate is Fate.DROPPED
    captured.append(1)
    entry = _entry(model, model.cache["cos"], record)
    assert (entry.fate, entry.reason) == (Fate.MOVED, "a graph was captured")


def test_a_gate_is_asked_once_an_inventory() -> None:
    asked: list[int] = []
    gate = Gate(lambda: not asked.append(1), "")  # type: ignore[func-returns-value]
    tensors = [torch.zeros(3) for _ in range(10)]
    record = derived("many", lambda: tensors, drop=nothing, gates=[gate])
    take_inventory(Actor(derived=[record]), standard_rules())
    assert len(asked) == 1


@pytest.mark.parametrize("empty", [None, [], {}, [[], {}]])
def test_an_empty_cache_is_fine(empty: object) -> None:
    for record in (derived("c", lambda: empty, drop=nothing), derived("c", lambda: empty, rebuild=fill)):
        assert take_inventory(Actor(derived=[record]), standard_rules()).entries == []


def test_a_declared_tensor_is_not_kept_alive() -> None:
    holder = {"t": torch.zeros(1000)}
    watched = StorageWeakRef(holder["t"].untyped_storage())
    record = derived("t", holder, drop=holder.clear)
    assert len(take_inventory(Actor(derived=[record]), standard_rules()).entries) == 1
    holder.clear()
    gc.collect()
    assert watched.expired()
    assert take_inventory(Actor(derived=[record]), standard_rules()).entries == []


def test_a_rebuild_from_a_parameter_leaves_no_graph_behind() -> None:
    model = Rotary()
    record = derived("t", lambda: model.inv_freq, rebuild=lambda out, w: out[:4].copy_(w), sources=lambda: model.weight)
    entry = _entry(model, model.inv_freq, record)
    assert entry.rebuild is not None
    entry.rebuild.fn(model.inv_freq, *entry.rebuild.sources)
    assert torch.equal(model.inv_freq[:4], model.weight)
    assert not model.inv_freq.requires_grad


def test_without_its_source_a_rebuild_is_a_move() -> None:
    out, source = torch.zeros(8), [torch.zeros(3)]
    record = derived("t", lambda: out, rebuild=fill, sources=source)
    actor = Actor(derived=[record])
    [entry] = take_inventory(actor, standard_rules()).entries
    assert entry.fate is Fate.REBUILT
    del entry
    source.clear()
    gc.collect()
    [entry] = take_inventory(actor, standard_rules()).entries
    assert entry.fate is Fate.MOVED
    assert "'t': a source" in entry.reason


def test_a_source_that_gives_up_its_contents_is_no_source() -> None:
    first, second = torch.zeros(8), torch.zeros(8)
    records = [
        derived("first", lambda: first, drop=nothing),
        derived("second", lambda: second, rebuild=fill, sources=lambda: first),
    ]
    entry = take_inventory(Actor(derived=records), standard_rules()).find(second)
    assert entry is not None
    assert (entry.fate, entry.reason) == (Fate.MOVED, "not rebuilt: its source first is dropped")


def test_a_tensor_is_no_source_of_itself() -> None:
    whole = torch.zeros(8)
    record = derived("t", lambda: whole, rebuild=fill, sources=lambda: whole[:4])
    [entry] = take_inventory(Actor(derived=[record]), standard_rules()).entries
    assert (entry.fate, entry.reason) == (Fate.MOVED, "not rebuilt: its source shares its memory")


def test_two_ways_for_one_storage_are_none() -> None:
    whole = torch.zeros(8)
    records = [
        derived("a", lambda: whole, rebuild=fill),
        derived("b", lambda: whole, rebuild=fill),
    ]
    [entry] = take_inventory(Actor(derived=records), standard_rules()).entries
    assert entry.fate is Fate.MOVED
    assert "several rebuilds" in entry.reason
    records[1] = derived("b", lambda: whole, drop=nothing)
    [entry] = take_inventory(Actor(derived=records), standard_rules()).entries
    assert entry.fate is Fate.MOVED


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "exactly one of drop= and rebuild="),
        ({"drop": nothing, "rebuild": fill}, "exactly one of drop= and rebuild="),
        ({"drop": 3}, "drop= is a int"),
        ({"rebuild": "fill"}, "rebuild= is a str"),
        ({"drop": nothing, "sources": [torch.zeros(1)]}, "sources="),
        ({"drop": nothing, "gates": [True]}, "gates= has a bool"),
        ({"drop": nothing, "component": ""}, "component="),
        ({"drop": nothing, "role": "cache"}, "role='cache'"),
        ({"drop": nothing, "tensors": None}, "tensors= is None"),
        ({"drop": nothing, "tensors": 3}, "tensors= gave a int"),
        ({"drop": nothing, "tensors": [nn.Linear(1, 1)]}, "holds a Linear"),
        ({"rebuild": fill, "sources": 3}, "sources= gave a int"),
    ],
)
def test_misuse_is_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        derived("rope", **{"tensors": torch.zeros(1), **arguments})
    assert words in str(caught.value)
    assert "derived 'rope'" in str(caught.value)
    assert caught.value.name == "rope"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["", 3, None])
def test_a_declaration_needs_a_name(name: Any) -> None:
    with pytest.raises(UsageError, match="the name is"):
        derived(name, torch.zeros(1), drop=nothing)


def test_what_a_callable_gives_is_checked_when_it_gives_it() -> None:
    record = derived("rope", lambda: 3, drop=nothing)
    with pytest.raises(UsageError, match="derived 'rope': tensors= gave a int"):
        take_inventory(Actor(derived=[record]), standard_rules())


def test_a_rebuild_of_several_tensors_is_refused() -> None:
    record = derived("rope", lambda: [torch.zeros(1), torch.zeros(1)], rebuild=fill)
    with pytest.raises(UsageError, match="declare each by itself"):
        take_inventory(Actor(derived=[record]), standard_rules())


def test_a_rebuild_of_a_tensor_in_parts_is_refused() -> None:
    record = derived("rope", lambda: torch.eye(3).to_sparse(), rebuild=fill)
    with pytest.raises(UsageError, match="rebuild= needs a plain tensor"):
        take_inventory(Actor(derived=[record]), standard_rules())


def test_records_are_checked_when_they_are_handed_over() -> None:
    record = derived("rope", torch.zeros(1), drop=nothing)
    with pytest.raises(UsageError, match=r"derived\[1\] is a str"):
        DerivedRule().attach(Actor(derived=[record, "rope"]))
    with pytest.raises(UsageError, match="declared twice"):
        DerivedRule().attach(Actor(derived=[record, record]))
