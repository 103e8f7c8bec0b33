"""rules/transformer_engine with the library itself: caches, scaling state, captured graphs, primary weights."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gpu import DEVICE, used_bytes
from torpor import Sleeper, pool
from torpor.forecast.recipes import BOTH, ROW, Directions, Format, Recipe
from torpor.kinds import Fate, Role
from torpor.ledger import Ledger, Row

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs TransformerEngine"
)

WIDTH = 256
RECIPES = ("blockwise", "current", "delayed")
_FORMATS = {"blockwise": Format.FP8_BLOCKWISE, "current": Format.FP8_CURRENT, "delayed": Format.FP8_DELAYED}


def _recipe(name: str) -> Any:
    from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

    if name == "delayed":
        return DelayedScaling(amax_history_len=4, amax_compute_algo="max")
    return {"blockwise": Float8BlockScaling, "current": Float8CurrentScaling}[name]()


class Net(nn.Module):
    """One of each kind of module that keeps quantized weights."""

    def __init__(self) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        options = {"params_dtype": torch.bfloat16, "device": DEVICE}
        self.linear = te.Linear(WIDTH, WIDTH, bias=False, **options)
        self.norm_linear = te.LayerNormLinear(WIDTH, 2 * WIDTH, bias=False, **options)
        self.grouped = te.GroupedLinear(2, 2 * WIDTH, WIDTH, bias=False, **options)
        self.mlp = te.LayerNormMLP(WIDTH, 3 * WIDTH, bias=False, **options)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        hidden = self.norm_linear(self.linear(x, is_first_microbatch), is_first_microbatch)
        rows = hidden.shape[0] // 2
        return self.mlp(self.grouped(hidden, [rows, rows], is_first_microbatch), is_first_microbatch)


class Training:
    """A loop of two microbatches a step over a network of TransformerEngine."""

    def __init__(self, recipe: str, make: Callable[[], nn.Module] = Net) -> None:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()
        torch.manual_seed(3)
        self.net = make()
        self.call: Callable[..., torch.Tensor] = self.net
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.recipe = _recipe(recipe)
        self.losses: list[float] = []

    def precision(self) -> contextlib.AbstractContextManager[None]:
        import transformer_engine.pytorch as te

        context: contextlib.AbstractContextManager[None] = te.fp8_autocast(enabled=True, fp8_recipe=self.recipe)
        return context

    def microbatch(self, seed: int, *, first: bool) -> None:
        with self.precision():
            out = self.call(batch(seed), is_first_microbatch=first)
        loss = out.float().square().mean()
        loss.backward()
        self.losses.append(loss.item())

    def step(self, step: int, between: Callable[[], object] = lambda: None) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.microbatch(2 * step, first=True)
        between()
        self.microbatch(2 * step + 1, first=False)
        self.optimizer.step()

    def look(self, seed: int = 0) -> None:
        with torch.no_grad(), self.precision():
            self.net(batch(seed), is_first_microbatch=True)

    def bits(self) -> dict[str, Any]:
        from megatron_models import hash_of, tensors_in

        found: dict[str, Any] = {"losses": self.losses}
        parts = [part for name, parameter in self.net.named_parameters() for part in tensors_in(name, parameter)]
        found |= {name: hash_of(part) for name, part in parts}
        for index, values in enumerate(self.optimizer.state.values()):
            found |= {f"{index}.{key}": hash_of(value) for key, value in values.items()}
        for name, module in self.net.named_modules():
            for key, state in getattr(module, "fp8_meta", {}).items():
                for attribute in ("scale", "amax_history"):
                    value = getattr(state, attribute, None)
                    if key.startswith("scaling_") and isinstance(value, torch.Tensor):
                        found[f"{name}.{key}.{attribute}"] = hash_of(value)
        return found

    def sleeper(self, **options: Any) -> Sleeper:
        return Sleeper(self.net, optimizer=self.optimizer, **options)


def batch(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(256, WIDTH, generator=generator).bfloat16().to(DEVICE).requires_grad_()


def caches(ledger: Ledger) -> list[Row]:
    return [row for row in ledger.rows if row.role is Role.QUANTIZED_CACHE]


def expected_bytes(net: nn.Module, recipe: str, directions: Directions) -> int:
    formula = Recipe(format=_FORMATS[recipe])
    weights = [p for p in net.parameters() if p.ndim == 2]
    return sum(formula.weight_bytes(*weight.shape, directions) for weight in weights)


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_goes_on_bit_for_bit_wherever_it_slept(recipe: str) -> None:
    awake = Training(recipe)
    for step in range(4):
        awake.step(step)
    for in_the_middle in (False, True):
        slept = Training(recipe)
        seen: list[Ledger] = []
        with slept.sleeper() as sleeper:

            def nap(sleeper: Sleeper = sleeper, seen: list[Ledger] = seen) -> None:
                seen.append(sleeper.sleep())
                sleeper.wake()

            for step in range(4):
                slept.step(step, between=nap if in_the_middle else lambda: None)
                if not in_the_middle:
                    nap()
        assert slept.bits() == awake.bits()
        fates = {row.fate for ledger in seen for row in caches(ledger)}
        moved = {Fate.MOVED, Fate.CLEAN}
        assert fates == {Fate.DROPPED} if not (in_the_middle and recipe == "delayed") else fates <= moved


@pytest.mark.parametrize("in_the_pool", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_model_trains_while_another_sleeps(recipe: str, in_the_pool: bool) -> None:
    ends = []
    for sleeps in (False, True):
        with pool() if in_the_pool else contextlib.nullcontext():
            actor, critic = Training(recipe), Training(recipe)  # both before the first step: each forgets what ran
            for training in (actor, critic):
                training.step(0)
        with actor.sleeper() as sleeper, critic.sleeper():
            for step in range(1, 4):
                if sleeps:
                    sleeper.sleep()
                critic.step(step)
                if sleeps:
                    sleeper.wake()
                actor.step(step)
        ends.append((actor.bits(), critic.bits()))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_dropped_at_each_moment_is_what_the_formula_says(recipe: str) -> None:
    training = Training(recipe)
    with training.sleeper() as sleeper:

        def dropped_bytes() -> int:
            before = torch.cuda.memory_allocated()
            rows = caches(sleeper.sleep("caches"))
            assert {row.fate for row in rows} <= {Fate.DROPPED}
            assert before - torch.cuda.memory_allocated() >= sum(row.nbytes for row in rows)
            sleeper.wake()
            return sum(row.nbytes for row in rows)

        assert dropped_bytes() == 0
        training.look()
        assert dropped_bytes() == expected_bytes(training.net, recipe, ROW)
        training.step(0)
        assert dropped_bytes() == expected_bytes(training.net, recipe, BOTH)
        assert dropped_bytes() == 0
        with training.precision():
            training.net(batch(0))  # without a word on microbatches nothing is kept
        assert dropped_bytes() == 0


def test_caches_in_the_pool_give_their_pages_back_too() -> None:
    with pool():
        training = Training("blockwise", make=lambda: _wide(64))
        training.step(0)
    with training.sleeper(memory="vmm") as sleeper:
        sleeper.sleep(["params", "grads", "optimizer", "buffers"])
        before = used_bytes()
        (row,) = caches(sleeper.sleep())
        assert row.fate is Fate.DROPPED
        assert before - used_bytes() >= 0.9 * row.nbytes
        sleeper.wake()
    training.step(1)


def _wide(times: int) -> nn.Module:
    import transformer_engine.pytorch as te

    options = {"params_dtype": torch.bfloat16, "device": DEVICE}
    return te.LayerNormMLP(WIDTH, times * WIDTH, bias=False, **options)


def test_the_option_off_moves_them() -> None:
    training = Training("blockwise")
    training.step(0)
    with training.sleeper(clear_quantized_weight_workspaces=False) as sleeper:
        rows = caches(sleeper.sleep())
        assert {(row.fate, row.reason) for row in rows} == {(Fate.MOVED, "clear_quantized_weight_workspaces is off")}
        sleeper.wake()
    training.step(1)
    awake = Training("blockwise")
    awake.step(0)
    awake.step(1)
    assert awake.bits() == training.bits()


# ------------------------------------------------------------------------------------------------ captured graphs


def _layer() -> nn.Module:
    import transformer_engine.pytorch as te

    return te.Linear(WIDTH, 2 * WIDTH, bias=False, params_dtype=torch.bfloat16, device=DEVICE)


@contextlib.contextmanager
def _captured(recipe: str) -> Iterator[Training]:
    """A training whose layer is a captured graph, all of it in memory that can sleep in its place."""
    import transformer_engine.pytorch as te

    with pool():
        training = Training(recipe, make=_layer)
        training.step(0)
        training.call = te.make_graphed_callables(
            training.net,
            (batch(0),),
            enabled=True,
            recipe=training.recipe,
            cache_quantized_params=True,
        )
        for parameter in training.net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        training.step(1)
    yield training


def _addresses(net: nn.Module) -> list[int]:
    from torpor.rules.transformer_engine import inner_tensors

    held = [w for m in net.modules() for w in getattr(m, "_fp8_workspaces", {}).values()]
    return [tensor.data_ptr() for workspace in held for _, tensor in inner_tensors(workspace)]


@pytest.mark.parametrize("requantize", [True, False], ids=["requantized", "moved"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_replays_after_a_sleep_equal_those_of_a_run_that_never_slept(recipe: str, requantize: bool) -> None:
    with _captured(recipe) as awake:
        for step in range(2, 5):
            awake.step(step)
        expected = awake.bits()
        del awake.call, awake
    with _captured(recipe) as slept:
        addresses = _addresses(slept.net)
        assert addresses
        seen: list[Row] = []
        with slept.sleeper(memory="vmm", requantize_under_cuda_graphs=requantize) as sleeper:

            def nap() -> None:
                seen.extend(caches(sleeper.sleep()))
                sleeper.wake()

            for step in range(2, 5):
                slept.step(step, between=nap)
                nap()
            assert _addresses(slept.net) == addresses
        assert slept.bits() == expected
    fates = {row.fate for row in seen}
    assert Fate.DROPPED not in fates
    assert (Fate.REBUILT in fates) == (requantize and recipe != "delayed")
    assert fates <= {Fate.REBUILT, Fate.MOVED, Fate.CLEAN, Fate.KEPT}
    if Fate.REBUILT in fates:
        assert [row.nbytes for row in seen if row.fate is Fate.REBUILT] == 6 * [2 * 2 * WIDTH * WIDTH]


def test_a_plain_capture_is_noticed_by_its_private_pool() -> None:
    training = Training("blockwise")
    training.step(0)
    stream_input = torch.zeros(1000, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = stream_input + 1
    with training.sleeper(requantize_under_cuda_graphs=False) as sleeper:
        rows = caches(sleeper.sleep())
        assert Fate.DROPPED not in {row.fate for row in rows}
        sleeper.wake()
    assert kept is not None


# ------------------------------------------------------------------------------------------------ primary weights


@pytest.mark.parametrize("recipe", RECIPES)
def test_primary_quantized_weights_and_what_scales_them_come_back(recipe: str) -> None:
    import transformer_engine.pytorch as te

    def make() -> nn.Module:
        with te.fp8_model_init(enabled=True, recipe=_recipe(recipe)):
            return Net()

    training = Training(recipe, make=make)
    training.microbatch(0, first=True)

    before = training.bits()
    with Sleeper(training.net) as sleeper:
        ledger = sleeper.sleep()
        assert not caches(ledger)
        moved = sum(row.nbytes for row in ledger.rows if row.role is Role.PARAM and row.fate is Fate.MOVED)
        assert moved >= expected_bytes(training.net, recipe, ROW)
        sleeper.wake()
    assert training.bits() == before
