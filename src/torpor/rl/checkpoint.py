"""Checkpoints: a directory that is there whole or not at all.

    checkpoints/step-000020/model.safetensors       parameters and buffers, ties once
                            optimizer.safetensors   its tensors, and the random state
                            state.json              what is no tensor, and the step

Files are written under another name, brought to the disk, and renamed in one piece. Nothing is unpickled.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from torpor.durable import remove, sync
from torpor.errors import UsageError

_PREFIX, _PARTIAL = "step-", ".partial-"


def save_checkpoint(root: Path, step: int, write: Callable[[Path], None], *, keep: int) -> Path:
    """Call `write` with an empty directory, then put it in place as the checkpoint of `step`.

    The newest `keep` checkpoints stay. A run that dies meanwhile leaves the checkpoints before it as they were.
    """
    target = root / f"{_PREFIX}{step:06d}"
    partial = root / f"{_PARTIAL}{target.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    for file in partial.rglob("*"):
        sync(file)
    sync(partial)
    if target.exists():  # a run that was resumed from an older checkpoint comes by again
        remove(target, _PARTIAL)
    partial.rename(target)
    sync(root)
    for old in _checkpoints(root)[:-keep]:
        remove(old, _PARTIAL)
    return target


def latest_checkpoint(root: Path) -> Path:
    """The newest checkpoint.

    Raises:
        UsageError: there is none.
    """
    found = find_latest(root)
    if found is None:
        raise UsageError(
            f"no checkpoint in {root} to resume from; run with --checkpoint.interval-steps first",
            path=str(root),
        )
    return found


def find_latest(root: Path) -> Path | None:
    """The newest checkpoint, None if there is none."""
    return next(reversed(_checkpoints(root)), None)


def step_of(checkpoint: Path) -> int:
    """The number of steps that were done when `checkpoint` was taken."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file; tensors that share memory are written once for each name."""
    seen: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if address in seen else tensor.contiguous()
        seen.add(address)
    save_file(separate, path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, in memory of their own: `load_file` gives windows on the mapped file."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of the generators of the host and, if that is where it computes, of `device`."""
    states = {"random_state": torch.get_rng_state()}
    if device.type == "cuda":
        states["random_state_cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the generators to what `random_state` gave; what another kind of device wrote is passed over."""
    torch.set_rng_state(states["random_state"])
    if device.type == "cuda" and "random_state_cuda" in states:
        torch.cuda.set_rng_state(states["random_state_cuda"], device)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def split_optimizer_state(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's `state_dict()` as tensors by path and JSON values; state may be nested, as bitsandbytes has it.

    Example: the tensors `{"0/exp_avg": ..., "0/step": ...}` and `{"param_groups": [...], "state": {"0": {}}}`.
    """
    tensors: dict[str, Tensor] = {}
    plain = {str(index): _take_tensors(values, str(index), tensors) for index, values in state["state"].items()}
    return tensors, {"param_groups": state["param_groups"], "state": plain}


def join_optimizer_state(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `split_optimizer_state`."""
    state: dict[int, dict[str, Any]] = {int(index): copy.deepcopy(plain) for index, plain in values["state"].items()}
    for path, tensor in tensors.items():
        index, *tables, name = path.split("/")
        table = state[int(index)]
        for inner in tables:
            table = table[inner]
        table[name] = tensor
    return {"state": state, "param_groups": values["param_groups"]}


def _take_tensors(values: Mapping[str, Any], path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """`values` without its tensors, which go into `tensors` by path."""
    rest: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            tensors[f"{path}/{name}"] = value
        elif isinstance(value, dict):
            rest[name] = _take_tensors(value, f"{path}/{name}", tensors)
        else:
            rest[name] = value
    return rest


def _checkpoints(root: Path) -> list[Path]:
    return sorted(root.glob(f"{_PREFIX}*")) if root.is_dir() else []
