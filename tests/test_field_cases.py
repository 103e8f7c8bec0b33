"""What people run into, as tests: the situations of real threads that a CPU can show.

The promises' own files cover the rest: room at wake and half-done sleeps (all or nothing), the trajectory with
every optimizer (bit for bit), saving and computing while asleep, files of killed runs.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from torpor import Fate, Sleeper
from torpor.memory.kernel import process_resident_bytes
from zoo import Situation, flat_buffers, low_rank, mapped_from_disk, numpy_shared, peft_lora, shared_memory, zoo

MIB = 1024**2


def _sleeper(situation: Situation, directory: Path, **options: object) -> Sleeper:
    actor = situation.actor
    return Sleeper(
        actor.models,
        optimizer=actor.optimizers,
        extra=actor.extra,
        store_dir=directory,
        **options,  # type: ignore[arg-type]
    )


def _poison(nbytes: int = 64 * MIB) -> None:
    """Fill memory that is free by now, so that a page which never came back cannot look right by luck."""
    torch.full((nbytes,), 255, dtype=torch.uint8)


@pytest.mark.parametrize("make", [zoo, flat_buffers, low_rank, peft_lora, numpy_shared, shared_memory])
def test_every_live_tensor_survives_three_cycles(make: Callable[[], Situation], tmp_path: Path) -> None:
    situation = make()
    before, addresses = situation.bits(), situation.addresses()
    with _sleeper(situation, tmp_path) as sleeper:
        for _ in range(3):
            sleeper.sleep()
            _poison()
            sleeper.wake()
            assert situation.bits() == before
            assert situation.addresses() == addresses


def test_memory_mapped_from_a_file_is_kept_with_the_reason(tmp_path: Path) -> None:
    situation = mapped_from_disk(tmp_path)
    before = situation.bits()
    with _sleeper(situation, tmp_path) as sleeper:
        rows = [row for row in sleeper.sleep().rows if "mapped from the file" in row.reason]
        assert {row.fate for row in rows} == {Fate.KEPT}
        sleeper.wake()
    assert situation.bits() == before


def test_shared_memory_is_never_taken_from_other_processes(tmp_path: Path) -> None:
    situation = shared_memory()
    before = situation.bits()
    with _sleeper(situation, tmp_path) as sleeper, sleeper.asleep():
        assert situation.bits() == before  # while the rest sleeps


def test_aliases_of_flat_buffers_are_views_after_the_wake(tmp_path: Path) -> None:
    flat = torch.randn(8, 64, 256)
    params = [nn.Parameter(flat[i]) for i in range(8)]
    stray = flat.view(-1)[5:17]
    with Sleeper(extra={"params": params}, store_dir=tmp_path) as sleeper:
        ledger = sleeper.sleep()
        assert ledger.copied_bytes == flat.nbytes  # once, not once a view
        sleeper.wake()
    flat.view(-1)[5] = 7.0
    assert params[0].view(-1)[5].item() == 7.0
    assert stray[0].item() == 7.0


def test_a_frozen_base_crosses_once_and_a_merge_is_noticed(tmp_path: Path) -> None:
    base = [nn.Parameter(torch.randn(256, 1024), requires_grad=False) for _ in range(8)]
    a, b = nn.Parameter(torch.randn(256, 16)), nn.Parameter(torch.zeros(16, 1024))
    optimizer = torch.optim.AdamW([a, b])
    model = nn.ParameterList([*base, a, b])
    copied = []
    with Sleeper(model, optimizer=optimizer, store_dir=tmp_path) as sleeper:
        for _ in range(3):
            (base[0] + a @ b).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            copied.append(sleeper.sleep().copied_bytes)
            sleeper.wake()
        assert copied[1] < 0.05 * copied[0]
        base[0].data.add_((a @ b).detach())  # bumps no version counter that anybody watches
        merged = base[0].clone()
        assert sleeper.sleep("params").copied_bytes == base[0].nbytes
        sleeper.wake()
    assert torch.equal(base[0], merged)


def test_peft_adapters_stay_while_the_base_sleeps(tmp_path: Path) -> None:
    situation = peft_lora()
    with _sleeper(situation, tmp_path, keep=["adapters"]) as sleeper:
        rows = sleeper.sleep().rows
        assert {row.fate for row in rows if row.component == "adapters"} == {Fate.KEPT}
        assert Fate.MOVED in {row.fate for row in rows if row.component == "params"}


def test_host_memory_is_held_once(tmp_path: Path) -> None:
    """The pageable store holds at most 1.03 times the payload, and gives it back."""
    tensors = [torch.randn(1024, 1024) for _ in range(16)]
    payload = sum(t.nbytes for t in tensors)
    with Sleeper(extra={"params": tensors}, store="pageable") as sleeper:
        ledger = sleeper.sleep()
        assert payload <= ledger.host_bytes <= 1.03 * payload
        sleeper.wake()
        gc.collect()
        before = process_resident_bytes()
    gc.collect()
    assert before - process_resident_bytes() > 0.95 * payload  # close() gave it back


def test_a_component_of_the_users_own_sleeps_alone(tmp_path: Path) -> None:
    table, weights = torch.randn(512, 1024), torch.randn(512, 1024)
    with Sleeper(extra={"reference": {"w": weights}, "tables": [table]}, store_dir=tmp_path) as sleeper:
        ledger = sleeper.sleep("reference")
        assert ledger.bytes_by_component() == {"reference": weights.nbytes}
        assert sleeper.read(weights).ne(0).any()
        assert table.ne(0).any()
        sleeper.wake()


def test_a_storage_replaced_while_awake_gives_its_slot_back(tmp_path: Path) -> None:
    holder = {"w": torch.randn(512, 1024)}
    with Sleeper(extra={"params": holder}, store_dir=tmp_path) as sleeper:
        sizes = []
        for _ in range(5):
            holder["w"] = torch.randn(512, 1024)
            sizes.append(sleeper.sleep().store_bytes)
            sleeper.wake()
    assert len(set(sizes)) == 1


def test_a_sleeper_holds_nothing_alive_while_awake(tmp_path: Path) -> None:
    tensor = torch.randn(512, 1024)
    holder = {"w": tensor}
    alive = weakref.ref(tensor)
    with Sleeper(extra={"params": holder}, store_dir=tmp_path) as sleeper:
        sleeper.sleep()
        sleeper.wake()
        del tensor, holder["w"]
        gc.collect()
        assert alive() is None
