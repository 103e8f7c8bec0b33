"""The inventory: every byte in one entry, the strongest role, the most careful fate, whatever the order."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torpor.inventory import Entry, Inventory, take_inventory
from torpor.kinds import Fate, Role
from torpor.rules.base import Actor, Claim, Gate, Rebuild, Standing
from torpor.rules.standard import standard_rules
from zoo import SITUATIONS, Situation, half_overlapping, mapped_from_disk, numpy_shared


class Stated:
    """A rule that claims what it is told."""

    name = "stated"

    def __init__(self, claims: Sequence[Claim]) -> None:
        self._claims = claims

    def attach(self, actor: Actor) -> Callable[[], None]:
        return lambda: None

    def claims(self, actor: Actor) -> Iterator[Claim]:
        return iter(self._claims)


def inventory_of(*claims: Claim) -> Inventory:
    return take_inventory(Actor(), [Stated(claims)])


def entry_of(*claims: Claim) -> Entry:
    [entry] = inventory_of(*claims).entries
    return entry


def some(tensor: torch.Tensor, role: Role = Role.OTHER, fate: Fate = Fate.MOVED, **more: object) -> Claim:
    defaults = {"name": str(role), "component": str(role), "reason": f"{fate} says {role}"}
    return Claim(tensor=tensor, role=role, fate=fate, **(defaults | more))  # type: ignore[arg-type]


def drop() -> None:
    """Stands for an owner's way to clear its cache."""


# Whole actors


@pytest.mark.parametrize("name", SITUATIONS)
def test_every_byte_of_every_situation_is_in_one_entry(name: str) -> None:
    situation = SITUATIONS[name]()
    _check_complete(situation)
    if situation.step is not None:
        situation.step()
        _check_complete(situation)


def test_mapped_files_are_in_one_entry_each(tmp_path: Path) -> None:
    _check_complete(mapped_from_disk(tmp_path))


def _check_complete(situation: Situation) -> None:
    inventory = take_inventory(situation.actor, standard_rules())
    assert inventory.left == []
    check_disjoint(inventory.entries)
    for name, tensor in situation.live.items():
        entry = inventory.find(tensor)
        assert entry is not None, name
        storage = tensor.untyped_storage()
        assert entry.address <= storage.data_ptr()
        assert storage.data_ptr() + storage.nbytes() <= entry.address + entry.nbytes


def check_disjoint(entries: Sequence[Entry]) -> None:
    spans = sorted((e.address, e.address + e.nbytes) for e in entries if e.nbytes)
    for (_, end), (begin, _) in pairwise(spans):
        assert end <= begin


def test_nothing_of_the_inventory_stays_alive() -> None:
    model = nn.Linear(100, 100)
    watched = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
    rules = standard_rules()
    actor = Actor({"model": model})
    take_inventory(actor, rules)
    del model, actor
    assert all(w.expired() for w in watched)


# One storage, several claims


def test_the_strongest_role_gives_component_and_first_name() -> None:
    t = torch.zeros(4)
    entry = entry_of(some(t, Role.OTHER), some(t[1:], Role.PARAM), some(t, Role.BUFFER))
    assert (entry.role, entry.component, entry.names) == (Role.PARAM, "param", ("param", "buffer", "other"))
    assert entry.shape == (3,)


def test_an_adapter_is_more_than_a_parameter() -> None:
    t = torch.zeros(4)
    assert entry_of(some(t, Role.PARAM), some(t, Role.ADAPTER)).component == "adapter"


def test_a_name_said_twice_is_listed_once() -> None:
    t = torch.zeros(4)
    assert entry_of(some(t), some(t)).names == ("other",)


@pytest.mark.parametrize("fate", [Fate.ZEROED, Fate.DROPPED])
def test_a_fate_that_gives_up_contents_needs_every_claim(fate: Fate) -> None:
    t = torch.zeros(4)
    agree = some(t, Role.GRAD, fate, drop=drop)
    assert entry_of(agree, agree).fate is fate
    entry = entry_of(agree, some(t[:1], Role.OTHER, name="stray", reason=""))
    assert (entry.fate, entry.reason) == (Fate.MOVED, f"not {fate}: stray (other) is to be moved")


