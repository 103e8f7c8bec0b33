"""The rule for Megatron-Core, on small stand-ins that live as its buffers and optimizers do. The library: tests/gpu."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from contracts.rule_contract import RuleContract
from stand_ins import megatron as mc
from torpor import Sleeper
from torpor.errors import AsleepError, UsageError
from torpor.inventory import Entry, take_inventory
from torpor.kinds import Fate, Role
from torpor.ledger import Ledger
from torpor.rules.base import Actor, Rule
from torpor.rules.megatron import MegatronRule
from torpor.rules.megatron_optim import unwrapped
from torpor.rules.standard import standard_rules

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
WIDTH = 96


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    with mc.imported(monkeypatch) as made:
        yield made


def _net(*, fp32_head: bool = False) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()).bfloat16()
    net.append(nn.Linear(WIDTH, 7) if fp32_head else nn.Linear(WIDTH, 7).bfloat16())
    return net


class Net(nn.Module):
    """A model with a persistent buffer, as the bias of an expert router is one."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.layers = _net(**options)
        self.register_buffer("expert_bias", torch.randn(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype) if isinstance(layer, nn.Linear) else x)
        return x


def _optimizer(kind: str, ddp: mc.DistributedDataParallel) -> mc.MegatronOptimizer:
    if kind == "distributed":
        return mc.DistributedOptimizer(ADAMW, ddp)
    params = [p for p in ddp.parameters() if p.requires_grad]
    if kind == "chained":
        matrices, rest = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
        muon = torch.optim.Muon(matrices, lr=1e-2)
        return mc.ChainedOptimizer([mc.Float16OptimizerWithFloat16Params(o) for o in (muon, ADAMW(rest))])
    return mc.Float16OptimizerWithFloat16Params(ADAMW(params))


class Training:
    """A loop of two microbatches a step."""

    def __init__(self, kind: str = "distributed", *, fp32_head: bool = False, **ddp_options: object) -> None:
        net = Net(fp32_head=fp32_head)
        self.ddp = mc.DistributedDataParallel(net, distributed_optimizer=kind == "distributed", **ddp_options)
        self.optimizer = _optimizer(kind, self.ddp)
        self.losses: list[float] = []

    def microbatch(self, seed: int) -> None:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        loss = self.ddp(x).float().square().mean()
        loss.backward()
        self.losses.append(loss.item())

    def step(self, seed: int, between: Callable[[], object] = lambda: None) -> None:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.microbatch(2 * seed)
        between()
        self.microbatch(2 * seed + 1)
        self.ddp.finish_grad_sync()
        self.optimizer.step()

    def bits(self) -> list[object]:
        found: list[object] = [self.losses]
        found += [_bits(p) for p in (*self.ddp.parameters(), *self.ddp.named_buffers())]
        inner, _ = unwrapped({"o": self.optimizer})
        for optimizer in inner.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    found.append(_bits(parameter))
                    found += [_bits(value) for value in optimizer.state[parameter].values()]
        return found

    def sleeper(self, **options: object) -> Sleeper:
        return Sleeper(self.ddp, optimizer=self.optimizer, store="pageable", report_leftovers=False, **options)


def _bits(value: object) -> bytes:
    tensor = value[1] if isinstance(value, tuple) else value
    return tensor.detach().clone().view(-1).view(torch.uint8).numpy().tobytes()  # numpy would pin the memory itself


def _fates(ledger: Ledger, component: str) -> dict[Fate, str]:
    small = "too small to give a page back"
    return {row.fate: row.reason for row in ledger.rows if row.component == component and row.reason != small}


class TestContract(RuleContract):
    def make_rule(self) -> Rule:
        return MegatronRule(rematerialize_params=True)

    def make_actor(self) -> Actor:
        training = Training()
        optimizers, wrappers = unwrapped({"optimizer": training.optimizer})
        return Actor({"model": training.ddp}, optimizers, wrappers=wrappers)


