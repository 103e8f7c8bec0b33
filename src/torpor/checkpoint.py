"""Checkpoints of sharded state, taken asleep or awake, readable with another number of ranks.

    root/latest                     the name of the newest checkpoint
         step-00000020/             whole or not there at all
             *.distcp, .metadata    tensors, as `torch.distributed.checkpoint` lays them out
             values.json            what is no tensor
         .partial-step-00000021/    being written, or left by a run that died: the next save removes it

A save of a sleeping actor reads one tensor at a time from the sleeper's store and wakes nothing. Every rank writes
its own shards; one rank then brings the directory to the disk, renames it, and points `latest` at it. A run that is
killed at any moment leaves the checkpoint before it as it was. All ranks must see the same file system.

`.metadata` is pickled, by the format of `torch.distributed.checkpoint`: load only what your own runs wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from torpor.durable import remove, sync
from torpor.errors import RankError, StateError, UsageError
from torpor.sleeper import Sleeper

_PREFIX, _PARTIAL, _LATEST, _VALUES = "step-", ".partial-", "latest", "values.json"
_MODEL, _FROZEN, _OPTIMIZER, _RANK = "model", "frozen", "optimizer", "rank"

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a checkpoint holds besides models and optimizers, which were filled in place."""

    step: int
    values: dict[str, Any]
    """As `save_checkpoint` got it from the first rank."""
    local: Tensors
    """What this rank handed over; empty if the run that saved had fewer ranks."""
    world_size: int
    """Of the run that saved."""


def save_checkpoint(
    root: Path,
    step: int,
    sleeper: Sleeper,
    *,
    values: Mapping[str, Any] | None = None,
    local: Mapping[str, Tensor] | None = None,
    frozen: Mapping[str, torch.nn.Module] | None = None,
    group: dist.ProcessGroup | None = None,
    keep: int = 2,
) -> Path:
    """Write models and optimizers of `sleeper`, asleep or awake, and return the checkpoint. A collective call.

    Args:
        root: the directory of all checkpoints of a run.
        step: names the checkpoint.
        values: JSON values to keep with it: data position, weight version. The first rank's count.
        local: each rank's own tensors: random state.
        frozen: modules by name that are no model of the sleeper: a reference handed over as `extra`.
        group: ranks that save, with a backend for host tensors; None for the default group, or for one process
            without any.
        keep: the newest so many checkpoints stay.

    Raises:
        RankError: a rank could not write its part; the checkpoints before it are as they were.
        UsageError: `values`, or an optimizer's state, that JSON cannot hold.
    """
    tensors, plain = _state(sleeper)
    tensors |= _module_tensors(sleeper, _FROZEN, frozen or {})
    rank, world_size = _place(group)
    tensors |= {f"{_RANK}/{rank}/{name}": tensor for name, tensor in (local or {}).items()}
    text = _to_json({"step": step, "world_size": world_size, "values": dict(values or {}), "optimizers": plain})
    partial = root / f"{_PARTIAL}{_PREFIX}{step:08d}"
    _on_first_rank(group, "prepare", lambda: _clear(root, partial))
    with torch.no_grad(), _as_rank_error("save"):  # without gradients a shard is handed out itself, not as a view
        state_dict_saver.save(
            tensors,
            storage_writer=FileSystemWriter(partial),
            planner=_AsleepPlanner(sleeper),
            process_group=group,
        )
    return root / _on_first_rank(group, "commit", lambda: _commit(root, partial, text, keep))


