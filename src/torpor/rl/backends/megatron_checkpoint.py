"""What a Megatron actor writes: a checkpoint of transformers, and beside it what a resume to the bit needs.

config.json, model.safetensors            the model, as transformers loads it
optimizer-00000.safetensors, .json        masters, moments and settings of one rank, in the order of its shards
training-00000.safetensors                scaling factors of delayed scaling, and random state, of one rank
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from torpor.errors import UsageError
from torpor.rl import checkpoint
from torpor.sleeper import Sleeper

_MASTER = "master"
_SCALING, _RANDOM = "scaling/", "random/"
_DELAYED = {
    "scale_fwd": ("scaling_fwd", "scale"),
    "amax_history_fwd": ("scaling_fwd", "amax_history"),
    "scale_bwd": ("scaling_bwd", "scale"),
    "amax_history_bwd": ("scaling_bwd", "amax_history"),
}
"""What delayed scaling knows from the past, and where a module's `fp8_meta` has it."""
_FORWARD_SCALES_PER_GEMM = 3
"""Of input, weight and output (TransformerEngine 2.20.2, `TransformerEngineBaseModule.set_meta_tensor`)."""


def write_model(directory: Path, weights: dict[str, Tensor]) -> None:
    """All weights in one file."""
    # Without the format transformers does not take the file for one of PyTorch.
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def read_model(directory: Path) -> dict[str, Tensor]:
    return checkpoint.read_tensors(directory / "model.safetensors")


def write_snapshots(directory: Path, snapshots: Mapping[str, Mapping[str, Tensor]], tensor_rank: int) -> None:
    """Frozen weights, under Megatron-Core's names: a run that goes on cannot make them again."""
    for name, weights in snapshots.items():
        checkpoint.write_tensors(directory / f"frozen-{name}-{tensor_rank:03d}.safetensors", weights)


def read_snapshots(directory: Path, snapshots: Mapping[str, Mapping[str, Tensor]], tensor_rank: int) -> None:
    """Into the host memory that they have."""
    for name, weights in snapshots.items():
        saved = checkpoint.read_tensors(directory / f"frozen-{name}-{tensor_rank:03d}.safetensors")
        for key, tensor in weights.items():
            tensor.copy_(saved[key])


def write_training_state(
    directory: Path,
    optimizers: Mapping[str, torch.optim.Optimizer],
    model: nn.Module,
    sleeper: Sleeper,
    device: torch.device,
    rank: int,
) -> None:
    """This rank's share, asleep or awake."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for name, optimizer in optimizers.items():
        held = {
            str(index): {_MASTER: parameter.detach(), **optimizer.state.get(parameter, {})}
            for index, parameter in enumerate(_parameters(optimizer))
        }
        found, rest = checkpoint.split_optimizer_state(
            {"state": sleeper.read(held), "param_groups": [_settings(group) for group in optimizer.param_groups]}
        )
        tensors |= {f"{name}/{path}": tensor.cpu() for path, tensor in found.items()}
        plain[name] = rest
    checkpoint.write_tensors(directory / f"optimizer-{rank:05d}.safetensors", tensors)
    checkpoint.write_json(directory / f"optimizer-{rank:05d}.json", plain)
    checkpoint.write_tensors(directory / f"training-{rank:05d}.safetensors", _training_state(model, sleeper, device))


def read_training_state(
    directory: Path,
    optimizers: Mapping[str, torch.optim.Optimizer],
    model: nn.Module,
    device: torch.device,
    rank: int,
) -> None:
    """Set everything that `write_training_state` wrote. All is awake.

    Raises:
        UsageError: it was written by another number of ranks, or for another optimizer.
    """
    file = directory / f"optimizer-{rank:05d}.safetensors"
    if not file.exists() or (directory / f"optimizer-{_num_ranks():05d}.safetensors").exists():
        raise UsageError(f"{directory} was not written by {_num_ranks()} ranks: resume with as many as wrote it")
    tensors = checkpoint.read_tensors(file)
    plain = checkpoint.read_json(file.with_suffix(".json"))
    if plain.keys() != optimizers.keys():
        raise UsageError(f"{directory} has optimizers {sorted(plain)}, this actor {sorted(optimizers)}")
    for name, optimizer in optimizers.items():
        mine = {path.removeprefix(f"{name}/"): t for path, t in tensors.items() if path.startswith(f"{name}/")}
        _restore_optimizer(optimizer, checkpoint.join_optimizer_state(mine, plain[name]))
    state = checkpoint.read_tensors(directory / f"training-{rank:05d}.safetensors")
    _restore_scaling(model, _under(state, _SCALING))
    random = _under(state, _RANDOM)
    checkpoint.restore_random_state(random, device)
    _restore_trackers(random)


_JSON_KINDS = (bool, int, float, str, tuple, list)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a parameter group what JSON knows: rates, betas, the step that TransformerEngine counts here."""
    return {key: value for key, value in group.items() if isinstance(value, _JSON_KINDS) and key != "params"}


