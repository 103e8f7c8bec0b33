"""Megatron-Core in small, on the CPU and over any process group: the buffers, the optimizers, their life in a step."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import distributed, nn


class OneRank:
    """A process group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class ParamAndGradBuffer:
    """Parameters of one dtype in reverse order, each padded to 64 elements, buckets to a multiple of the ranks."""

    def __init__(self, params: Sequence[nn.Parameter], ddp_config: SimpleNamespace, group: Any) -> None:
        self.params = list(params)
        self.ddp_config = ddp_config
        self.data_parallel_group = group
        self.nccl_ub = ddp_config.nccl_ub
        self.extra_main_grads: list[torch.Tensor] = []
        self.param_index_map: dict[nn.Parameter, tuple[int, int, int]] = {}
        self.buckets: list[SimpleNamespace] = []
        sharded = ddp_config.use_distributed_optimizer
        numel = self._lay_out(sharded, group.size())
        dtype = self.params[0].dtype
        self.param_data = torch.zeros(numel, dtype=dtype) if sharded else None
        self.grad_data = torch.zeros(numel, dtype=ddp_config.grad_dtype)
        for bucket in self.buckets:
            bucket.grad_data = self.grad_data[bucket.offset : bucket.end]
            bucket.param_data = self.param_data[bucket.offset : bucket.end] if sharded else None
        for param, (begin, end, _) in self.param_index_map.items():
            if self.param_data is not None:
                view = self.param_data[begin:end].view(param.shape)
                view.copy_(param.data)
                param.data = view
            param.main_grad = self.grad_data[begin:end].view(param.shape)
            if ddp_config.fp32_local_accumulation:
                param.main_grad_copy_in_grad_buffer = param.main_grad
                param.main_grad = torch.zeros_like(param.main_grad, dtype=torch.float32)
                self.extra_main_grads.append(param.main_grad)

    def _lay_out(self, sharded: bool, ranks: int) -> int:
        align, end_align = (64, math.lcm(ranks, 128)) if sharded else (1, 1)
        offset = end = 0
        for number, param in enumerate(reversed(self.params)):
            begin = _up(end, align)
            end = begin + param.numel()
            self.param_index_map[param] = (begin, end, len(self.buckets))
            if number % 2 == 1 or number == len(self.params) - 1:
                end = _up(end, end_align)
                self.buckets.append(SimpleNamespace(offset=offset, end=end))
                offset = end
        return end

    def shard(self, bucket: SimpleNamespace) -> tuple[int, int]:
        length = (bucket.end - bucket.offset) // self.data_parallel_group.size()
        begin = bucket.offset + self.data_parallel_group.rank() * length
        return begin, begin + length


class DistributedDataParallel(nn.Module):
    def __init__(
        self, module: nn.Module, *, distributed_optimizer: bool = True, group: Any = None, **more: Any
    ) -> None:
        super().__init__()
        self.module = module
        self.ddp_config = SimpleNamespace(
            **{
                "use_distributed_optimizer": distributed_optimizer,
                "overlap_param_gather": False,
                "nccl_ub": False,
                "grad_dtype": torch.float32,
                "fp32_local_accumulation": False,
                **more,
            }
        )
        self.group = group or OneRank()
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for param in module.parameters():
            if param.requires_grad:
                by_dtype.setdefault(param.dtype, []).append(param)
                param.register_post_accumulate_grad_hook(_into_main_grad)
        self.buffers = [ParamAndGradBuffer(params, self.ddp_config, self.group) for params in by_dtype.values()]
        self.expert_parallel_buffers: list[ParamAndGradBuffer] = []

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.module(*args, **kwargs)

    def zero_grad_buffer(self) -> None:
        for buffer in self.buffers:
            buffer.grad_data.zero_()
            for grad in buffer.extra_main_grads:
                grad.zero_()

    def finish_grad_sync(self) -> None:
        for buffer in self.buffers:
            if self.group.size() > 1:
                distributed.all_reduce(buffer.grad_data, group=self.group)
                buffer.grad_data /= self.group.size()

    def start_param_sync(self) -> None:
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                if self.group.size() > 1 and buffer.param_data is not None:
                    begin, end = buffer.shard(bucket)
                    distributed.all_gather_into_tensor(
                        bucket.param_data, buffer.param_data[begin:end].clone(), group=self.group
                    )


def _into_main_grad(param: torch.Tensor) -> None:
    param.main_grad.add_(param.grad.data)
    param.grad = None


