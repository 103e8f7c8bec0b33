"""Optimizers, frozen parts, adapters, and what each means for a sleep."""

from __future__ import annotations

from typing import Any

import pytest

from torpor.errors import UsageError
from torpor.forecast.actor import Forecast, forecast
from torpor.forecast.config import read_config
from torpor.forecast.families import build_model
from torpor.forecast.fates import Options
from torpor.forecast.layout import Layout
from torpor.forecast.optimizers import Kind, Optimizer
from torpor.forecast.recipes import Format, Recipe
from torpor.forecast.shapes import Layer, Model, Weight
from torpor.forecast.training import add_lora, freeze
from torpor.kinds import Fate, Role


@pytest.fixture(scope="module")
def model() -> Model:
    return build_model(read_config("qwen3-0.6b"))


def fates(account: Forecast, role: Role) -> set[Fate]:
    return {line.fate for rank in account.ranks for line in rank.lines if line.role is role}


def plan(model: Model, recipe: Recipe | None = None, **optimizer: Any) -> Forecast:
    return forecast(model, Layout(vocab_multiple=1), recipe, Optimizer(**optimizer))


def per_parameter(account: Forecast, role: Role) -> float:
    return account.total(role) / account.model.parameters


@pytest.mark.parametrize(
    ("optimizer", "master", "moments"),
    [
        ({"kind": Kind.ADAM}, 4, 8),
        ({"kind": Kind.PRECISION_AWARE_ADAM}, 2, 8),
        ({"kind": Kind.PRECISION_AWARE_ADAM, "param_remainders": False}, 4, 8),
        ({"kind": Kind.PRECISION_AWARE_ADAM, "exp_avg_bytes": 2, "exp_avg_sq_bytes": 1}, 2, 3),
        ({"kind": Kind.SGD}, 4, 4),
        ({"kind": Kind.SGD, "sgd_momentum": False}, 4, 0),
        ({"kind": Kind.ADAM, "cpu_offload": 1.0}, 0, 0),
    ],
)
def test_optimizer_state(model: Model, optimizer: dict[str, Any], master: int, moments: int) -> None:
    account = plan(model, **optimizer)
    assert per_parameter(account, Role.MASTER) == master
    assert per_parameter(account, Role.MOMENT) == moments


def test_muon_has_one_moment_for_matrices_and_two_for_the_rest(model: Model) -> None:
    matrices = sum(weight.elements for _, weight in model.weights() if weight.is_matrix)
    rest = model.parameters - matrices
    assert plan(model, kind=Kind.MUON).total(Role.MOMENT) == 4 * matrices + 8 * rest


def test_muon_gives_whole_matrices_to_ranks(model: Model) -> None:
    account = forecast(model, Layout(gpus=8, vocab_multiple=1), optimizer=Optimizer(kind=Kind.MUON))
    masters = [rank.bytes_of(Role.MASTER) for rank in account.by_rank()]
    assert sum(masters) == pytest.approx(4 * model.parameters, rel=1e-6)
    largest = max(weight.rows * weight.cols for _, weight in model.weights() if weight.is_matrix)
    assert max(masters) - min(masters) <= 4 * largest


def test_muon_gives_the_largest_matrix_away_first() -> None:
    weights = tuple(Weight(f"w{rows}", rows, 64) for rows in (1, 1, 1, 1, 4))
    head = Layer("head", (Weight("output_layer", 2, 64, embedding=True),))
    one = Model("drawn", "drawn", 64, False, Layer("embedding", ()), (Layer("decoder.layers.0", weights),), head)
    account = forecast(one, Layout(gpus=2, vocab_multiple=1), optimizer=Optimizer(kind=Kind.MUON))
    halves = {rank.bytes_of(Role.MOMENT) for rank in account.by_rank()}
    assert halves == {4 * 4 * 64 + 8 * 64}


def test_remainders_make_the_parameter_part_of_the_master(model: Model) -> None:
    aware = plan(model, kind=Kind.PRECISION_AWARE_ADAM)
    assert fates(aware, Role.PARAM) == {Fate.MOVED}
    assert fates(plan(model), Role.PARAM) == {Fate.REBUILT}


def test_remainders_are_not_kept_under_other_fp8_recipes(model: Model) -> None:
    account = plan(model, Recipe(format=Format.FP8_BLOCKWISE), kind=Kind.PRECISION_AWARE_ADAM)
    assert per_parameter(account, Role.MASTER) == 4
    assert fates(account, Role.PARAM) == {Fate.REBUILT}


def test_optimizer_on_the_host_leaves_nothing_to_copy(model: Model) -> None:
    account = plan(model, cpu_offload=1.0)
    assert account.copied_bytes == 0
    # Master, gradient and two moments, all fp32.
    assert account.host_bytes_by_node() == [16 * model.parameters]


def test_half_the_optimizer_on_the_host(model: Model) -> None:
    account = plan(model, cpu_offload=0.5)
    assert per_parameter(account, Role.MASTER) + per_parameter(account, Role.MOMENT) == pytest.approx(6)
    assert account.fullest.optimizer_host_bytes == pytest.approx(8 * model.parameters)


def test_gradients_in_bf16(model: Model) -> None:
    assert per_parameter(plan(model, grad_bytes=2), Role.GRAD) == 2


def test_state_is_whole_without_the_distributed_optimizer(model: Model) -> None:
    sharded, whole = (forecast(model, Layout(gpus=4, distributed_optimizer=on)) for on in (True, False))
    assert whole.total(Role.MASTER) == pytest.approx(4 * sharded.total(Role.MASTER), rel=1e-6)