def test_two_different_cheap_fates_are_none() -> None:
    t = torch.zeros(4)
    entry = entry_of(some(t, Role.GRAD, Fate.ZEROED), some(t, Role.OTHER, Fate.DROPPED, drop=drop))
    assert entry.fate is Fate.MOVED
    assert "not zeroed: other (other) is to be dropped" in entry.reason


def test_kept_wins_over_everything() -> None:
    t = torch.zeros(4)
    for other in (Fate.ZEROED, Fate.DROPPED, Fate.MOVED):
        entry = entry_of(some(t, Role.PARAM, other), some(t[:1], Role.OTHER, Fate.KEPT, reason="pinned"))
        assert (entry.fate, entry.reason) == (Fate.KEPT, "pinned")


def test_a_place_yields_to_who_knows_the_same_role() -> None:
    t = torch.zeros(4)
    place = some(t, Role.GRAD, standing=Standing.FOUND, reason="")
    assert entry_of(place, some(t, Role.GRAD, Fate.ZEROED)).fate is Fate.ZEROED
    assert entry_of(place, some(t, Role.GRAD, reason="no step")).reason == "no step"


def test_a_place_of_another_role_does_not_yield_to_a_rule() -> None:
    t = torch.zeros(4)
    place = some(t, Role.OTHER, standing=Standing.FOUND)
    assert entry_of(place, some(t, Role.GRAD, Fate.ZEROED)).fate is Fate.MOVED


def test_a_place_yields_to_the_user_and_then_gives_no_component() -> None:
    t = torch.zeros(4)
    place = some(t, Role.BUFFER, standing=Standing.FOUND)
    word = some(t, Role.WORKSPACE, Fate.DROPPED, standing=Standing.DECLARED, drop=drop)
    entry = entry_of(place, word)
    assert (entry.fate, entry.component, entry.drops) == (Fate.DROPPED, "workspace", (drop,))
    assert entry_of(place, word, some(t, Role.OTHER)).fate is Fate.MOVED


def test_an_owner_speaks_for_every_view_in_the_same_role_and_for_no_other() -> None:
    t = torch.zeros(4)
    owner = some(t, Role.GRAD, Fate.ZEROED, standing=Standing.OWNED)
    view, place = some(t[:1], Role.GRAD), some(t[1:], Role.OTHER, standing=Standing.FOUND)
    assert entry_of(view, place, owner).fate is Fate.ZEROED
    assert entry_of(view, owner, some(t, Role.OTHER, reason="handed in")).fate is Fate.MOVED
    assert entry_of(some(t, Role.GRAD, Fate.ZEROED), some(t, Role.GRAD, standing=Standing.OWNED)).fate is Fate.MOVED
    assert entry_of(owner, some(t[:1], Role.GRAD, Fate.KEPT, reason="pinned")).fate is Fate.KEPT


def test_a_rebuild_may_read_what_is_rebuilt_from_what_is_not() -> None:
    first, second, third, fourth = torch.zeros(4), torch.zeros(4), torch.zeros(4), torch.zeros(4)

    def rebuilt(out: torch.Tensor, source: torch.Tensor) -> Claim:
        how = Rebuild(lambda out, source: None, (source,))
        return some(out, Role.OTHER, Fate.REBUILT, rebuild=how)

    claims = [some(first), rebuilt(second, first), rebuilt(third, second), rebuilt(fourth, third)]
    fates = [entry.fate for entry in inventory_of(*claims).entries]
    assert fates == [Fate.MOVED, Fate.REBUILT, Fate.REBUILT, Fate.MOVED]


def test_gates_close() -> None:
    t = torch.zeros(4)
    gates = (Gate(lambda: True, "first"), Gate(lambda: False, "second"))
    entry = entry_of(some(t, Role.OTHER, Fate.DROPPED, drop=drop, gates=gates))
    assert (entry.fate, entry.reason, entry.drops) == (Fate.MOVED, "second", ())


def test_with_rebuilt_the_first_claim_is_what_to_rebuild() -> None:
    t = torch.zeros(4)
    how = Rebuild(lambda out: None, ())
    place = some(t.view(2, 2), Role.OTHER, standing=Standing.FOUND)
    entry = entry_of(place, some(t, Role.OTHER, Fate.REBUILT, rebuild=how))
    assert (entry.fate, entry.rebuild) == (Fate.REBUILT, how)
    assert entry.claims[0].tensor is t
    assert entry_of(some(t, Role.OTHER, Fate.REBUILT)).fate is Fate.MOVED