class MegatronOptimizer:
    """Not a `torch.optim.Optimizer`: it has one."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer
        self.is_stub_optimizer = optimizer is None
        self.grad_scaler = None
        self._scale_one = torch.ones(1)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def reload_model_params(self) -> None:
        for model, master in self._pairs():
            master.data.copy_(model)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> tuple[bool, float, None]:
        self._copy_grads()
        norm = sum(float(p.grad.norm()) for g in self.optimizer.param_groups for p in g["params"])
        self.optimizer.step()
        for model, master in self._pairs():
            model.data.copy_(master)
        return True, norm, None


class Float16OptimizerWithFloat16Params(MegatronOptimizer):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.float16_groups: list[list[torch.Tensor]] = []
        self.fp32_from_float16_groups: list[list[torch.Tensor]] = []
        self.fp32_from_fp32_groups: list[list[torch.Tensor]] = []
        for group in optimizer.param_groups:
            half = [p for p in group["params"] if p.dtype is torch.bfloat16]
            full = [p for p in group["params"] if p.dtype is torch.float32]
            masters = [p.detach().clone().float().requires_grad_() for p in half]
            for param, master in zip(half, masters, strict=True):
                param.main_param = master
            self.float16_groups.append(half)
            self.fp32_from_float16_groups.append(masters)
            self.fp32_from_fp32_groups.append(full)
            group["params"] = [*masters, *full]

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for models, masters in zip(self.float16_groups, self.fp32_from_float16_groups, strict=True):
            yield from zip(models, masters, strict=True)

    def _copy_grads(self) -> None:
        for model, master in self._pairs():
            master.grad = model.main_grad.float()
        for group in self.fp32_from_fp32_groups:
            for param in group:
                param.grad = param.main_grad


class DistributedOptimizer(MegatronOptimizer):
    """Each rank steps the masters of its shard of each bucket, and gathers the parameters of all."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], ddp: DistributedDataParallel) -> None:
        self.ddp = ddp
        half: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = []
        full: list[tuple[nn.Parameter, torch.Tensor]] = []
        for param, shard, grad in _shards(ddp):
            if param.dtype is torch.float32:
                full.append((param, shard.requires_grad_()))
            else:
                half.append((param, shard, shard.clone().float().requires_grad_()))
                param.main_param = half[-1][2]
            self._grads = [*getattr(self, "_grads", []), grad]
        self.model_float16_groups = [[param for param, _, _ in half]]
        self.shard_float16_groups = [[shard for _, shard, _ in half]]
        self.shard_fp32_from_float16_groups = [[master for _, _, master in half]]
        self.model_fp32_groups = [[param for param, _ in full]]
        self.shard_fp32_groups = [[shard for _, shard in full]]
        masters = [*self.shard_fp32_groups[0], *self.shard_fp32_from_float16_groups[0]]
        super().__init__(make(masters) if masters else None)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from zip(self.shard_float16_groups[0], self.shard_fp32_from_float16_groups[0], strict=True)

    def _copy_grads(self) -> None:
        by_param = {id(param): [] for param, _, _ in _shards(self.ddp)}
        for param, _, grad in _shards(self.ddp):
            by_param[id(param)].append(grad)
        models = [*self.model_fp32_groups[0], *self.model_float16_groups[0]]
        for param, master in zip(models, self.optimizer.param_groups[0]["params"], strict=True):
            master.grad = by_param[id(param)].pop(0).float()

    def step(self) -> tuple[bool, float, None]:
        answer = super().step() if self.optimizer is not None else (True, 0.0, None)
        self.ddp.start_param_sync()
        return answer


def _shards(ddp: DistributedDataParallel) -> Iterator[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]:
    """Parameter, this rank's stretch of it in the parameter buffer, and that stretch of the gradient buffer."""
    for buffer in ddp.buffers:
        for param, (begin, end, index) in buffer.param_index_map.items():
            low, high = buffer.shard(buffer.buckets[index])
            low, high = max(begin, low), min(end, high)
            if low < high:
                yield param, buffer.param_data[low:high].detach(), buffer.grad_data[low:high]


class ChainedOptimizer(MegatronOptimizer):
    def __init__(self, chained_optimizers: Sequence[MegatronOptimizer]) -> None:
        self.chained_optimizers = list(chained_optimizers)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        raise AssertionError("ChainedOptimizer has more than one optimizer when accessing self.optimizer")

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.chained_optimizers]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        for part, values in zip(self.chained_optimizers, state, strict=True):
            part.load_state_dict(values)

    def zero_grad(self) -> None:
        for part in self.chained_optimizers:
            part.zero_grad()

    def step(self) -> tuple[bool, float, None]:
        for part in self.chained_optimizers:
            part.step()
        return True, 0.0, None


@contextmanager
def imported(monkeypatch: Any) -> Iterator[SimpleNamespace]:
    """As if somebody had imported the library; yields the wrapper of whole-iteration graphs."""
    graphs = SimpleNamespace(cuda_graph={"training": None, "validation": None})
    for name, members in {
        "megatron.core.distributed.distributed_data_parallel": {"DistributedDataParallel": DistributedDataParallel},
        "megatron.core.optimizer.optimizer": {"MegatronOptimizer": MegatronOptimizer},
        "megatron.core.full_cuda_graph": {"FullCudaGraphWrapper": graphs},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    yield graphs
