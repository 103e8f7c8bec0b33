"""rules/megatron and rules/transformer_engine with a Megatron-Core actor: a model, its buffers, its optimizer."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from torpor import Sleeper, pool
from torpor.errors import AsleepError
from torpor.forecast.recipes import BOTH, ROW, Directions, Format, Recipe
from torpor.kinds import Fate, Role
from torpor.ledger import Ledger, Row

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs Megatron-Core")

STEPS = 4
RECIPES = ("bf16", "blockwise", "current", "delayed")
_FORMATS = {"blockwise": Format.FP8_BLOCKWISE, "current": Format.FP8_CURRENT, "delayed": Format.FP8_DELAYED}

#: Ways to build the actor. Muon's package may be missing where Megatron-Core is there.
ACTORS: dict[str, dict[str, Any]] = {
    "whole-params": {"distributed_optimizer": False},
    "moe": {"recipe": "blockwise", "moe": True},
    "dropout": {"recipe": "blockwise", "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "recompute": {
        "recipe": "blockwise",
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "no-cache": {"recipe": "blockwise", "disable_parameter_transpose_cache": True},
    "bf16-grads": {"ddp_options": {"grad_reduce_in_fp32": False}},
    "remainders": {"optimizer_options": {"use_precision_aware_optimizer": True, "store_param_remainders": True}},
    "precision-aware": {"optimizer_options": {"use_precision_aware_optimizer": True, "store_param_remainders": False}},
    "fp8-params": {
        "recipe": "blockwise",
        "fp8_param": True,
        "ddp_options": {"fp8_param_gather": True},
        "optimizer_options": {"fp8_recipe": "blockwise"},
    },
    "cpu-offload": {
        "optimizer_options": {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1.0,
            "use_precision_aware_optimizer": True,
        }
    },
}


def _build(recipe: str = "bf16", **options: Any) -> Any:
    import megatron_models

    return megatron_models.build(recipe, **options)


def _compare(in_the_middle: bool, sleeper_options: dict[str, Any], **options: Any) -> list[Ledger]:
    """Train once without and once with sleeps between all steps, and fail unless every bit is the same."""
    import megatron_models

    with contextlib.nullcontext() if sleeper_options.get("memory") == "resize" else pool():
        megatron_models.start()
        awake = _build(**options)
        for step in range(STEPS):
            awake.log_probabilities(step)
            awake.step(step)
        expected = awake.digest()
        del awake
        megatron_models.seed()
        slept = _build(**options)
    ledgers: list[Ledger] = []
    with Sleeper(slept.model, optimizer=slept.optimizer, **sleeper_options) as sleeper:

        def nap() -> None:
            ledgers.append(sleeper.sleep())
            sleeper.wake()

        nap()
        for step in range(STEPS):
            slept.log_probabilities(step)
            nap()
            slept.step(step, between=nap if in_the_middle else lambda: None)
            nap()
        found = slept.digest()
        assert found.keys() == expected.keys()
        differ = [name for name in expected if found[name] != expected[name]]
        assert not differ, (differ[:8], found["losses"], expected["losses"])
    return ledgers


def _rows(ledger: Ledger, component: str) -> list[Row]:
    tiny = ("too small to give a page back", "empty")
    return [row for row in ledger.rows if row.component == component and row.reason not in tiny]


def _fates(ledger: Ledger, component: str) -> set[Fate]:
    return {row.fate for row in _rows(ledger, component)}


def _caches(ledger: Ledger) -> list[Row]:
    """Quantized weights; scratch memory of the libraries is in the same component."""
    return [row for row in _rows(ledger, "caches") if row.role is Role.QUANTIZED_CACHE]


def _cache_fates(ledger: Ledger) -> set[Fate]:
    return {row.fate for row in _caches(ledger)}


@pytest.mark.parametrize(
    ("memory", "rematerialize"), [("auto", True), ("resize", False)], ids=["auto-rematerialized", "resize-copied"]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_sleep_between_all_steps_changes_no_bit(recipe: str, memory: str, rematerialize: bool) -> None:
    options = {"memory": memory, "rematerialize_param_from_master_weight": rematerialize}
    ledgers = _compare(False, options, recipe=recipe)
    last = ledgers[-1]
    assert _fates(last, "grads") == {Fate.ZEROED}
    assert _fates(last, "params") == ({Fate.REBUILT} if rematerialize else {Fate.MOVED})
    assert _fates(last, "optimizer") <= {Fate.MOVED, Fate.CLEAN}
    assert _cache_fates(last) == (set() if recipe == "bf16" else {Fate.DROPPED})
    assert _fates(ledgers[0], "grads") == {Fate.ZEROED}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_sleep_between_two_microbatches_changes_no_bit(recipe: str) -> None:
    ledgers = _compare(True, {}, recipe=recipe)
    middle = ledgers[2::3]
    for ledger in middle:
        assert _fates(ledger, "grads") <= {Fate.MOVED, Fate.CLEAN}
        assert Fate.ZEROED not in _fates(ledger, "grads")
    if recipe == "delayed":
        assert all(Fate.DROPPED not in _cache_fates(ledger) for ledger in middle)


@pytest.mark.parametrize("rematerialize", [False, True], ids=["copied", "rematerialized"])
@pytest.mark.parametrize("optimizer", ["dist_muon", "muon"])
def test_muon(optimizer: str, rematerialize: bool) -> None:
    if importlib.util.find_spec("emerging_optimizers") is None:
        pytest.skip("needs the package emerging-optimizers")
    ledgers = _compare(
        True,
        {"rematerialize_param_from_master_weight": rematerialize},
        recipe="blockwise",
        optimizer=optimizer,
    )
    assert _fates(ledgers[-1], "params") == ({Fate.REBUILT} if rematerialize else {Fate.MOVED})
    assert _fates(ledgers[-1], "grads") == {Fate.ZEROED}


@pytest.mark.parametrize("kind", ACTORS)
def test_every_kind_of_actor(kind: str) -> None:
    ledgers = _compare(True, {"rematerialize_param_from_master_weight": True}, **ACTORS[kind])
    last = ledgers[-1]
    assert _fates(last, "grads") == {Fate.ZEROED}
    rebuilt = Fate.REBUILT in _fates(last, "params")
    assert rebuilt == (kind not in ("remainders", "precision-aware", "cpu-offload"))
    if kind in ("remainders", "precision-aware"):
        assert "keeps the masters itself" in _rows(last, "params")[0].reason
    if kind == "no-cache":
        assert not _caches(last)
    if kind == "cpu-offload":
        assert Fate.KEPT in _fates(last, "optimizer")
    if kind == "fp8-params":
        assert Fate.MOVED in _fates(last, "params")
        assert not _caches(last)


def _cached_bytes(model: nn.Module, recipe: str, directions: Directions) -> int:
    import megatron_models

    formula = Recipe(format=_FORMATS[recipe])
    return sum(formula.weight_bytes(*shape, directions) for shape in megatron_models.quantized_shapes(model))


@pytest.mark.parametrize("recipe", ["blockwise", "current", "delayed"])
def test_what_is_dropped_is_what_the_forecast_says(recipe: str) -> None:
    import megatron_models

    megatron_models.start()
    actor = _build(recipe)
    with Sleeper(actor.model, optimizer=actor.optimizer) as sleeper:

        def dropped_bytes() -> int:
            rows = _caches(sleeper.sleep("caches"))
            sleeper.wake()
            assert {row.fate for row in rows} <= {Fate.DROPPED}
            return sum(row.nbytes for row in rows)

        assert dropped_bytes() == 0
        actor.log_probabilities(0)
        expected = _cached_bytes(actor.model, recipe, ROW)
        assert dropped_bytes() == expected > 0
        actor.step(0)
        expected = _cached_bytes(actor.model, recipe, BOTH)
        assert dropped_bytes() == expected > 0


@pytest.mark.parametrize(
    ("options", "bytes_a_parameter"),
    [
        ({"clear_quantized_weight_workspaces": False, "dead_grads_after_step": False}, 18 + 2.0005),
        ({"dead_grads_after_step": False}, 18),
        ({}, 14),
        ({"rematerialize_param_from_master_weight": True}, 12),
    ],
    ids=["all", "caches", "grads", "params"],
)
def test_bytes_copied(options: dict[str, Any], bytes_a_parameter: float) -> None:
    import megatron_models

    megatron_models.start()
    actor = _build("blockwise")
    with Sleeper(actor.model, optimizer=actor.optimizer, **options) as sleeper:
        actor.step(0)
        shapes = megatron_models.quantized_shapes(actor.model)
        cached = sum(rows * cols for rows, cols in shapes)
        parameters = sum(p.numel() for p in actor.model.parameters())
        expected = int(bytes_a_parameter) * parameters
        if bytes_a_parameter > 18:
            expected = 18 * parameters + _cached_bytes(actor.model, "blockwise", BOTH)
        assert cached < parameters
        copied = sleeper.sleep().copied_bytes
        assert abs(copied - expected) < 0.01 * expected
        sleeper.wake()


def test_a_lazy_wake_trains_on_and_the_step_waits() -> None:
    import megatron_models

    megatron_models.start()
    awake = _build("blockwise")
    awake.step(0)
    awake.step(1)
    expected = awake.digest()
    del awake
    megatron_models.seed()
    slept = _build("blockwise")
    with Sleeper(slept.model, optimizer=slept.optimizer) as sleeper:
        slept.step(0)
        sleeper.sleep()
        sleeper.wake(lazy=True)
        slept.step(1)
        assert slept.digest() == expected


def test_computing_asleep_raises_before_anything_is_read() -> None:
    import megatron_models

    megatron_models.start()
    actor = _build("blockwise")
    refused: list[Callable[[], object]] = [
        lambda: actor.forward(0),
        lambda: actor.optimizer.step(),
        lambda: actor.model.zero_grad_buffer(),
        lambda: actor.model.start_param_sync(),
    ]
    with Sleeper(actor.model, optimizer=actor.optimizer) as sleeper:
        actor.step(0)
        sleeper.sleep()
        for call in refused:
            with pytest.raises(AsleepError):
                call()
    actor.step(1)


def test_parameters_are_read_from_sleeping_masters() -> None:
    import megatron_models

    megatron_models.start()
    actor = _build("bf16")
    options = {"rematerialize_param_from_master_weight": True}
    with Sleeper(actor.model, optimizer=actor.optimizer, **options) as sleeper:
        actor.step(0)
        before = {name: megatron_models.hash_of(p) for name, p in actor.model.named_parameters()}
        sleeper.sleep()
        read = sleeper.read(dict(actor.model.named_parameters()))
        assert {name: megatron_models.hash_of(p) for name, p in read.items()} == before
        sleeper.wake("params")
        assert {name: megatron_models.hash_of(p) for name, p in actor.model.named_parameters()} == before


def _train_with_graphs(way: str) -> tuple[dict[str, str], list[set[Fate]]]:
    """Train over layers that Megatron captured in the first step; with sleeps, unless `way` is "awake"."""
    import megatron_models

    megatron_models.start(graphs=True)
    with pool():
        actor = _build("blockwise", cuda_graph_impl="local", cuda_graph_warmup_steps=1)
        actor.step(0)
        actor.step(1)
    fates: list[set[Fate]] = []
    options = {
        "requantize_under_cuda_graphs": way != "moved",
        "rematerialize_param_from_master_weight": way == "rematerialized",
    }
    with Sleeper(actor.model, optimizer=actor.optimizer, **options) as sleeper:

        def nap() -> None:
            if way != "awake":
                fates.append(_cache_fates(sleeper.sleep()))
                sleeper.wake()

        for step in range(2, 2 + STEPS):
            actor.step(step, between=nap)
            nap()
        return actor.digest(), fates


@pytest.mark.parametrize("way", ["requantized", "moved", "rematerialized"])
def test_layers_that_megatron_captured_replay_as_if_nothing_had_slept(way: str) -> None:
    expected, _ = _apart(_train_with_graphs, "awake")
    found, fates = _train_with_graphs(way)
    assert {name for name in expected if found[name] != expected[name]} == set()
    for at_one_sleep in fates:
        assert Fate.DROPPED not in at_one_sleep
        assert (Fate.REBUILT in at_one_sleep) == (way != "moved")


def _apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns in a process of its own: graphs are captured once in a process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()


def _with_adapters(model: nn.Module) -> None:
    """Low-rank adapters beside the output projections, everything else frozen."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in model.decoder.layers:
        layer.self_attention.linear_proj = Adapted(layer.self_attention.linear_proj)


class Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.to_wrap = base
        rows, cols = base.weight.shape
        options = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.adapter = nn.Sequential(nn.Linear(cols, 8, **options), nn.Linear(8, rows, **options))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, bias = self.to_wrap(x)
        return out + self.adapter(x), bias


def test_adapters_are_their_own_component_and_the_frozen_base_is_copied_once() -> None:
    ledgers = _compare(True, {}, recipe="blockwise", prepare=_with_adapters)
    assert {role for ledger in ledgers for role in _roles(ledger, "adapters")} == {Role.ADAPTER}
    assert _fates(ledgers[0], "params") == {Fate.MOVED}
    assert all(_fates(ledger, "params") == {Fate.CLEAN} for ledger in ledgers[1:])


def _roles(ledger: Ledger, component: str) -> set[Role]:
    return {row.role for row in _rows(ledger, component)}