@pytest.mark.parametrize("kind", ["distributed", "whole", "chained"])
@pytest.mark.parametrize("rematerialize", [False, True])
def test_training_goes_on_bit_for_bit_wherever_it_slept(kind: str, rematerialize: bool) -> None:
    awake, slept = Training(kind), Training(kind)
    with slept.sleeper(rematerialize_param_from_master_weight=rematerialize) as sleeper:
        for step in range(3):
            awake.step(step)
            with sleeper.asleep():
                pass
            slept.step(step, between=lambda: (sleeper.sleep(), sleeper.wake()))
            sleeper.sleep()
            sleeper.wake(lazy=True)
    assert slept.bits() == awake.bits()


def test_each_step_copies_only_what_is_irreducible() -> None:
    training = Training()
    with training.sleeper(rematerialize_param_from_master_weight=True) as sleeper:
        training.step(0)
        ledger = sleeper.sleep()
        numel = sum(p.numel() for p in training.ddp.parameters())
        copied = {row.component: row.copied_bytes for row in ledger.rows if row.copied_bytes}
        assert set(copied) == {"optimizer"}
        assert copied["optimizer"] <= 12 * numel
        assert _fates(ledger, "params")[Fate.REBUILT] == "the rounded value of the fp32 masters"
        assert Fate.ZEROED in _fates(ledger, "grads")


def test_gradients_are_dead_from_the_step_to_the_next_accumulation_and_never_in_one() -> None:
    training = Training()
    with training.sleeper() as sleeper:

        def grads() -> dict[Fate, str]:
            with sleeper.awake():
                return _fates(sleeper.sleep("grads"), "grads")

        assert grads() == {Fate.ZEROED: "all zeros: nothing was accumulated yet"}
        sleeper.wake()
        training.microbatch(1)
        assert grads() == {Fate.MOVED: "in the middle of an accumulation"}
        sleeper.wake()
        training.optimizer.step()
        dead = {Fate.ZEROED: "dead: every optimizer has stepped and nothing was accumulated since"}
        assert grads() == dead
        sleeper.wake()
        training.ddp.zero_grad_buffer()
        assert grads() == dead
        sleeper.wake()
        with torch.no_grad():
            training.ddp(torch.randn(2, WIDTH))
        assert grads() == dead
        sleeper.wake()
        training.microbatch(2)
        training.optimizer.step()
        training.ddp(torch.randn(2, WIDTH))  # its backward may be under way
        assert Fate.MOVED in grads()


def test_gradients_wait_for_every_optimizer_of_a_chain() -> None:
    training = Training("chained")
    first, second = training.optimizer.chained_optimizers
    with training.sleeper() as sleeper:
        training.microbatch(0)
        first.step()
        assert Fate.MOVED in _fates(sleeper.sleep("grads"), "grads")
        sleeper.wake()
        second.step()
        assert Fate.ZEROED in _fates(sleeper.sleep("grads"), "grads")


def test_gradients_that_were_there_before_anybody_watched_are_moved() -> None:
    training = Training()
    training.microbatch(0)
    with training.sleeper() as sleeper:
        assert _fates(sleeper.sleep(), "grads")[Fate.MOVED] == "no step was seen"


def test_gradients_are_moved_where_the_user_or_an_unseen_replay_needs_them(graphs) -> None:
    training = Training()
    with training.sleeper(dead_grads_after_step=False) as sleeper:
        training.step(0)
        assert _fates(sleeper.sleep(), "grads") == {Fate.MOVED: "dead_grads_after_step is off"}
    with training.sleeper() as sleeper:
        training.step(1)
        graphs.cuda_graph["training"] = object()
        assert "CUDA graph" in _fates(sleeper.sleep(), "grads")[Fate.MOVED]


def test_fp32_gradients_beside_the_buffer_die_with_it() -> None:
    training = Training(grad_dtype=torch.bfloat16, fp32_local_accumulation=True)
    with training.sleeper() as sleeper:
        training.microbatch(0)
        training.optimizer.step()
        extra = [grad for grad in training.ddp.buffers[0].extra_main_grads if grad.nbytes > 3 * 4096]
        assert all(grad.any() for grad in extra)
        assert set(_fates(sleeper.sleep(), "grads")) == {Fate.ZEROED}
        sleeper.wake()
        assert not any(grad.any() for grad in extra)


