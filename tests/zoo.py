"""Actors for tests: the aliasing, the kinds of tensors and the owners of memory that real ones have.

Each builder returns a `Situation`: an actor, and every tensor of it whose bits must survive a sleep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from torpor.rules.base import Actor

MakeOptimizer = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]


@dataclass
class Situation:
    """An actor and what must survive."""

    actor: Actor
    live: dict[str, torch.Tensor]
    """Tensors to compare before and after: bits, addresses, shapes, strides."""
    step: Callable[[], None] | None = None
    """One training step, where the situation has an optimizer."""
    keep_alive: list[object] = field(default_factory=list)
    """Owners of foreign memory."""

    def bits(self) -> dict[str, bytes]:
        """The contents of everything in `live`."""
        return {name: bits(tensor) for name, tensor in self.live.items()}

    def addresses(self) -> dict[str, int]:
        """`data_ptr()` of everything in `live`."""
        return {name: tensor.data_ptr() for name, tensor in self.live.items()}


def bits(tensor: torch.Tensor) -> bytes:
    """The contents of a tensor, any dtype or stride, NaN included. `numpy()` sees a copy: it locks a storage's size."""
    return tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


#: Every optimizer a sleep must not disturb. Muon steps matrices only; the rest is then without optimizer.
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=1e-2, max_iter=3, history_size=2),
}


class ZooModel(nn.Module):
    """One of each kind of tensor a module can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(1000, 256)
        self.head = nn.Linear(256, 1000, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("inv_freq", torch.rand(128), persistent=False)
        self.register_buffer("mask", torch.rand(64, 64) > 0.5)
        self.norm = nn.BatchNorm1d(256)
        self.scale = torch.rand(7)
        self.empty = nn.Parameter(torch.empty(0, 256))
        self.scalar = nn.Parameter(torch.tensor(3.0))
        self.transposed = nn.Parameter(torch.randn(64, 32).t())
        self.frozen = nn.Parameter(torch.randn(33, 5), requires_grad=False)
        self.table = nn.ParameterDict({"a": nn.Parameter(torch.randn(11)), "b": nn.Parameter(torch.randn(13))})
        self.fp8 = torch.randn(256, 256).to(torch.float8_e4m3fn)
        self.complex = torch.randn(50, dtype=torch.complex64)
        self.half = torch.randn(77).bfloat16()
        self.integers = {"steps": [torch.arange(5), (torch.zeros(3, dtype=torch.int8),)]}
        self.notes = SimpleNamespace(running=torch.rand(9), comment="not a tensor")

    def live(self) -> dict[str, torch.Tensor]:
        """Every tensor, by the name of its place."""
        named = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers())
        named |= {key: value for key, value in vars(self).items() if isinstance(value, torch.Tensor)}
        steps, (zeros,) = self.integers["steps"]
        return named | {"integers.steps[0]": steps, "integers.steps[1][0]": zeros, "notes.running": self.notes.running}


def zoo() -> Situation:
    """Ties, buffers of both kinds, plain attributes, views with offsets, odd dtypes, tensors handed in."""
    torch.manual_seed(0)
    model = ZooModel()
    base = torch.randn(4096)
    model.off = base[100:200]
    cache = {"pages": torch.arange(999), "empty": [], "nothing": None}
    live = model.live() | {"base": base, "pages": cache["pages"]}
    return Situation(Actor({"model": model}, extra={"extra": [base, cache]}), live)


def flat_buffers(n: int = 6, rows: int = 64, cols: int = 64) -> Situation:
    """Parameters view one flat buffer, their `main_grad` another, which the masters' `.grad` aliases."""
    torch.manual_seed(0)
    size = rows * cols
    flat = torch.randn(n * size).bfloat16()
    grads = torch.zeros(n * size)
    model = nn.Module()
    masters = []
    for i in range(n):
        parameter = nn.Parameter(flat[i * size : (i + 1) * size].view(rows, cols))
        model.register_parameter(f"w{i}", parameter)
        master = parameter.detach().float().clone().requires_grad_()
        parameter.main_grad = master.grad = grads[i * size : (i + 1) * size].view(rows, cols)
        masters.append(master)
    optimizer = torch.optim.AdamW(masters, lr=1e-2)

    def step() -> None:
        grads.normal_()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)

    live = {"flat": flat} | {f"master{i}": m for i, m in enumerate(masters)}
    stray = grads[5:17]  # somebody else's view of the gradients
    return Situation(Actor({"model": model}, {"optimizer": optimizer}), live, step, keep_alive=[grads, stray])