def test_halves_cannot_be_rebuilt_by_one_call() -> None:
    t, how = torch.zeros(4), Rebuild(lambda out: None, ())
    halves = [some(part, Role.OTHER, Fate.REBUILT, rebuild=how) for part in (t[:2], t[2:])]
    entry = entry_of(*halves)
    assert (entry.fate, entry.rebuild) == (Fate.MOVED, None)


@pytest.mark.parametrize(
    ("view", "dense"),
    [
        (lambda t: t, True),
        (lambda t: t.view(4, 6).t(), True),
        (lambda t: t.view(2, 3, 4).permute(2, 0, 1), True),
        (lambda t: t[::2], False),
        (lambda t: t[:1].expand(24), False),
        (lambda t: t.view(4, 6)[:, :5], False),
        (lambda t: t.as_strided((2, 3), (2, 2)), False),
    ],
)
def test_only_claims_that_cover_every_byte_give_up_contents(
    view: Callable[[torch.Tensor], torch.Tensor], dense: bool
) -> None:
    entry = entry_of(some(view(torch.zeros(24)), Role.GRAD, Fate.ZEROED))
    assert (entry.fate is Fate.ZEROED) == dense


def test_pieces_cover_together() -> None:
    t = torch.zeros(24)
    pieces = [some(t[a:b], Role.GRAD, Fate.ZEROED) for a, b in [(0, 10), (8, 20), (20, 24)]]
    assert entry_of(*pieces).fate is Fate.ZEROED
    assert entry_of(*pieces[:2]).fate is Fate.MOVED
    assert entry_of(pieces[0], pieces[2]).reason == "not zeroed: the claims cover 56 of the storage's 96 bytes"


def test_forgetting_lets_the_owner_free_its_memory() -> None:
    holder = [torch.zeros(1000)]
    entry = entry_of(some(holder[0], Role.OTHER, Fate.DROPPED, drop=holder.clear))
    watched = StorageWeakRef(entry.storage)
    entry.forget()
    assert not watched.expired()
    [clear] = entry.drops
    clear()
    assert watched.expired()
    assert (entry.name, entry.nbytes, entry.dtype, tuple(entry.shape)) == ("other", 4000, torch.float32, (1000,))


# Several storages, one memory


def test_storages_over_the_same_memory_are_one_entry() -> None:
    situation = numpy_shared()
    inventory = take_inventory(situation.actor, standard_rules())
    entry = inventory.find(situation.live["part"])
    assert entry is not None
    assert entry.names == ("arrays.whole", "arrays.again", "arrays.part")
    assert len(entry.storages) == 3
    assert entry.nbytes == 160_000
    assert entry.storages[0] is entry.storage
    assert entry.storage.nbytes() == entry.nbytes
    assert len(inventory.entries) == 2


def test_a_claim_on_the_contained_storage_counts_for_all() -> None:
    whole = torch.zeros(100)
    part = torch.from_numpy(whole.numpy()[10:20])
    entry = entry_of(some(whole, Role.GRAD, Fate.ZEROED), some(part, Role.PARAM))
    assert (entry.fate, entry.role) == (Fate.MOVED, Role.PARAM)
    assert entry.storage._cdata == whole.untyped_storage()._cdata


def test_storages_that_overlap_in_part_are_kept_together() -> None:
    inventory = take_inventory(half_overlapping().actor, standard_rules())
    [entry] = inventory.entries
    assert (entry.fate, entry.nbytes) == (Fate.KEPT, 120_000)
    assert entry.reason == "separate storages overlap in part: arrays[0], arrays[1]"


def test_neighbours_are_not_merged() -> None:
    array = np.zeros(20, dtype=np.float32)
    low, high = torch.from_numpy(array[:10]), torch.from_numpy(array[10:])
    assert len(inventory_of(some(low), some(high)).entries) == 2


def test_empty_storages_are_listed_with_no_bytes() -> None:
    entries = inventory_of(some(torch.zeros(0)), some(torch.zeros(3)[:0])).entries
    assert sorted(e.nbytes for e in entries) == [0, 12]


def test_a_storage_that_was_emptied_is_listed_with_no_bytes() -> None:
    t = torch.zeros(10)
    t.untyped_storage().resize_(0)
    entry = entry_of(some(t, Role.PARAM))
    assert (entry.nbytes, entry.fate) == (0, Fate.MOVED)


