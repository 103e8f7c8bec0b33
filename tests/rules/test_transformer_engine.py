"""The rule for TransformerEngine, on small stand-ins that live as its modules do. The library itself: tests/gpu."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from contracts.rule_contract import RuleContract
from stand_ins import megatron, te
from torpor import Sleeper
from torpor.inventory import Entry, take_inventory
from torpor.kinds import Fate, Role
from torpor.ledger import Ledger, Row
from torpor.rules import transformer_engine
from torpor.rules.base import Actor, Rule
from torpor.rules.standard import standard_rules
from torpor.rules.transformer_engine import TransformerEngineRule, can_quantize_again, inner_tensors


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    with te.imported(monkeypatch) as made:
        yield made


def _batch(step: int, number: int) -> torch.Tensor:
    return torch.randn(4, te.WIDTH, generator=torch.Generator().manual_seed(100 * step + number))


class Training:
    """A loop of two microbatches a step that may be interrupted anywhere."""

    def __init__(self, *, delayed: bool = False) -> None:
        torch.manual_seed(0)
        self.net = te.Net(delayed=delayed)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.losses: list[float] = []

    def run(self, between_microbatches: Callable[[], None], between_steps: Callable[[], None]) -> Training:
        for step in range(3):
            self.optimizer.zero_grad()
            for number in range(2):
                loss = self.net(_batch(step, number), is_first_microbatch=number == 0).square().mean()
                loss.backward()
                self.losses.append(loss.item())
                between_microbatches()
            self.optimizer.step()
            between_steps()
        return self

    def bits(self) -> dict[str, object]:
        found: dict[str, object] = {"losses": self.losses}
        found |= {name: p.detach().numpy().tobytes() for name, p in self.net.named_parameters()}
        for name, module in self.net.named_modules():
            for key, meta in getattr(module, "fp8_meta", {}).items():
                if key == "scaling_fwd":
                    found[name] = meta.scale.numpy().tobytes() + meta.amax_history.numpy().tobytes()
        for index, values in enumerate(self.optimizer.state.values()):
            found |= {f"{index}.{key}": value.numpy().tobytes() for key, value in values.items()}
        return found


def _nothing() -> None:
    pass


def _nap(training: Training, ledgers: list, **options: object) -> tuple[Sleeper, Callable[[], None]]:
    sleeper = Sleeper(training.net, optimizer=training.optimizer, store="pageable", report_leftovers=False, **options)

    def nap() -> None:
        ledgers.append(sleeper.sleep())
        sleeper.wake()

    return sleeper, nap


class TestContract(RuleContract):
    def make_rule(self) -> Rule:
        return TransformerEngineRule()

    def make_actor(self) -> Actor:
        net = te.Net(delayed=True)
        net(_batch(0, 0), is_first_microbatch=True)
        return Actor({"model": net})


def _caches(ledger: Ledger) -> list[Row]:
    """What happened to the caches; a scale is a number, and stays for that."""
    return [r for r in ledger.rows if r.role is Role.QUANTIZED_CACHE and r.reason != "too small to give a page back"]


def _cached() -> te.Net:
    net = te.Net()
    net(_batch(0, 0), is_first_microbatch=True)
    return net


def _entries(net: nn.Module, **options: object) -> list[Entry]:
    return take_inventory(Actor({"model": net}), standard_rules(**options)).by_component()["caches"]


@pytest.mark.parametrize(("delayed", "memory"), [(False, "madvise"), (False, "resize"), (True, "madvise")])
def test_training_goes_on_bit_for_bit_wherever_it_slept(delayed: bool, memory: str) -> None:
    awake = Training(delayed=delayed).run(_nothing, _nothing)
    slept = Training(delayed=delayed)
    sleeper, nap = _nap(slept, [], memory=memory)
    with sleeper:
        slept.run(nap, nap)
    assert slept.bits() == awake.bits()


@pytest.mark.parametrize(
    ("delayed", "in_the_middle", "fates"),
    [
        (False, False, {Fate.DROPPED}),
        (False, True, {Fate.DROPPED}),
        (True, False, {Fate.DROPPED}),
        (True, True, {Fate.MOVED, Fate.CLEAN}),
    ],
)
def test_caches_go_unless_a_step_in_progress_scales_with_delay(delayed: bool, in_the_middle: bool, fates: set) -> None:
    ledgers: list = []
    training = Training(delayed=delayed)
    sleeper, nap = _nap(training, ledgers)
    with sleeper:
        training.run(*((nap, _nothing) if in_the_middle else (_nothing, nap)))
    found = [{row.fate for row in _caches(ledger)} for ledger in ledgers]
    assert all(found)
    assert set().union(*found) <= fates


def test_the_owner_is_cleared_and_the_memory_is_free_before_the_account_is_closed() -> None:
    net = _cached()
    held = sum(part.untyped_storage().nbytes() for m in (net.first, net.second) for part in _parts(m))
    with Sleeper(net, store="pageable") as sleeper:
        ledger = sleeper.sleep()
        assert net.first._fp8_workspaces == {} == net.second._fp8_workspaces
        (row,) = [row for row in ledger.rows if row.component == "caches"]
        assert (row.fate, row.nbytes, row.copied_bytes) == (Fate.DROPPED, held, 0)


def _parts(module: te.Linear) -> list[torch.Tensor]:
    return [part for workspace in module._fp8_workspaces.values() for _, part in inner_tensors(workspace)]


def test_a_cache_that_somebody_else_holds_is_left() -> None:
    net = _cached()
    stolen = net.first._fp8_workspaces["weight"]._data
    with Sleeper(net, store="pageable") as sleeper:
        rows = [row for row in sleeper.sleep().rows if row.component == "caches"]
    assert {row.fate: row.nbytes for row in rows}[Fate.LEFT] == stolen.nbytes


def test_with_the_option_off_they_are_moved_and_the_ledger_says_so() -> None:
    net = _cached()
    before = net.first._fp8_workspaces["weight"]
    with Sleeper(net, store="pageable", clear_quantized_weight_workspaces=False) as sleeper:
        assert {row.reason for row in _caches(sleeper.sleep())} == {"clear_quantized_weight_workspaces is off"}
        sleeper.wake()
    assert net.first._fp8_workspaces["weight"] is before


def test_nothing_is_claimed_where_nothing_is_cached_or_nobody_imported_the_library(monkeypatch) -> None:
    assert "caches" not in take_inventory(Actor({"model": te.Net()}), standard_rules()).by_component()
    net = _cached()
    monkeypatch.delitem(sys.modules, "transformer_engine.pytorch.module.base")
    assert "caches" not in take_inventory(Actor({"model": net}), standard_rules()).by_component()


def test_under_a_captured_graph_they_are_quantized_again_in_their_place(state) -> None:
    net = _cached()
    state.skip_fp8_weight_update_tensor = torch.zeros(1)
    workspace = net.first._fp8_workspaces["weight"]
    before = [(part.data_ptr(), part.numpy().tobytes()) for part in _parts(net.first)]
    with Sleeper(net, store="pageable", memory="madvise") as sleeper:
        rows = _caches(sleeper.sleep())
        assert {row.fate for row in rows} == {Fate.REBUILT}
        assert {row.nbytes for row in rows} == {4 * te.WIDTH**2}
        sleeper.wake()
    assert net.first._fp8_workspaces["weight"] is workspace
    assert [(part.data_ptr(), part.numpy().tobytes()) for part in _parts(net.first)] == before


def _stale_under_a_graph(state: SimpleNamespace) -> te.Net:
    net = _cached()
    state.skip_fp8_weight_update_tensor = torch.zeros(1)
    with torch.no_grad():
        net.first.weight.mul_(torch.linspace(1, 2, te.WIDTH))
    return net


def test_between_steps_a_stale_copy_under_a_graph_is_dead_and_comes_back_fresh(state) -> None:
    net = _stale_under_a_graph(state)
    addresses = [part.data_ptr() for part in _parts(net.first)]
    with Sleeper(net, store="pageable", memory="madvise") as sleeper:
        assert {row.fate for row in _caches(sleeper.sleep())} == {Fate.REBUILT}
        sleeper.wake()
    fresh = dict(inner_tensors(te.Quantizer().quantize(net.first.weight)))
    held = dict(inner_tensors(net.first._fp8_workspaces["weight"]))
    assert all(torch.equal(held[name], part) for name, part in fresh.items())
    assert [part.data_ptr() for part in _parts(net.first)] == addresses


def test_in_a_step_a_copy_that_is_not_the_weights_own_is_moved(state) -> None:
    net = _stale_under_a_graph(state)
    before = [part.clone() for part in _parts(net.first)]
    with Sleeper(net, store="pageable", memory="madvise") as sleeper:
        net.head(torch.zeros(te.WIDTH)).sum().backward()
        rows = _caches(sleeper.sleep())
        assert any(row.reason == "its rebuild does not give the bits it has" for row in rows)
        sleeper.wake()
    assert all(torch.equal(a, b) for a, b in zip(before, _parts(net.first), strict=True))


@pytest.mark.parametrize("why", ["option", "delayed", "source"])
def test_under_a_captured_graph_they_are_moved_where_they_cannot_be_rebuilt(state, why: str) -> None:
    net = te.Net(delayed=why == "delayed")
    net(_batch(0, 0), is_first_microbatch=True)
    state.skip_fp8_weight_update_tensor = torch.zeros(1)
    if why == "source":
        for module in (net.first, net.second):
            module._fp8_workspaces["halves"] = module._fp8_workspaces.pop("weight")
    entries = _entries(net, requantize_under_cuda_graphs=why != "option")
    assert {entry.fate for entry in entries} == {Fate.MOVED}
    assert all("CUDA graph" in entry.reason for entry in entries)


def test_megatrons_and_torchs_graphs_are_noticed_too(monkeypatch) -> None:
    assert {e.fate for e in _entries(_cached(), graphs_may_live=lambda: True)} == {Fate.REBUILT, Fate.MOVED}
    graphs = SimpleNamespace(_CudagraphGlobalRecord=SimpleNamespace(cudagraph_created=True))
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.cuda_graphs", graphs)
    assert {e.fate for e in _entries(_cached())} == {Fate.REBUILT, Fate.MOVED}


def test_scaling_state_of_modules_that_never_ran_is_moved_with_the_buffers() -> None:
    net = te.Net(delayed=True)
    entries = take_inventory(Actor({"model": net}), standard_rules()).by_component()["buffers"]
    names = {entry.name for entry in entries}
    assert {
        f"model.{m}.fp8_meta.scaling_fwd.{a}" for m in ("first", "second") for a in ("scale", "amax_history")
    } <= names
    assert {entry.fate for entry in entries} == {Fate.MOVED}


def test_what_the_steps_of_another_model_write_to_stays(state: SimpleNamespace) -> None:
    nets = {name: te.Net(delayed=True) for name in ("actor", "critic")}
    for net in nets.values():
        for layer in (net.first, net.second):
            layer.fp8_meta["scaling_fwd"].amax_history = torch.ones(1 << 16)
    histories = [net.first.fp8_meta["scaling_fwd"].amax_history for net in nets.values()]
    state.global_amax_history_buffer["forward"] = histories
    state.global_amax_buffer["forward"] = [history[0] for history in histories]
    with Sleeper(nets["actor"], store="pageable") as sleeper:
        ledger = sleeper.sleep()
        (kept,) = [row for row in ledger.rows if row.reason.startswith("TransformerEngine updates it")]
        for history in histories:  # a step of the critic
            history += 1
        sleeper.wake()
    assert (kept.fate, kept.storages, kept.nbytes) == (Fate.KEPT, 2, 2 * histories[0].nbytes)
    assert all(torch.equal(history, torch.full_like(history, 2)) for history in histories)


@pytest.mark.parametrize("valid", [True, False])
def test_primary_quantized_weights_are_state_and_an_invalid_transpose_is_dead(valid: bool) -> None:
    net = te.Net()
    net.first.weight = nn.Parameter(te.Quantizer().quantize(torch.randn(256, 256)), requires_grad=False)
    quantized = net.first.weight
    quantized._transpose_invalid = not valid
    before = {name: part.clone() for name, part in inner_tensors(quantized)}
    entries = take_inventory(Actor({"model": net}), standard_rules()).by_component()["params"]
    fates = {entry.name.removeprefix("model.first.weight."): entry.fate for entry in entries if ".first." in entry.name}
    transpose = Fate.MOVED if valid else Fate.ZEROED
    assert fates == {"_data": Fate.MOVED, "_scale_inv": Fate.MOVED, "_transpose": transpose}
    with Sleeper(net, store="pageable") as sleeper:
        sleeper.sleep()
        sleeper.wake()
    before["_transpose"] *= valid
    assert all(torch.equal(part, before[name]) for name, part in inner_tensors(quantized))


@pytest.mark.parametrize("graphs", [False, True])
def test_what_stands_in_for_fused_gradients_is_never_copied(graphs: bool, monkeypatch) -> None:
    held = {(te.WIDTH, te.WIDTH, torch.float32): torch.ones(te.WIDTH, te.WIDTH)}
    monkeypatch.setattr(sys.modules["transformer_engine.pytorch.module.base"], "_dummy_wgrads", held, raising=False)
    (entry,) = _entries(te.Net(), graphs_may_live=lambda: graphs)
    assert (entry.role, entry.nbytes) == (Role.WORKSPACE, 4 * te.WIDTH**2)
    assert entry.fate is (Fate.ZEROED if graphs else Fate.DROPPED)


def test_another_model_makes_new_stand_ins_while_this_one_sleeps(monkeypatch) -> None:
    held = {(te.WIDTH, te.WIDTH, torch.float32): torch.ones(te.WIDTH, te.WIDTH)}
    monkeypatch.setattr(sys.modules["transformer_engine.pytorch.module.base"], "_dummy_wgrads", held, raising=False)
    with Sleeper(te.Net(), store="pageable") as sleeper:
        sleeper.sleep()
        assert held == {}
        sleeper.wake()


@pytest.mark.parametrize("graphs", [False, True])
def test_scratch_is_dropped_through_the_function_that_makes_it(graphs: bool, monkeypatch) -> None:
    @functools.cache
    def get_cublas_workspace(device: int, ub: bool, grouped: bool) -> torch.Tensor | list[torch.Tensor]:
        return [torch.ones(1 << 16), torch.ones(1 << 16)] if grouped else torch.ones(1 << 16)

    module = ModuleType("transformer_engine.pytorch.cpp_extensions.gemm")
    module.get_cublas_workspace = get_cublas_workspace
    monkeypatch.setitem(sys.modules, module.__name__, module)
    plain, several = get_cublas_workspace(0, False, False), get_cublas_workspace(0, False, True)
    entries = _entries(te.Net(), graphs_may_live=lambda: graphs)
    assert {e.address for e in entries} == {t.data_ptr() for t in (plain, *several)}
    assert {(e.fate, e.role) for e in entries} == {(Fate.KEPT if graphs else Fate.DROPPED, Role.WORKSPACE)}
    with Sleeper(te.Net(), store="pageable") as sleeper:
        sleeper.sleep()
        assert get_cublas_workspace.cache_info().currsize == 0
        sleeper.wake()


def test_an_unknown_version_is_named_and_its_caches_are_moved() -> None:
    net = _cached()
    for module in (net.first, net.second):
        module.cache_of_tomorrow = module._fp8_workspaces
        del module._fp8_workspaces
    with pytest.warns(UserWarning, match=r"TransformerEngine 0\.0-stand-in has no dictionary _fp8_workspaces"):
        entries = take_inventory(Actor({"model": net}), standard_rules()).entries
    tomorrow = [entry for entry in entries if "cache_of_tomorrow" in entry.name]
    assert tomorrow
    assert {entry.fate for entry in tomorrow} == {Fate.MOVED}


@pytest.mark.parametrize(
    ("kind", "stochastic", "safe"),
    [
        ("Float8CurrentScalingQuantizer", False, True),
        ("Float8BlockQuantizer", False, True),
        ("MXFP8Quantizer", False, True),
        ("NVFP4Quantizer", False, True),
        ("NVFP4Quantizer", True, False),
        ("Float8Quantizer", False, False),
        ("QuantizerOfTomorrow", False, False),
    ],
)
def test_older_versions_are_judged_by_the_class_of_the_quantizer(kind: str, stochastic: bool, safe: bool) -> None:
    quantizer = type(kind, (), {"stochastic_rounding": stochastic})()
    assert can_quantize_again(SimpleNamespace(_quantizer=quantizer)) is safe


def test_only_the_directions_that_are_there_are_quantized_again() -> None:
    only_rows = te.Net()
    with torch.no_grad():
        only_rows(_batch(0, 0), is_first_microbatch=True)
    workspace = only_rows.first._fp8_workspaces["weight"]
    again = transformer_engine._Quantization(workspace)
    assert set(dict(inner_tensors(again._quantize(only_rows.first.weight)))) == {"_data", "_scale_inv"}


def test_under_a_graph_weights_are_rebuilt_from_masters_and_quantized_from_there(monkeypatch, state) -> None:
    with megatron.imported(monkeypatch):
        ddp = megatron.DistributedDataParallel(te.Net().bfloat16())
        optimizer = megatron.DistributedOptimizer(partial(torch.optim.AdamW, lr=1e-2), ddp)
        options = {"memory": "madvise", "rematerialize_param_from_master_weight": True, "report_leftovers": False}
        with Sleeper(ddp, optimizer=optimizer, store="pageable", **options) as sleeper:
            ddp(_batch(0, 0).bfloat16(), is_first_microbatch=True).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                ddp(_batch(0, 1).bfloat16(), is_first_microbatch=True)
            state.skip_fp8_weight_update_tensor = torch.zeros(1)
            net = ddp.module
            before = [part.clone() for m in (net.first, net.second) for part in _parts(m)]
            for ways in ([None], ["caches", None], ["params", "caches", None]):
                ledger = sleeper.sleep()
                assert {row.fate for row in _caches(ledger)} == {Fate.REBUILT}
                assert any(row.fate is Fate.REBUILT for row in ledger.rows if row.component == "params")
                for way in ways:
                    sleeper.wake(way)
                parts = [part for m in (net.first, net.second) for part in _parts(m)]
                assert all(torch.equal(a, b) for a, b in zip(before, parts, strict=True))