def test_an_unknown_version_is_named_and_its_buffers_are_moved() -> None:
    training = Training()
    training.step(0)
    del training.ddp.buffers[0].param_index_map
    with pytest.warns(UserWarning, match="buffers of Megatron-Core unknown have no param_index_map"):
        entries = _entries(training)
    assert {entry.fate for entry in entries.values() if entry.component in ("params", "grads")} == {Fate.MOVED}


def test_memory_registered_with_nccl_stays() -> None:
    training = Training(nccl_ub=True)
    with training.sleeper() as sleeper:
        ledger = sleeper.sleep()
        assert _fates(ledger, "grads") == {Fate.KEPT: "registered with NCCL by its address"}
        assert Fate.KEPT in _fates(ledger, "params")


def _entries(training: Training, rematerialize: bool = True) -> dict[str, Entry]:
    optimizers, wrappers = unwrapped({"optimizer": training.optimizer})
    actor = Actor({"model": training.ddp}, optimizers, wrappers=wrappers)
    rules = standard_rules(rematerialize_param_from_master_weight=rematerialize)
    return {entry.name: entry for entry in take_inventory(actor, rules).entries}


def test_everything_has_its_component_and_masters_the_names_of_their_parameters() -> None:
    training = Training()
    training.step(0)
    entries = _entries(training, rematerialize=False)
    assert entries["model.buffers[0].param_data"].component == "params"
    assert entries["model.buffers[0].grad_data"].component == "grads"
    assert entries["model.module.expert_bias"].component == "buffers"
    master = entries["master of model.module.layers.0.weight"]
    assert (master.role, master.component) == (Role.MASTER, "optimizer")
    moments = [entry for entry in entries.values() if entry.role is Role.MOMENT]
    assert len(moments) == 3 * len(list(training.ddp.parameters()))
    assert {entry.component for entry in moments} == {"optimizer"}


def test_fp32_parameters_are_their_own_masters() -> None:
    entries = _entries(Training(fp32_head=True))
    flats = [entry for name, entry in entries.items() if name.endswith("param_data")]
    assert sorted(entry.fate for entry in flats) == [Fate.MOVED, Fate.REBUILT]
    (own,) = [entry for entry in flats if entry.fate is Fate.MOVED]
    assert "fp32" in own.reason


@pytest.mark.parametrize("kind", ["distributed", "whole"])
def test_a_parameter_without_a_master_is_found_and_named(kind: str) -> None:
    training = Training(kind)
    masters = getattr(training.optimizer, "shard_fp32_from_float16_groups", None)
    models = getattr(training.optimizer, "shard_float16_groups", None)
    if masters is None:
        masters, models = training.optimizer.fp32_from_float16_groups, training.optimizer.float16_groups
    del masters[0][-1], models[0][-1]
    if kind == "distributed":
        del training.optimizer.model_float16_groups[0][-1]
    moved = [e for e in _entries(training).values() if e.component == "params" and e.fate is Fate.MOVED]
    assert len(moved) == 1
    assert "no optimizer of the actor has a master of" in moved[0].reason