def test_frozen_weights_have_no_gradient_no_state_and_stay_in_the_store(model: Model) -> None:
    frozen = freeze(model, ["*mlp*"])
    account = forecast(frozen, Layout(vocab_multiple=1))
    trainable = sum(weight.elements for _, weight in frozen.weights() if weight.trainable)
    assert account.total(Role.GRAD) == 4 * trainable
    assert account.total(Role.MOMENT) == 8 * trainable
    clean = [line for line in account.fullest.lines if line.fate is Fate.CLEAN]
    assert [line.nbytes for line in clean] == [2 * (model.parameters - trainable)]
    # A wake copies them back, a sleep does not copy them out again.
    assert account.restored_bytes - account.copied_bytes == clean[0].nbytes
    first = account.with_options(Options(keep_unchanged=False))
    assert first.copied_bytes - account.copied_bytes == clean[0].nbytes


def test_frozen_quantized_parameters_stay_in_the_store_too(model: Model) -> None:
    recipe = Recipe(format=Format.FP8_BLOCKWISE, primary_weights=True)
    assert fates(forecast(freeze(model, ["*"]), recipe=recipe), Role.PARAM) == {Fate.CLEAN}


def test_frozen_weights_are_cached_like_any_other(model: Model) -> None:
    recipe = Recipe(format=Format.FP8_BLOCKWISE)
    caches = [forecast(each, recipe=recipe).total(Role.QUANTIZED_CACHE) for each in (model, freeze(model, ["*"]))]
    assert caches[0] == caches[1] > 0


def test_lora_adapters(model: Model) -> None:
    adapted = add_lora(model, 16, ["linear_qkv", "linear_fc2"])
    # qkv [4096, 1024] and fc2 [1024, 3072], 28 layers.
    expected = 28 * 16 * ((4096 + 1024) + (1024 + 3072))
    account = forecast(adapted, Layout(vocab_multiple=1))
    assert account.total(Role.ADAPTER) == 2 * expected
    assert account.total(Role.GRAD) == 4 * expected
    assert account.total(Role.MASTER) + account.total(Role.MOMENT) == 12 * expected
    assert fates(account, Role.PARAM) == {Fate.CLEAN}
    assert fates(account, Role.ADAPTER) == {Fate.REBUILT}


def test_lora_adapters_follow_the_split_of_their_base(model: Model) -> None:
    adapted = add_lora(model, 16, ["linear_qkv", "linear_fc2"])
    account = forecast(adapted, Layout(gpus=4, tp=4, vocab_multiple=1))
    expected = 28 * 16 * ((4096 // 4 + 1024) + (1024 + 3072 // 4))
    assert account.fullest.bytes_of(Role.ADAPTER) == 2 * expected


def test_each_expert_has_its_adapter() -> None:
    moe = build_model(read_config("qwen3-30b-a3b"))
    account = forecast(add_lora(moe, 8, ["linear_fc2"]), Layout(gpus=8, ep=8, vocab_multiple=1))
    assert account.fullest.bytes_of(Role.ADAPTER) == 2 * 48 * (128 // 8) * 8 * (2048 + 768)


def test_router_buffers_and_fp32_parameters_are_moved() -> None:
    account = forecast(build_model(read_config("glm-4.7-flash")))
    assert fates(account, Role.BUFFER) == {Fate.MOVED}
    assert account.total(Role.BUFFER) == 46 * 2 * 4 * 64
    sinks = forecast(build_model(read_config("gpt-oss-20b")))
    own_master = [line for line in sinks.fullest.lines if line.reason.startswith("fp32 parameter")]
    assert [line.nbytes for line in own_master] == [4 * 24 * 64]


def test_cuda_graphs_close_the_gate_of_the_caches(model: Model) -> None:
    recipe = Recipe(format=Format.FP8_BLOCKWISE)
    account = forecast(model, recipe=recipe, options=Options(cuda_graphs=True))
    assert fates(account, Role.QUANTIZED_CACHE) == {Fate.MOVED}
    assert fates(account, Role.WORKSPACE) == {Fate.KEPT}
    assert fates(forecast(model, recipe=recipe), Role.QUANTIZED_CACHE) == {Fate.DROPPED}


def test_savings_alone_add_up_to_all_of_them(model: Model) -> None:
    *alone, together = forecast(freeze(model, ["*layers.0.*"]), recipe=Recipe(format=Format.FP8_BLOCKWISE)).savings()
    assert len(alone) == 4
    assert all(saving.job_bytes > 0 for saving in alone)
    assert together.job_bytes == sum(saving.job_bytes for saving in alone)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"cpu_offload": 1.5}, "between 0 and 1"),
        ({"grad_bytes": 8}, "8 bytes"),
        ({"exp_avg_bytes": 2}, "precision-aware-adam"),
        ({"kind": Kind.MUON, "cpu_offload": 1.0}, "muon"),
    ],
)
def test_optimizers_that_cannot_be(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Optimizer(**wrong)


def test_training_that_cannot_be(model: Model) -> None:
    with pytest.raises(UsageError, match="no weight of qwen3-0"):
        freeze(model, ["*vision*"])
    with pytest.raises(UsageError, match=r"no linear called linear_q_up_proj\. It has: linear_fc1"):
        add_lora(model, 8, ["linear_q_up_proj"])
    with pytest.raises(UsageError, match="least is 1"):
        add_lora(model, 0)


def test_parameters_rebuilt_from_masters_on_the_host_cross_the_link(model: Model) -> None:
    account = plan(model, cpu_offload=1.0)
    assert account.restored_bytes == 2 * model.parameters
    assert account.fullest.stored_bytes == 0
    assert plan(model).restored_bytes == plan(model).copied_bytes