@torch.no_grad()
def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    for group, settings in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update(settings)
    for index, parameter in enumerate(_parameters(optimizer)):
        state = dict(saved["state"][index])
        parameter.copy_(state.pop(_MASTER))
        optimizer.state[parameter] = {key: _like(value, parameter) for key, value in state.items()}


def _like(value: Any, parameter: Tensor) -> Any:
    """On the parameter's device if it has its shape; counters stay on the host."""
    return value.to(parameter.device) if isinstance(value, Tensor) and value.shape == parameter.shape else value


def _training_state(model: nn.Module, sleeper: Sleeper, device: torch.device) -> dict[str, Tensor]:
    scaling = {
        f"{_SCALING}{path}/{key}": tensor
        for path, module in _delayed_modules(model)
        for key, tensor in _scaling_of(module).items()
    }
    random = {**checkpoint.random_state(device), **_trackers()}
    held: dict[str, Tensor] = sleeper.read(scaling)
    return {name: tensor.cpu() for name, tensor in held.items()} | {f"{_RANDOM}{n}": t for n, t in random.items()}


def _delayed_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """TransformerEngine's modules that scale by what they saw before."""
    for path, module in model.named_modules():
        if "fp8_meta" in vars(module) and _scaling_of(module):
            yield path, module


def _scaling_of(module: Any) -> dict[str, Tensor]:
    found = {}
    for key, (table, attribute) in _DELAYED.items():
        value = vars(module.fp8_meta[table]).get(attribute) if table in module.fp8_meta else None
        if isinstance(value, Tensor) and "amax_history" in vars(module.fp8_meta[table]):
            found[key] = value
    return found


@torch.no_grad()
def _restore_scaling(model: Any, saved: Mapping[str, Tensor]) -> None:
    """As TransformerEngine's own extra state does, which has to be pickled; a module may not have run yet."""
    if not saved:
        return
    from megatron.core.fp8_utils import get_fp8_recipe

    recipe = get_fp8_recipe(model.config)
    by_module: dict[str, dict[str, Any]] = {}
    for name, tensor in saved.items():
        path, key = name.rsplit("/", 1)
        by_module.setdefault(path, {})[key] = tensor
    for path, state in by_module.items():
        module: Any = model.get_submodule(path)
        module.fp8_meta["recipe"] = recipe
        module.fp8_meta["num_gemms"] = state["scale_fwd"].numel() // _FORWARD_SCALES_PER_GEMM
        module.init_fp8_meta_tensors(recipe)
        for key, tensor in state.items():
            table, attribute = _DELAYED[key]
            vars(module.fp8_meta[table])[attribute].copy_(tensor)


def _trackers() -> dict[str, Tensor]:
    """Megatron's named random states, those that are plain tensors."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    states: dict[str, Any] = get_cuda_rng_tracker().get_states()
    return {f"tracker/{name}": state for name, state in states.items() if isinstance(state, Tensor)}


def _restore_trackers(saved: Mapping[str, Tensor]) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    tracker.set_states({**tracker.get_states(), **_under(saved, "tracker/")})


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _num_ranks() -> int:
    return torch.distributed.get_world_size()