def test_what_needs_a_gather_is_moved_where_the_process_groups_sleep_too(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    monkeypatch.setattr(mc.OneRank, "size", lambda self: 2)
    optimizers, wrappers = unwrapped({"optimizer": training.optimizer})
    actor = Actor({"model": training.ddp}, optimizers, wrappers=wrappers)
    rules = standard_rules(rematerialize_param_from_master_weight=True, groups_sleep=True)
    (flat,) = [e for e in take_inventory(actor, rules).entries if e.name.endswith("param_data")]
    assert (flat.fate, flat.reason) == (Fate.MOVED, "not rebuilt: the process groups that gather it wake after it")


def test_masters_that_the_optimizer_keeps_itself_rebuild_nothing() -> None:
    training = Training()
    training.optimizer.shard_fp32_from_float16_groups = [[None] * len(training.optimizer.shard_float16_groups[0])]
    flat = _entries(training)["model.buffers[0].param_data"]
    assert flat.fate is Fate.MOVED
    assert "keeps the masters itself" in flat.reason


def test_masters_that_the_parameters_do_not_follow_are_seen_before_anything_is_freed() -> None:
    training = Training()
    with training.sleeper(rematerialize_param_from_master_weight=True) as sleeper:
        training.step(0)
        with torch.no_grad():
            training.ddp.buffers[0].param_data[3] += 1
        before = training.ddp.buffers[0].param_data.clone()
        assert _fates(sleeper.sleep(), "params") == {Fate.MOVED: "its rebuild does not give the bits it has"}
        sleeper.wake()
        assert torch.equal(training.ddp.buffers[0].param_data, before)


def test_params_wake_before_their_masters_and_are_read_while_all_sleep() -> None:
    training = Training()
    with training.sleeper(rematerialize_param_from_master_weight=True) as sleeper:
        training.step(0)
        before = {name: value.clone() for name, value in training.ddp.state_dict().items()}
        sleeper.sleep()
        assert all(torch.equal(value, before[name]) for name, value in sleeper.state_dict().items())
        sleeper.wake("params")
        sleeper.wake("buffers")
        assert all(torch.equal(value, before[name]) for name, value in training.ddp.state_dict().items())


@pytest.mark.parametrize("memory", ["madvise", "resize"])
def test_params_may_fall_asleep_after_their_masters(memory: str) -> None:
    training = Training()
    with training.sleeper(rematerialize_param_from_master_weight=True, memory=memory) as sleeper:
        training.step(0)
        before = training.bits()
        sleeper.sleep("optimizer")
        assert _fates(sleeper.sleep(), "params") == {Fate.REBUILT: "the rounded value of the fp32 masters"}
        sleeper.wake("params")
        sleeper.wake()
        assert training.bits() == before


def test_the_proof_of_a_large_buffer_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torpor.rebuilding._PROOF_BYTES", 1000)
    training = Training()
    with training.sleeper(rematerialize_param_from_master_weight=True) as sleeper:
        training.step(0)
        assert set(_fates(sleeper.sleep(), "params")) == {Fate.REBUILT}
        sleeper.wake()
        training.ddp.buffers[0].param_data[-1] = 3
        assert set(_fates(sleeper.sleep(), "params")) == {Fate.MOVED}


def test_reading_one_parameter_reads_its_own_masters_only() -> None:
    training = Training()
    training.step(0)
    flat = training.ddp.buffers[0].param_data
    entry = _entries(training)["model.buffers[0].param_data"]
    assert entry.rebuild is not None
    assert entry.rebuild.narrow is not None
    begin, end = 40, 2 * WIDTH * WIDTH
    part = entry.rebuild.narrow(begin, end)
    out = torch.full((end - begin,), 7, dtype=torch.bfloat16)
    part.fn(out, *part.sources)
    assert torch.equal(out, flat[begin:end])
    assert len(part.sources) < len(entry.rebuild.sources)


def test_gradients_that_the_optimizer_reaches_by_another_way_are_gradients() -> None:
    training = Training()
    training.step(0)
    shard = training.optimizer.shard_float16_groups[0][0]
    shard.decoupled_grad = training.ddp.buffers[0].grad_data[: shard.numel()]
    training.optimizer.optimizer.copies = {"a": shard}
    with training.sleeper() as sleeper:
        training.step(1)
        assert set(_fates(sleeper.sleep(), "grads")) == {Fate.ZEROED}


def test_a_sleeping_optimizer_refuses_before_it_reads_gradients() -> None:
    training = Training()
    with training.sleeper() as sleeper:
        training.step(0)
        for component in ("grads", "params", "optimizer"):
            sleeper.sleep(component)
            with pytest.raises(AsleepError, match=f"step of optimizer: its component '{component}'"):
                training.optimizer.step()
            sleeper.wake()
        sleeper.sleep("grads")
        with pytest.raises(AsleepError, match="zero_grad_buffer"):
            training.ddp.zero_grad_buffer()
        sleeper.sleep("params")
        with pytest.raises(AsleepError, match="start_param_sync"):
            training.ddp.start_param_sync()
    assert not {"step", "state_dict"} & vars(training.optimizer).keys()
    assert not {"zero_grad_buffer", "start_param_sync"} & vars(training.ddp).keys()
    training.step(1)


def test_its_state_dict_is_read_while_it_sleeps() -> None:
    training = Training("chained")
    with training.sleeper() as sleeper:
        training.step(0)
        before = training.optimizer.state_dict()[1]["state"][0]["exp_avg"].clone()
        sleeper.sleep()
        assert torch.equal(sleeper.optimizer_state_dict("optimizer")[1]["state"][0]["exp_avg"], before)


def test_what_is_no_optimizer_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="optimizer is a list_iterator"):
        Sleeper(_net(), optimizer=iter([]))