def test_what_has_no_memory_is_left_even_if_a_rule_claims_it() -> None:
    inventory = inventory_of(some(torch.zeros(3, device="meta")))
    assert inventory.entries == []
    assert [claim.fate for claim in inventory.left] == [Fate.LEFT]


# Order and finding


def test_entries_are_ordered_by_component_then_name() -> None:
    claims = [
        some(torch.zeros(1), name=name, component=component)
        for component, name in [("late", "b"), ("early", "z"), ("late", "a"), ("early", "y")]
    ]
    inventory = inventory_of(*claims)
    assert [e.name for e in inventory.entries] == ["a", "b", "y", "z"]
    assert list(inventory.by_component()) == ["late", "early"]


def test_find_goes_by_storage_then_by_memory() -> None:
    t = torch.zeros(100)
    inventory = inventory_of(some(t), some(torch.zeros(5), name="else"))
    assert inventory.find(t[3:]) is inventory.find(t) is not None
    assert inventory.find(torch.from_numpy(t.numpy()[50:60])) is inventory.find(t)
    assert inventory.find(torch.zeros(100)) is None
    assert inventory.find(torch.zeros(0)) is None
    assert inventory.find(torch.zeros(3, device="meta")) is None


# Any graph of aliases

_FATES = [Fate.MOVED, Fate.ZEROED, Fate.DROPPED, Fate.KEPT]


@st.composite
def _graphs(draw: st.DrawFn) -> list[Claim]:
    """Claims on random views of random storages, some of which share memory that numpy owns."""
    claims = []
    pool = np.zeros(64, dtype=np.float32)
    for index in range(draw(st.integers(1, 6))):
        if draw(st.booleans()):
            begin = draw(st.integers(0, 60))
            storage = torch.from_numpy(pool[begin : draw(st.integers(begin, 64))])
        else:
            storage = torch.zeros(draw(st.integers(0, 20)))
        for number in range(draw(st.integers(1, 3))):
            begin = draw(st.integers(0, storage.numel()))
            tensor = storage[begin : draw(st.integers(begin, storage.numel()))] if draw(st.booleans()) else storage
            role = draw(st.sampled_from(list(Role)))
            fate = draw(st.sampled_from(_FATES))
            standing = draw(st.sampled_from(list(Standing)))
            claims.append(some(tensor, role, fate, name=f"{index}.{number}", standing=standing, drop=drop))
    return claims


def _span(claim: Claim) -> tuple[int, int]:
    storage = claim.tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _inside(claim: Claim, entry: Entry) -> bool:
    begin, end = _span(claim)
    if begin == end:
        return claim.tensor.untyped_storage()._cdata == entry.storage._cdata
    return entry.address <= begin and end <= entry.address + entry.nbytes


@settings(deadline=None, max_examples=200)
@given(_graphs())
def test_each_byte_is_in_one_entry_and_each_claim_too(claims: list[Claim]) -> None:
    entries = inventory_of(*claims).entries
    check_disjoint(entries)
    for claim in claims:
        assert [claim in entry.claims for entry in entries].count(True) == 1
        assert [_inside(claim, entry) for entry in entries].count(True) == 1
    claimed = {byte for claim in claims for byte in range(*_span(claim))}
    assert sum(entry.nbytes for entry in entries) == len(claimed)


@settings(deadline=None, max_examples=200)
@given(_graphs())
def test_the_strongest_role_wins(claims: list[Claim]) -> None:
    for entry in inventory_of(*claims).entries:
        declared = any(c.standing >= Standing.DECLARED for c in entry.claims)
        heard = [c for c in entry.claims if not (declared and c.standing is Standing.FOUND)]
        strongest = min((c.role is not Role.ADAPTER, c.role.rank) for c in heard)
        assert (entry.role is not Role.ADAPTER, entry.role.rank) == strongest
        assert entry.component == str(entry.role)


