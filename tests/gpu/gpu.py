"""What GPU tests share: the driver's numbers, exact bits, dirty memory, one captured training step."""

import gc
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import nn

import torpor
import zoo
from torpor.memory import cuda
from torpor.memory.base import byte_view
from torpor.memory.vmm import VmmBackend, vmm_backend

MIB = 1024**2
GIB = 1024**3
DEVICE = torch.device("cuda", 0)

#: Where a test's tensors are allocated, by the name of the place.
PLACES: dict[str, Callable] = {"pool": lambda: torpor.pool(all_threads=True), "outside": nullcontext}


def used_bytes() -> int:
    """Bytes the driver counts as used on the device: by this process where NVML tells, else by all."""
    gc.collect()
    torch.cuda.synchronize()
    return cuda.used_bytes(DEVICE)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A host copy of the exact bits, any dtype and stride."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()


def same(before: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(b, bits(t)) for b, t in zip(before, tensors, strict=True))


def poison(fraction: float = 0.9) -> None:
    """Dirty the free memory, so that what was not restored cannot look right by luck.

    Where several workers of pytest-xdist share the GPU each takes its part. Tests that take all of it, or time
    something, must run alone: `-m "not exclusive"` and then `-m exclusive`.
    """
    free, _ = torch.cuda.mem_get_info(DEVICE)
    fraction /= int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    x = torch.full((int(free * fraction),), 255, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    del x
    torch.cuda.empty_cache()


def cycle(sleeper: torpor.Sleeper, times: int = 1, fraction: float = 0.9) -> None:
    for _ in range(times):
        sleeper.sleep()
        poison(fraction)
        sleeper.wake()


def storages(tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
    return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())


def on_gpu(make: Callable[[], zoo.Situation], place: str = "pool") -> zoo.Situation:
    """A situation of `zoo` with all its tensors on the GPU."""
    with PLACES[place](), torch.device(DEVICE):
        return make()


class Actor:
    """The least that a sleeper does with `vmm`: everything known, and every stray, to host tensors and back."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.backend: VmmBackend = vmm_backend()
        self.tensors = tensors
        self._saved: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    def sleep(self) -> int:
        torch.cuda.synchronize()
        self.backend.refresh()
        known = storages(self.tensors)
        assert [s for s in known if self.backend.refusal(s)] == []
        known += self.backend.strays(known)
        self._saved = [(s, byte_view(s).cpu()) for s in known]
        freed = self.backend.release(known)
        self.backend.settle()
        return freed

    def wake(self) -> None:
        self.backend.restore([storage for storage, _ in self._saved])
        for storage, saved in self._saved:
            byte_view(storage).copy_(saved)
        self._saved = []


class CapturedStep:
    """A training step in a CUDA graph: parameters, gradients, optimizer state and two inputs that it reads."""

    def __init__(self, place: str) -> None:
        torch.manual_seed(0)
        with PLACES[place]():
            self.model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).to(DEVICE)
            self.x, self.table = torch.randn(64, 512, device=DEVICE), torch.randn(512, device=DEVICE)
            for p in self.model.parameters():
                p.grad = torch.zeros_like(p)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), capturable=True)
            self.optimizer.step()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()
        self.graph.replay()

    def tensors(self) -> list[torch.Tensor]:
        held = [self.x, self.table, *(t for p in self.model.parameters() for t in (p, p.grad))]
        return held + [v for state in self.optimizer.state.values() for v in state.values()]

    def _step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        (self.model(self.x) * self.table).square().mean().backward()
        self.optimizer.step()
