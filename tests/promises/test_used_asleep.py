"""Reading while asleep is served from the store; computing while asleep raises and names the component."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from small_actor import SmallActor
from torch import nn

from torpor import Sleeper
from torpor.errors import AsleepError
from zoo import bits


def test_state_dicts_are_read_from_the_store(trained: SmallActor, sleeper: Sleeper) -> None:
    model_bits = {key: bits(value) for key, value in trained.model.state_dict().items()}
    moment = bits(trained.optimizer.state[trained.model[0].weight]["exp_avg"])
    with sleeper.asleep():
        state = sleeper.state_dict()
        optimizer_state = sleeper.optimizer_state_dict()
        streamed = {name: bits(tensor) for name, tensor in sleeper.stream()}
        assert bits(trained.model[0].weight) != model_bits["0.weight"]  # nothing woke up
    assert {key: bits(value) for key, value in state.items()} == model_bits == streamed
    assert bits(optimizer_state["state"][0]["exp_avg"]) == moment
    assert optimizer_state["param_groups"][0]["lr"] == 1e-2


def test_ties_and_strides_are_kept_in_what_is_read(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 64, bias=False), "b": nn.Linear(64, 64, bias=False)})
    model["b"].weight = model["a"].weight
    model["c"] = nn.Linear(64, 128, bias=False)
    model["c"].weight = nn.Parameter(torch.randn(64, 128).t())
    with Sleeper(model, store_dir=tmp_path_factory.mktemp("store")) as sleeper, sleeper.asleep():
        state = sleeper.state_dict()
    assert state["a.weight"].data_ptr() == state["b.weight"].data_ptr()
    assert state["c.weight"].stride() == (1, 128)
    assert torch.equal(state["c.weight"], model["c"].weight)


def test_a_stream_holds_two_tensors_at_a_time(sleeper: Sleeper) -> None:
    with sleeper.asleep():
        seen: list[weakref.ref[torch.Tensor]] = []
        for _, tensor in sleeper.stream():
            assert all(old() is None for old in seen[:-1])
            seen.append(weakref.ref(tensor))
            del tensor
    assert len(seen) > 3


def test_a_stream_that_is_left_half_way_leaves_nothing_behind(trained: SmallActor, sleeper: Sleeper) -> None:
    before, threads = trained.bits(), threading.active_count()
    with sleeper.asleep():
        for _ in sleeper.stream():
            break
    assert threading.active_count() == threads
    assert trained.bits() == before


def test_zeroed_gradients_read_as_zeros(trained: SmallActor, sleeper: Sleeper) -> None:
    grad = trained.model[0].weight.grad
    assert grad is not None
    with sleeper.asleep():
        assert torch.equal(sleeper.read([grad])[0], torch.zeros_like(grad))


def test_computing_raises_and_names_the_component(trained: SmallActor, sleeper: Sleeper) -> None:
    x = torch.ones(2, 128)
    with sleeper.asleep("params"):
        with pytest.raises(AsleepError, match="forward of model: its component 'params' is asleep"):
            trained.model(x)
        with pytest.raises(AsleepError, match=r"forward of model\.2"):
            trained.model[2](x)
        with pytest.raises(AsleepError, match="state_dict"):
            trained.model.state_dict()
        with pytest.raises(AsleepError, match="load_state_dict"):
            trained.model.load_state_dict({})
        with pytest.raises(AsleepError, match="step of optimizer"):
            trained.optimizer.step()
    trained.model(x)
    trained.optimizer.step()


def test_only_what_sleeps_is_guarded(trained: SmallActor, sleeper: Sleeper) -> None:
    with sleeper.asleep("optimizer"):
        trained.model(torch.ones(2, 128))
        with pytest.raises(AsleepError) as caught:
            trained.optimizer.step()
        assert (caught.value.name, caught.value.component) == ("optimizer", "optimizer")


def test_no_hooks_remain(trained: SmallActor, sleeper: Sleeper) -> None:
    def hooks() -> int:
        return sum(len(m._forward_pre_hooks) + len(m._state_dict_pre_hooks) for m in trained.model.modules())

    before = hooks()
    with sleeper.asleep():
        assert hooks() > before
    assert hooks() == before


def test_a_storage_inside_another_is_read_at_its_own_place(tmp_path: Path) -> None:
    array = np.arange(40_000, dtype=np.float32)
    whole, part = torch.from_numpy(array), torch.from_numpy(array[10_000:20_000])
    with Sleeper(extra={"arrays": [whole, part]}, store_dir=tmp_path) as sleeper, sleeper.asleep():
        assert part[1].item() == 0  # it does sleep
        assert torch.equal(sleeper.read(part), torch.arange(10_000, 20_000, dtype=torch.float32))
