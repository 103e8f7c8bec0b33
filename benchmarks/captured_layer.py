"""A feed-forward layer of Llama 3 8B in TransformerEngine, captured as CUDA graphs, asleep between its replays.

Used by megatron_actor.py. The layer trains for some steps of two microbatches each, with AdamW. Its quantized weights
lie where the graphs read them; a sleep either moves them or gives their pages up and quantizes again at wake.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from torpor import Sleeper, pool
from torpor.fingerprint import fingerprints
from torpor.kinds import Role

Json = dict[str, Any]
WIDTH, FFN_WIDTH, TOKENS, STEPS = 4096, 14336, 512, 4
WAYS = {"moved": False, "quantized again": True}
"""By the value of `requantize_under_cuda_graphs`."""


class Training:
    """The captured layer and its optimizer, all in memory whose addresses stay."""

    def __init__(self, precision: str) -> None:
        import transformer_engine.pytorch as te
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()
        torch.manual_seed(0)
        self.recipe = _recipe(precision)
        self.losses: list[float] = []
        with pool():
            options = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
            self.layer = te.LayerNormMLP(WIDTH, FFN_WIDTH, normalization="RMSNorm", activation="swiglu", **options)
            self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=1e-4)
            self._call: Callable[..., torch.Tensor] = self.layer
            self.step(0)
            self._call = te.make_graphed_callables(
                self.layer, (batch(0),), enabled=True, recipe=self.recipe, cache_quantized_params=True
            )
            for parameter in self.layer.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self.step(1)

    def step(self, step: int, between: Callable[[], object] = lambda: None) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        for number in range(2):
            with self._precision():
                out = self._call(batch(2 * step + number), is_first_microbatch=number == 0)
            loss = out.float().square().mean()
            loss.backward()
            self.losses.append(loss.item())
            if number == 0:
                between()
        self.optimizer.step()

    def digests(self) -> list[str]:
        held = [*self.layer.parameters(), *(v for values in self.optimizer.state.values() for v in values.values())]
        blocks = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in held]
        return [*(digest.hex() for digest in fingerprints(blocks)), repr(self.losses)]

    def _precision(self) -> AbstractContextManager[None]:
        import transformer_engine.pytorch as te

        context: AbstractContextManager[None] = te.fp8_autocast(enabled=True, fp8_recipe=self.recipe)
        return context


def replays(precision: str) -> Json:
    """For each way, whether replays between sleeps gave the bits of replays without, and the fates of the caches."""
    awake = Training(precision)
    for step in range(2, STEPS):
        awake.step(step)
    expected = awake.digests()
    del awake
    return {"layers": 1} | {way: _asleep(precision, expected, requantize) for way, requantize in WAYS.items()}


def _asleep(precision: str, expected: list[str], requantize: bool) -> Json:
    training = Training(precision)
    ledgers = []
    with Sleeper(
        training.layer, optimizer=training.optimizer, memory="vmm", requantize_under_cuda_graphs=requantize
    ) as sleeper:

        def nap() -> None:
            ledgers.append(sleeper.sleep())
            sleeper.wake()

        for step in range(2, STEPS):
            training.step(step, between=nap)
            nap()
        found = training.digests()
    caches = [row for row in ledgers[-1].rows if row.role is Role.QUANTIZED_CACHE]
    return {
        "equal": found == expected,
        "sleeps": len(ledgers),
        "bytes_by_fate": {row.fate: row.nbytes for row in caches},
        "reasons": sorted({row.reason for row in caches}),
    }


def batch(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, WIDTH, generator=generator).bfloat16().cuda().requires_grad_()


def _recipe(precision: str) -> Any:
    from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

    return {"blockwise": Float8BlockScaling, "current": Float8CurrentScaling, "delayed": DelayedScaling}[precision]()