@settings(deadline=None, max_examples=200)
@given(_graphs())
def test_contents_are_given_up_only_where_nobody_minds(claims: list[Claim]) -> None:
    for entry in inventory_of(*claims).entries:
        fates = {c.fate for c in entry.claims}
        if Fate.KEPT in fates:
            assert entry.fate is Fate.KEPT
        if entry.fate in (Fate.ZEROED, Fate.DROPPED):
            owned = {c.role for c in entry.claims if c.standing is Standing.OWNED and c.fate is entry.fate}
            against = [c for c in entry.claims if c.fate is not entry.fate]
            assert all(
                c.standing is Standing.FOUND or (c.role in owned and c.standing is not Standing.OWNED) for c in against
            )
            for_it = [c for c in entry.claims if c.fate is entry.fate and c.tensor.numel()]
            covered = {b for c in for_it for b in range(c.tensor.data_ptr(), c.tensor.data_ptr() + c.tensor.nbytes)}
            assert len(covered) == entry.nbytes


@settings(deadline=None, max_examples=200)
@given(_graphs(), st.randoms(use_true_random=False))
def test_fates_do_not_depend_on_the_order(claims: list[Claim], random: object) -> None:
    def fates(some_claims: Sequence[Claim]) -> dict[tuple[int, int], tuple[Fate, int, Role]]:
        entries = inventory_of(*some_claims).entries
        return {(e.address, e.storage._cdata if not e.nbytes else 0): (e.fate, e.nbytes, e.role) for e in entries}

    shuffled = [replace(claim) for claim in claims]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert fates(claims) == fates(shuffled)


@st.composite
def _modules(draw: st.DrawFn) -> tuple[nn.Module, dict[str, object], list[torch.Tensor]]:
    """A module whose tensors are random views, hung at random places; what is handed in; all of its tensors."""
    model = nn.Sequential(nn.Module(), nn.Module())
    bases = [torch.zeros(draw(st.integers(0, 12))) for _ in range(draw(st.integers(1, 4)))]
    everything: list[torch.Tensor] = []
    extra: list[object] = []
    for index in range(draw(st.integers(1, 10))):
        base = draw(st.sampled_from(bases))
        begin = draw(st.integers(0, base.numel()))
        tensor = base[begin:]
        everything.append(tensor)
        home = model[draw(st.integers(0, 1))]
        place = draw(st.sampled_from(["parameter", "buffer", "scratch", "attribute", "nested", "grad", "extra"]))
        name = f"t{index}"
        if place == "parameter":
            home.register_parameter(name, nn.Parameter(tensor))
        elif place in ("buffer", "scratch"):
            home.register_buffer(name, tensor, persistent=place == "buffer")
        elif place == "attribute":
            setattr(home, name, tensor)
        elif place == "nested":
            setattr(home, name, {"a": [(tensor, None)], "b": {3: tensor.view(-1)}})
        elif place == "grad":
            owner = nn.Parameter(torch.zeros_like(tensor))
            owner.grad = tensor
            home.register_parameter(name, owner)
            everything.append(owner)
        else:
            extra.append({"deep": [tensor]})
    return model, {"extra": extra} if extra else {}, everything


@settings(deadline=None, max_examples=200)
@given(_modules())
def test_every_tensor_of_any_module_is_found(made: tuple[nn.Module, dict[str, object], list[torch.Tensor]]) -> None:
    model, extra, everything = made
    inventory = take_inventory(Actor({"model": model}, extra=extra), standard_rules())
    check_disjoint(inventory.entries)
    storages = {s._cdata for e in inventory.entries for s in e.storages}
    assert storages == {t.untyped_storage()._cdata for t in everything}
    assert sum(e.nbytes for e in inventory.entries) == sum(
        {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in everything}.values()
    )


# Speed


def _seconds(count: int) -> float:
    parameters = nn.ParameterList([nn.Parameter(torch.zeros(256)) for _ in range(count)])
    actor, rules = Actor({"model": parameters}, extra={"extra": list(parameters)}), standard_rules()
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        inventory = take_inventory(actor, rules)
        best = min(best, time.perf_counter() - begin)
    assert len(inventory.entries) == count
    return best


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was_even_after_an_error(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        inventory_of(some(torch.zeros(1)))
        assert gc.isenabled() == enabled
        with pytest.raises(AttributeError):
            inventory_of(None)  # type: ignore[arg-type]
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if was_enabled else gc.disable()


def test_the_cost_of_a_storage_does_not_grow_with_their_number() -> None:
    few, many = _seconds(1_000), _seconds(20_000)
    assert many < 60 * few  # 20 times, with room for a busy machine
    assert many < 1.0  # 0.16 s on two idle cores
