"""FSDP2 in several processes: sleeping between steps changes no bit, whatever the mesh and the policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from sharded import ODD, WIDTH, ShardedActor, bits, local
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torpor import Sleeper
from torpor.errors import AsleepError, StateError
from torpor.kinds import Fate, Role

POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed": {"mixed": True},
    "resident": {"reshard_after_forward": False},
    "fused": {"fused": True},
    "hsdp": {"mesh": (2, 2)},
    "hsdp-post-forward": {"mesh": (1, 4), "reshard_after_forward": 2},
}


def _world_size(policy: dict[str, Any]) -> int:
    return 4 if "mesh" in policy else 2


def _train(policy: dict[str, Any], memory: str | None) -> tuple[list[float], dict[str, bytes]]:
    """Steps with a sleep between any two, some right after an evaluation; without a sleep if no memory."""
    actor = ShardedActor(**policy)
    sleeper = Sleeper(actor.model, optimizer=actor.optimizer, memory=memory) if memory else None
    losses = []
    for k in range(3):
        if k % 2:
            with torch.no_grad():
                losses.append(actor.forward(50 + k).item())
        if sleeper is not None:
            sleeper.sleep()
            sleeper.wake()
        losses.append(actor.step(k))
    if sleeper is not None:
        sleeper.close()
    return losses, actor.bits()


def _compare(policy: dict[str, Any]) -> list[str]:
    """Which ways differ from the run that never slept."""
    awake = _train(policy, None)
    return [memory for memory in ("madvise", "resize") if _train(policy, memory) != awake]


@pytest.mark.parametrize("name", POLICIES)
def test_sleeping_between_all_steps_changes_no_bit(name: str) -> None:
    policy = POLICIES[name]
    assert run_ranks(_compare, policy, world_size=_world_size(policy)) == [[]] * _world_size(policy)


def _tensors_and_their_places() -> dict[str, Any]:
    actor = ShardedActor()
    actor.step(0)
    objects = [*actor.model.parameters(), *(v for s in actor.optimizer.state.values() for v in s.values())]
    inner = [local(t) for t in objects]
    handle = actor.model[0]._get_fsdp_state()._fsdp_param_groups[0]
    padded = [p._sharded_param_data for p in handle.fsdp_params]
    before = [bits(t) for t in objects]
    with Sleeper(actor.model, optimizer=actor.optimizer, memory="resize") as sleeper:
        ledger = sleeper.sleep()
        gone = [t.untyped_storage().nbytes() for t in padded]
        sleeper.wake()
    return {
        "same objects": all(
            a is b
            for a, b in zip(
                objects,
                [*actor.model.parameters(), *(v for s in actor.optimizer.state.values() for v in s.values())],
                strict=True,
            )
        ),
        "same parts": all(
            a.untyped_storage()._cdata == local(b).untyped_storage()._cdata for a, b in zip(inner, objects, strict=True)
        ),
        "same bits": before == [bits(t) for t in objects],
        "padded buffers freed": not any(gone),
        "are the shards": all(
            p._sharded_param_data.untyped_storage()._cdata == local(p.sharded_param).untyped_storage()._cdata
            for p in handle.fsdp_params
        ),
        "dtensors": all(isinstance(t, DTensor) for t in objects if t.ndim),
        "fates": {row.role: row.fate for row in ledger.rows if row.nbytes > 50_000},
        "rows of the odd matrix": local(actor.model[0].up.weight).shape[0],
        "rows of the single row": local(actor.model[0].scale).shape[0],
    }


def test_tensors_are_the_same_objects_over_the_same_storages() -> None:
    first, second = run_ranks(_tensors_and_their_places)
    for facts in (first, second):
        names = ("same objects", "same parts", "same bits", "padded buffers freed", "are the shards", "dtensors")
        assert [name for name in names if not facts[name]] == []
        assert facts["fates"] == dict.fromkeys((Role.PARAM, Role.MOMENT, Role.GRAD), Fate.MOVED)
    assert first["rows of the odd matrix"] + second["rows of the odd matrix"] == ODD
    assert (first["rows of the single row"], second["rows of the single row"]) == (1, 0)


def _gradients_after_a_step() -> list[tuple[str, str]]:
    actor = ShardedActor()
    with Sleeper(actor.model, optimizer=actor.optimizer, memory="resize") as sleeper:
        actor.step(0)
        ledger = sleeper.sleep()
    return [(row.fate.value, row.reason) for row in ledger.rows if row.component == "grads"]


def test_dead_gradients_are_zeroed_paddings_and_all() -> None:
    for rows in run_ranks(_gradients_after_a_step):
        assert {fate for fate, _ in rows} == {"zeroed"}, rows


def _accumulate(sleeps: bool, hsdp: bool) -> tuple[dict[str, bytes], list[int]]:
    """Two backward passes before the reduction, with sleeps between them; bytes of unreduced gradients asleep."""
    asleep = []
    actor = ShardedActor(mesh=(2, 2)) if hsdp else ShardedActor(mixed=True)
    with Sleeper(actor.model, optimizer=actor.optimizer, memory="resize") as sleeper:
        actor.step(0)
        actor.optimizer.zero_grad()
        for k in range(3):
            if hsdp:
                actor.model.set_requires_all_reduce(k == 2)
            else:
                actor.model.set_requires_gradient_sync(k == 2)
            actor.forward(k).backward()
            if sleeps:
                held = _unreduced(actor) if k < 2 else []
                assert len(held) or k == 2
                sleeper.sleep()
                asleep += [tensor.untyped_storage().nbytes() for tensor in held]
                sleeper.wake()
        actor.optimizer.step()
    return actor.bits(), asleep


def _unreduced(actor: ShardedActor) -> list[torch.Tensor]:
    groups = [block._get_fsdp_state()._fsdp_param_groups[0] for block in actor.model]
    held = [group._partial_reduce_output for group in groups]
    held += [param.unsharded_accumulated_grad for group in groups for param in group.fsdp_params]
    return [tensor for tensor in held if tensor is not None]


def _compare_accumulation(hsdp: bool) -> tuple[bool, int]:
    (awake, _), (slept, asleep) = _accumulate(False, hsdp), _accumulate(True, hsdp)
    return awake == slept, sum(asleep)


@pytest.mark.parametrize("hsdp", [False, True])
def test_gradients_whose_reduction_is_put_off_survive(hsdp: bool) -> None:
    size = 4 if hsdp else 2
    assert run_ranks(_compare_accumulation, hsdp, world_size=size) == [(True, 0)] * size


def _evaluate_and_sleep() -> dict[str, Any]:
    actor = ShardedActor(reshard_after_forward=False, mixed=True)
    actor.step(0)
    with Sleeper(actor.model, optimizer=actor.optimizer, memory="resize") as sleeper:
        with torch.no_grad():
            before = actor.forward(7).item()
        states = set(sleeper.components())
        explained = sleeper.explain().splitlines()[-1]
        ledger = sleeper.sleep()
        rows = [(row.component, row.storages, row.freed_bytes) for row in ledger.rows if row.fate is Fate.DROPPED]
        sleeper.wake()
        with torch.no_grad():
            after = actor.forward(7).item()
    return {"rows": rows, "equal": before == after, "states": states, "explained": explained}


def test_gathered_parameters_are_given_up_and_named() -> None:
    for facts in run_ranks(_evaluate_and_sleep):
        [(component, storages, freed_bytes)] = facts["rows"]
        assert (component, storages) == ("params", 10)
        # two blocks: each matrix twice, biases and the row; gathered in bf16, each padded to two equal shards
        assert freed_bytes == 2 * 2 * (1002 * 24 + 1002 + 24 * 1001 + 24 + 2 * 24)
        assert facts["equal"]
        assert "params" in facts["states"]
        assert f"gives up the {freed_bytes / 1024**3:.3f} GiB" in facts["explained"]


def _step_while_gathered() -> tuple[str, bool]:
    actor = ShardedActor()
    actor.model.set_reshard_after_backward(False)
    with Sleeper(actor.model, optimizer=actor.optimizer, memory="resize") as sleeper:
        actor.step(0)
        try:
            sleeper.sleep()
        except StateError as error:
            return str(error), sleeper.is_asleep
    return "", True


def test_a_gathered_copy_that_missed_a_step_is_refused() -> None:
    for message, is_asleep in run_ranks(_step_while_gathered):
        assert "model.0." in message
        assert "reshard()" in message
        assert not is_asleep


def _use_while_asleep() -> list[str]:
    """Nothing but shards sleeps here: no buffer, no state that is a plain tensor."""
    model = fully_shard(nn.Linear(WIDTH, ODD, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    messages = []
    with Sleeper(model, optimizer=optimizer) as sleeper:
        sleeper.sleep()
        for use in (lambda: model(torch.ones(1, WIDTH)), optimizer.step, model.state_dict):
            try:
                use()
            except AsleepError as error:
                messages.append(str(error))
        sleeper.wake()
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
    return messages


def test_computing_with_sleeping_shards_raises() -> None:
    for messages in run_ranks(_use_while_asleep):
        assert len(messages) == 3, messages


def _read_asleep() -> dict[str, Any]:
    actor = ShardedActor()
    actor.step(0)
    expected = {name: bits(t) for name, t in actor.model.state_dict().items()}
    places = {
        name: (t.device_mesh, t.placements) for name, t in actor.model.state_dict().items() if isinstance(t, DTensor)
    }
    with Sleeper(actor.model, optimizer=actor.optimizer, memory="resize") as sleeper:
        sleeper.sleep()
        state = sleeper.state_dict()
        moments = sleeper.optimizer_state_dict()["state"]
        return {
            "bits": {name: bits(t) for name, t in state.items()} == expected,
            "places": {name: (t.device_mesh, t.placements) for name, t in state.items() if isinstance(t, DTensor)}
            == places,
            "moments": all(isinstance(values["exp_avg"], DTensor) for values in moments.values()),
            "asleep": sleeper.is_asleep,
            "whole": state["0.up.weight"].full_tensor().shape[0] == ODD,
        }


def test_the_state_is_read_asleep_as_dtensors_of_the_same_mesh() -> None:
    for facts in run_ranks(_read_asleep):
        assert [name for name, good in facts.items() if not good] == []