def trained(make: MakeOptimizer, width: int = 64) -> Situation:
    """A small model with an optimizer whose state does not exist yet; `step` makes it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    optimizer = make(list(model.parameters()))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.full((4, width), 0.5)).square().mean()
        loss.backward()
        return loss

    def step() -> None:
        optimizer.step(closure)

    return Situation(Actor({"model": model}, {"optimizer": optimizer}), dict(model.named_parameters()), step)


def low_rank(n: int = 4, width: int = 128, rank: int = 4) -> Situation:
    """A frozen base, two adapter matrices handed in as plain parameters, and their optimizer."""
    torch.manual_seed(0)
    base = [nn.Parameter(torch.randn(width, width), requires_grad=False) for _ in range(n)]
    down, up = nn.Parameter(torch.randn(width, rank)), nn.Parameter(torch.zeros(rank, width))
    optimizer = torch.optim.AdamW([down, up], lr=1e-2)

    def step() -> None:
        optimizer.zero_grad()
        (base[0] + down @ up).square().sum().backward()
        optimizer.step()

    live = {f"base{i}": p for i, p in enumerate(base)} | {"down": down, "up": up}
    actor = Actor({}, {"optimizer": optimizer}, extra={"base": base, "adapters": [down, up]})
    return Situation(actor, live, step)


def peft_lora() -> Situation:
    """A tiny Llama with LoRA adapters made by PEFT."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    )
    model = get_peft_model(
        LlamaForCausalLM(config),
        LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]),
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = torch.arange(16).view(2, 8)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    live = dict(model.named_parameters()) | dict(model.named_buffers())
    return Situation(Actor({"model": model}, {"optimizer": optimizer}), live, step)


def numpy_shared() -> Situation:
    """Memory that numpy owns, twice over, and a slice of it."""
    array = np.arange(40_000, dtype=np.float32)
    whole, again, part = torch.from_numpy(array), torch.from_numpy(array), torch.from_numpy(array[1000:2000])
    lent = torch.randn(5000)
    back = torch.from_numpy(lent.numpy())
    live = {"whole": whole, "again": again, "part": part, "lent": lent, "back": back}
    return Situation(Actor(extra={"arrays": dict(live)}), live, keep_alive=[array])


def half_overlapping() -> Situation:
    """Two storages of which neither contains the other: only numpy can make them."""
    array = np.arange(30_000, dtype=np.float32)
    low, high = torch.from_numpy(array[:20_000]), torch.from_numpy(array[10_000:])
    return Situation(Actor(extra={"arrays": [low, high]}), {"low": low, "high": high}, keep_alive=[array])


def mapped_from_disk(directory: Path) -> Situation:
    """Weights that safetensors maps from a file; their storages cannot be resized."""
    path = directory / "weights.safetensors"
    save_file({"a": torch.randn(300, 300), "b": torch.randn(1000)}, path)
    with safe_open(path, framework="pt") as file:
        live = {name: file.get_tensor(name) for name in ("a", "b")}
    return Situation(Actor(extra={"mapped": dict(live)}), live)


def shared_memory() -> Situation:
    """Tensors in shared memory, as a data loader or another process has them."""
    model = nn.Linear(128, 128).share_memory()
    loose = torch.randn(20_000).share_memory_()
    live = dict(model.named_parameters()) | {"loose": loose}
    return Situation(Actor({"model": model}, extra={"loose": loose}), live)


#: Every situation that needs no argument, by name.
SITUATIONS: dict[str, Callable[[], Situation]] = {
    "zoo": zoo,
    "flat_buffers": flat_buffers,
    "low_rank": low_rank,
    "numpy_shared": numpy_shared,
    "half_overlapping": half_overlapping,
    "shared_memory": shared_memory,
    **{f"trained-{name}": lambda make=make: trained(make) for name, make in OPTIMIZERS.items()},
}
