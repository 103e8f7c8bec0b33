"""What GPU tests share: the driver's numbers, exact bits, dirty memory."""

import gc
from collections.abc import Sequence

import torch

from torpor.memory.base import byte_view
from torpor.memory.vmm import VmmBackend, vmm_backend

MIB = 1024**2
GIB = 1024**3
DEVICE = torch.device("cuda", 0)


def used_bytes() -> int:
    """Bytes the driver counts as used on the device, by all processes."""
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(DEVICE)
    return total - free


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A host copy of the exact bits, any dtype and stride."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()


def same(before: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(b, bits(t)) for b, t in zip(before, tensors, strict=True))


def poison(fraction: float = 0.9) -> None:
    """Dirty the free memory, so that what was not restored cannot look right by luck."""
    free, _ = torch.cuda.mem_get_info(DEVICE)
    x = torch.full((int(free * fraction),), 255, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    del x
    torch.cuda.empty_cache()


def storages(tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
    return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())


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