def load_checkpoint(
    checkpoint: Path,
    sleeper: Sleeper,
    *,
    frozen: Mapping[str, torch.nn.Module] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Fill the models and optimizers of `sleeper`, which must be awake, from `checkpoint`. A collective call.

    The number of ranks, the mesh and the placements may be others than those of the run that saved. Parameters
    and buffers are filled in place. Optimizer state that does not exist yet is made, of the types that were saved.

    Raises:
        StateError: something sleeps.
        UsageError: no checkpoint, or one of an optimizer with other parameter groups.
        RankError: a rank could not read its part.
    """
    if sleeper.is_asleep:
        raise StateError("load_checkpoint() fills tensors in place: call wake() first")
    if not (checkpoint / _VALUES).is_file():
        raise UsageError(f"{checkpoint} is no checkpoint: it has no {_VALUES}", path=str(checkpoint))
    kept = json.loads((checkpoint / _VALUES).read_text(encoding="utf-8"))
    rank, _ = _place(group)
    reader = FileSystemReader(checkpoint)
    metadata = reader.read_metadata().state_dict_metadata
    saved = {key: tensor for key, tensor in metadata.items() if isinstance(tensor, TensorStorageMetadata)}
    wanted = _module_tensors(sleeper, _MODEL, sleeper.models) | _module_tensors(sleeper, _FROZEN, frozen or {})
    for name in sleeper.optimizers:
        wanted |= _make_state(sleeper, name, saved)
    own = f"{_RANK}/{rank}/"
    local = {key.removeprefix(own): _empty(saved[key]) for key in saved if key.startswith(own)}
    wanted |= {own + name: tensor for name, tensor in local.items()}
    with torch.no_grad(), _as_rank_error("load"):
        state_dict_loader.load(wanted, storage_reader=reader, process_group=group)
    for name, optimizer in sleeper.optimizers.items():
        _set_plain(sleeper, name, optimizer, kept["optimizers"].get(name))
    return Loaded(kept["step"], kept["values"], local, kept["world_size"])


def latest(root: Path) -> Path:
    """The newest checkpoint under `root`.

    Raises:
        UsageError: there is none.
    """
    pointer = root / _LATEST
    if not pointer.is_file():
        raise UsageError(f"no checkpoint in {root}: nothing was saved there so far", path=str(root))
    return root / pointer.read_text(encoding="utf-8").strip()


# -------------------------------------------------------------------------------- tensors and their names


class _AsleepPlanner(DefaultSavePlanner):
    """Plans by shapes, and reads the contents of one tensor when its turn to be written has come."""

    def __init__(self, sleeper: Sleeper) -> None:
        super().__init__(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        self._sleeper = sleeper

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The contents of a shard, from the store if it sleeps."""
        return self._sleeper.read(super().lookup_object(index))


def _state(sleeper: Sleeper) -> tuple[Tensors, dict[str, Any]]:
    """Every tensor by its key, unread, and the optimizers' other values."""
    tensors = _module_tensors(sleeper, _MODEL, sleeper.models)
    plain: dict[str, Any] = {}
    for name, optimizer in sleeper.optimizers.items():
        values: dict[str, Any] = {}
        for key, value in _leaves(_optimizer_state(sleeper, name, optimizer), f"{_OPTIMIZER}/{name}"):
            if isinstance(value, Tensor):
                tensors[key] = value.detach()
            else:
                values[key] = value
        plain[name] = {"values": values, "num_groups": len(optimizer.param_groups)}
    return tensors, plain


def _module_tensors(sleeper: Sleeper, kind: str, modules: Mapping[str, torch.nn.Module]) -> Tensors:
    """The tensors of `modules`, unread, by their keys in a checkpoint."""
    return {
        f"{kind}/{name}/{key}": value
        for name, module in modules.items()
        for key, value in sleeper.peek(module.state_dict).items()
        if isinstance(value, Tensor)
    }


def _optimizer_state(sleeper: Sleeper, name: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State by the parameter's name, and options by the group's number."""
    names = _parameter_names(sleeper, optimizer)
    return {
        "state": {names[id(parameter)]: values for parameter, values in optimizer.state.items()},
        "groups": {
            str(i): {key: value for key, value in group.items() if key != "params"}
            for i, group in enumerate(optimizer.param_groups)
        },
    }


def _parameter_names(sleeper: Sleeper, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """`id` of each parameter -> its name in its model, or its place in the optimizer: the same on every rank."""
    names = {
        id(parameter): f"group{i}.{j}"
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
    }
    for model_name, model in sleeper.models.items():
        sleeper.peek(model.state_dict)  # FSDP shows its shards again, should it have gathered them
        names |= {id(parameter): f"{model_name}.{name}" for name, parameter in model.named_parameters()}
    return names


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values in nested dictionaries, by path."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}/{name}")
    else:
        yield key, value


# ------------------------------------------------------------------------------------------- optimizer state


def _make_state(sleeper: Sleeper, name: str, saved: Mapping[str, TensorStorageMetadata]) -> Tensors:
    """The optimizer's tensors to be filled, by key; where it has none of that shape and type, new ones."""
    optimizer = sleeper.optimizers[name]
    names = _parameter_names(sleeper, optimizer)
    wanted: Tensors = {}
    for i, group in enumerate(optimizer.param_groups):
        options = f"{_OPTIMIZER}/{name}/groups/{i}/"
        for key in [key for key in saved if key.startswith(options)]:
            wanted[key] = group[key.removeprefix(options)] = _empty(saved[key])
        for parameter in group["params"]:
            prefix = f"{_OPTIMIZER}/{name}/state/{names[id(parameter)]}/"
            before, state = optimizer.state.pop(parameter, {}), dict[str, Any]()
            for key in [key for key in saved if key.startswith(prefix)]:
                path = key.removeprefix(prefix).split("/")
                tensor = _fitting(before, path, saved[key])
                wanted[key] = _like(parameter, path[-1], group, saved[key]) if tensor is None else tensor
                _put(state, path, wanted[key])
            if state:
                optimizer.state[parameter] = state
    return wanted


def _fitting(state: Any, path: list[str], saved: TensorStorageMetadata) -> Tensor | None:
    for name in path:
        state = state.get(name) if isinstance(state, dict) else None
    fits = isinstance(state, Tensor) and state.shape == saved.size and state.dtype == saved.properties.dtype
    return state if fits else None


def _like(parameter: Tensor, name: str, group: Mapping[str, Any], saved: TensorStorageMetadata) -> Tensor:
    """A new tensor of a parameter's state: laid out like the parameter if it has its shape."""
    dtype = saved.properties.dtype
    if saved.size == parameter.shape and parameter.ndim:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    # where `Optimizer.load_state_dict` of torch puts a step counter, too
    on_host = name == "step" and not (group.get("capturable") or group.get("fused"))
    return torch.zeros(saved.size, dtype=dtype, device="cpu" if on_host else parameter.device)


def _empty(saved: TensorStorageMetadata) -> Tensor:
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def _set_plain(sleeper: Sleeper, name: str, optimizer: torch.optim.Optimizer, kept: Mapping[str, Any] | None) -> None:
    """Options and what else of the state is no tensor."""
    if kept is None or kept["num_groups"] != len(optimizer.param_groups):
        has = "none" if kept is None else kept["num_groups"]
        raise UsageError(
            f"optimizer '{name}' has {len(optimizer.param_groups)} parameter groups, the checkpoint has {has}",
            name=name,
        )
    parameters = {p_name: key for key, p_name in _parameter_names(sleeper, optimizer).items()}
    by_id = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    for key, value in kept["values"].items():
        kind, owner, *path = key.removeprefix(f"{_OPTIMIZER}/{name}/").split("/")
        if kind == "groups":
            _put(optimizer.param_groups[int(owner)], path, value)
        elif owner in parameters:
            _put(optimizer.state[by_id[parameters[owner]]], path, value)


def _put(table: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        table = table.setdefault(name, {})
    table[path[-1]] = value


# ------------------------------------------------------------------------------------------------ on the disk


def _clear(root: Path, partial: Path) -> str:
    """Remove what runs that died were writing."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"{_PARTIAL}*"):
        remove(left, _PARTIAL)
    partial.mkdir()
    return partial.name


def _commit(root: Path, partial: Path, text: str, keep: int) -> str:
    """Everything is on the disk before the name is, and the name before `latest` has it. Returns the name."""
    _write(partial / _VALUES, text)
    for file in partial.iterdir():
        sync(file)
    sync(partial)
    target = _free_name(root, partial.name.removeprefix(_PARTIAL))
    partial.rename(target)
    sync(root)
    pointer = root / f"{_PARTIAL}{_LATEST}"
    _write(pointer, target.name)
    pointer.rename(root / _LATEST)
    sync(root)
    by_age = sorted(root.glob(f"{_PREFIX}*"), key=lambda checkpoint: (checkpoint / _VALUES).stat().st_mtime_ns)
    for old in [checkpoint for checkpoint in by_age if checkpoint != target][: len(by_age) - max(keep, 1)]:
        remove(old, _PARTIAL)
    return target.name


def _free_name(root: Path, name: str) -> Path:
    """A run that was resumed from an older checkpoint comes by the same step again."""
    again = 0
    while (target := root / (f"{name}.{again}" if again else name)).exists():
        again += 1
    return target


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)


def _to_json(values: Mapping[str, Any]) -> str:
    try:
        return json.dumps(values, indent=1, allow_nan=True)
    except TypeError as error:
        raise UsageError(f"a checkpoint keeps tensors and JSON values: {error}") from error


# ------------------------------------------------------------------------------------------------------ ranks


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank in the group and the size of it."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def _on_first_rank(group: dist.ProcessGroup | None, stage: str, work: Callable[[], str]) -> str:
    """What `work` returned on the first rank, on every rank; or what it came to there, raised on every rank."""
    rank, world_size = _place(group)
    answer: list[tuple[str, str]] = [("", "")]
    error: OSError | None = None
    if rank == 0:
        try:
            answer = [("", work())]
        except OSError as caught:
            answer, error = [(type(caught).__name__, str(caught))], caught
    if world_size > 1:
        dist.broadcast_object_list(answer, group=group, group_src=0)
    kind, text = answer[0]
    if kind:
        raise RankError({0: text}, stage, kind) from error
    return text


@contextmanager
def _as_rank_error(stage: str) -> Iterator[None]:
    """What `torch.distributed.checkpoint` raises, outside `Exception`, as an error of this project."""
    try:
        yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        reasons = {rank: str(caught) or type(caught).__name__ for rank, (caught, _) in error.failures.items()}
        raise RankError(reasons, stage, type(first).__name__) from error