def test_the_stub_of_a_rank_without_parameters_has_no_optimizer_inside() -> None:
    stub = mc.MegatronOptimizer(None)
    whole = mc.Float16OptimizerWithFloat16Params(ADAMW(_net().parameters()))
    assert list(unwrapped({"o": mc.ChainedOptimizer([stub, whole])})[0]) == ["o"]
    assert list(unwrapped({"o": mc.ChainedOptimizer([whole, whole])})[0]) == ["o[0]", "o[1]"]


class Adapted(nn.Module):
    """A frozen layer and a low-rank adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False).bfloat16()
        self.linear.weight.requires_grad_(False)
        self.adapter = nn.Module()
        self.adapter.linear_in = nn.Linear(WIDTH, 32, bias=False).bfloat16()
        self.adapter.linear_out = nn.Linear(32, WIDTH, bias=False).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.bfloat16()
        return self.linear(x) + self.adapter.linear_out(self.adapter.linear_in(x))


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_adapters_are_a_component_and_their_frozen_base_is_clean_from_the_second_sleep_on(
    distributed_optimizer: bool,
) -> None:
    ddp = mc.DistributedDataParallel(Adapted(), distributed_optimizer=distributed_optimizer)
    optimizer = _optimizer("distributed" if distributed_optimizer else "whole", ddp)
    with Sleeper({"lora": ddp}, optimizer=optimizer, store="pageable", keep=["adapters"]) as sleeper:
        seen = []
        for _ in range(2):
            ddp(torch.randn(2, WIDTH)).sum().backward()
            optimizer.step()
            ledger = sleeper.sleep()
            seen.append(set(_fates(ledger, "params")))
            assert set(_fates(ledger, "adapters")) == {Fate.KEPT}
            sleeper.wake()
        assert seen == [{Fate.MOVED}, {Fate.CLEAN}]


@pytest.mark.parametrize("captured", [False, True])
def test_scratch_of_the_process_is_dropped_unless_a_graph_has_its_address(captured: bool, monkeypatch) -> None:
    held = {("mpu", torch.float32): torch.ones(1 << 16)}
    monkeypatch.setitem(
        sys.modules,
        "megatron.core.parallel_state",
        SimpleNamespace(_GLOBAL_MEMORY_BUFFER=SimpleNamespace(buffer=held)),
    )
    gathered = held["mpu", torch.float32][:10]  # saved by a forward, say: it lives on in whoever has it
    training = Training()
    rules = standard_rules(graphs_may_live=lambda: captured)
    entries = take_inventory(Actor({"model": training.ddp}), rules).by_component()["caches"]
    fate = Fate.KEPT if captured else Fate.DROPPED
    assert [(e.fate, e.role, e.nbytes) for e in entries] == [(fate, Role.WORKSPACE, 4 << 16)]
    with training.sleeper() as sleeper:
        sleeper.sleep()
        assert held == {}
        assert gathered.eq(1).all()
        sleeper.wake()
