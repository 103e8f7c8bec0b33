"""Checkpoints: whole or absent, and to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_actors import batch_for, make_actor, model_of
from small_jobs import assert_same_tensors

from torpor.errors import UsageError
from torpor.memory.madvise import MadviseBackend
from torpor.rl.checkpoint import (
    join_optimizer_state,
    latest_checkpoint,
    read_tensors,
    save_checkpoint,
    split_optimizer_state,
    step_of,
    write_tensors,
)
from torpor.rl.config import OptimizerConfig, OptimizerName


def _write(directory: Path) -> None:
    (directory / "file").write_text("content")


def test_the_newest_stay(tmp_path: Path) -> None:
    for step in (2, 4, 10, 100):
        save_checkpoint(tmp_path, step, _write, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000100"]
    assert step_of(latest_checkpoint(tmp_path)) == 100


def test_a_save_that_dies_leaves_what_was_there(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, _write, keep=2)

    def fail(directory: Path) -> None:
        _write(directory)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, 2, fail, keep=2)
    assert latest_checkpoint(tmp_path).name == "step-000001"
    save_checkpoint(tmp_path, 2, _write, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_no_checkpoint_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint in"):
        latest_checkpoint(tmp_path / "nowhere")


def test_tensors_that_share_memory_are_written_apart(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    tensors = {"base": base, "part": base[2:4], "column": base.view(2, 3)[:, 1]}
    write_tensors(tmp_path / "t.safetensors", tensors)
    read = read_tensors(tmp_path / "t.safetensors")
    assert {name: value.tolist() for name, value in read.items()} == {
        name: value.tolist() for name, value in tensors.items()
    }


def test_what_is_read_can_be_put_to_sleep(tmp_path: Path) -> None:
    write_tensors(tmp_path / "t.safetensors", {"weight": torch.zeros(1024, 1024)})
    (read,) = read_tensors(tmp_path / "t.safetensors").values()
    assert MadviseBackend().refusal(read.untyped_storage()) is None


def test_nested_optimizer_state_splits_and_joins() -> None:
    quantized = {"state1": torch.ones(2, dtype=torch.uint8), "blocksize": 256}
    state = {
        "state": {0: {"step": 3, "moment": torch.zeros(2), "__quantized__": quantized}, 7: {}},
        "param_groups": [{"lr": 0.1, "params": [0, 7]}],
    }
    tensors, plain = split_optimizer_state(state)
    assert tensors.keys() == {"0/moment", "0/__quantized__/state1"}
    joined = join_optimizer_state(tensors, json.loads(json.dumps(plain)))
    assert joined == state


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "sgd", "adagrad", "rmsprop"])
def test_every_optimizer_goes_on_where_it_was(tmp_path: Path, name: OptimizerName) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    options = {"optimizer": OptimizerConfig(name=name, learning_rate=1e-3), "hidden_size": 128}
    with make_actor(tmp_path / "a", **options) as actor:
        actor.train(batch_for(actor))
        actor.sleep()
        checkpoint = save_checkpoint(tmp_path, 1, actor.save, keep=1)
        final = actor.train(batch_for(actor, version=1)).values()
        expected = {key: p.detach().clone() for key, p in model_of(actor).named_parameters()}
    with make_actor(tmp_path / "b", seed=9, **options) as other:
        other.load(checkpoint)
        assert other.train(batch_for(other, version=1)).values() == final
        assert_same_tensors(expected, dict(model_of(other).named_parameters()))


@pytest.mark.parametrize("asleep", [True, False])
def test_saves_and_loads_to_the_bit(tmp_path: Path, asleep: bool) -> None:
    options = {"optimizer": OptimizerConfig(learning_rate=1e-2)}
    with make_actor(tmp_path / "a", **options) as actor:
        actor.train(batch_for(actor))
        if asleep:
            actor.sleep()
        checkpoint = save_checkpoint(tmp_path, 1, actor.save, keep=1)
        assert actor.is_asleep is asleep
        random_number = torch.rand(1)
        final = actor.train(batch_for(actor, version=1)).values()
        weights = {name: p.detach().clone() for name, p in model_of(actor).named_parameters()}
    with make_actor(tmp_path / "b", seed=9, **options) as other:
        other.load(checkpoint)
        assert torch.equal(torch.rand(1), random_number)
        assert (other.weight_version, other.num_updates) == (1, 1)
        other.sleep()  # what was loaded can sleep like everything else
        assert other.train(batch_for(other, version=1)).values() == final
        for name, parameter in model_of(other).named_parameters():
            assert torch.equal(parameter, weights[name]), name


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    with make_actor(tmp_path / "a") as actor:
        checkpoint = save_checkpoint(tmp_path, 1, actor.save, keep=1)
    weights = read_tensors(checkpoint / "model.safetensors")
    weights["extra"] = weights.pop("model.norm.weight")
    write_tensors(checkpoint / "model.safetensors", weights)
    with make_actor(tmp_path / "b") as other, pytest.raises(UsageError, match=r"missing.*model.norm.weight"):
        other.load(checkpoint)
