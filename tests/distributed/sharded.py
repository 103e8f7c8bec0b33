"""FSDP2 actors for tests: shards that do not divide, empty shards, every policy; and their bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

ODD = 1001
"""A first dimension that no number of ranks here divides."""
WIDTH = 24


class Block(nn.Module):
    """An uneven matrix, a row that only one rank has, an even matrix and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, ODD)
        self.down = nn.Linear(ODD, WIDTH)
        self.scale = nn.Parameter(torch.ones(1, WIDTH))
        self.register_buffer("shift", torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale + self.shift


class ShardedActor:
    """Two blocks under FSDP2, an optimizer, and `step`. Equal on every rank for equal arguments.

    Args:
        mesh: shape of the device mesh; two numbers are replicas and shards (HSDP).
        options: for `fully_shard`.
        mixed: parameters gathered in bf16.
    """

    def __init__(self, mesh: tuple[int, ...] = (), *, mixed: bool = False, fused: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        shape = mesh or (dist.get_world_size(),)
        names = ("replicate", "shard")[-len(shape) :]
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=names)
        if mixed:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.model = nn.Sequential(Block(), Block())
        for block in self.model:
            fully_shard(block, **options)
        fully_shard(self.model, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=fused)

    def forward(self, k: int) -> torch.Tensor:
        torch.manual_seed(100 * k + dist.get_rank())
        loss: torch.Tensor = self.model(torch.randn(4, WIDTH)).square().mean()
        return loss

    def step(self, k: int) -> float:
        self.optimizer.zero_grad()
        loss = self.forward(k)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def bits(self) -> dict[str, bytes]:
        """This rank's shards of parameters and optimizer state, and its buffers."""
        found = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for index, values in enumerate(self.optimizer.state.values()):
            found |= {f"{index}.{key}": value for key, value in values.items()}
        return {name: bits(tensor) for name, tensor in found.items()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, dist.tensor.DTensor) else tensor


def bits(tensor: torch.Tensor) -> bytes:
    """This rank's part of a tensor, NaN included."""
    return local(tensor.detach()).clone().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
