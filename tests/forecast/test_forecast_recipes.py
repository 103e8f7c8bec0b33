"""Bytes of one quantized weight, and the rule for its two directions."""

from __future__ import annotations

from typing import Any

import pytest

from torpor.errors import UsageError
from torpor.forecast.actor import forecast
from torpor.forecast.config import read_config
from torpor.forecast.families import build_model
from torpor.forecast.layout import Layout
from torpor.forecast.recipes import (
    BOTH,
    NOTHING,
    ROW,
    Architecture,
    Directions,
    Format,
    Moment,
    Override,
    Recipe,
    Recompute,
)
from torpor.forecast.shapes import Module, Weight
from torpor.kinds import Fate, Role


def on_blackwell(name: str, **more: Any) -> Recipe:
    return Recipe(format=Format(name), architecture=Architecture.BLACKWELL, **more)


@pytest.mark.parametrize(
    ("recipe", "directions", "bytes_per_element"),
    [
        (Recipe(format=Format.FP8_CURRENT), BOTH, 2.0),
        (Recipe(format=Format.FP8_DELAYED), BOTH, 2.0),
        (Recipe(format=Format.FP8_CURRENT), ROW, 1.0),
        (on_blackwell("fp8-current"), BOTH, 1.0),
        (Recipe(format=Format.FP8_BLOCKWISE), BOTH, 2 + 8 / 16384),
        (Recipe(format=Format.FP8_BLOCKWISE), ROW, 1 + 4 / 16384),
        (on_blackwell("mxfp8"), BOTH, 2.0625),
        (on_blackwell("mxfp8"), ROW, 1.03125),
        (on_blackwell("nvfp4"), BOTH, 1.125),
        (on_blackwell("nvfp4"), ROW, 0.5625),
    ],
)
def test_aligned_shapes(recipe: Recipe, directions: Directions, bytes_per_element: float) -> None:
    rows, cols = 4096, 8192
    amaxes = 8  # at most two fp32 scalars beside the blocks
    expected = bytes_per_element * rows * cols
    assert expected <= recipe.weight_bytes(rows, cols, directions) <= expected + amaxes


@pytest.mark.parametrize(
    ("name", "rows", "cols", "directions", "expected"),
    [
        ("mxfp8", 576, 6144, BOTH, "2.0694"),
        ("nvfp4", 576, 6144, ROW, "0.5694"),
        ("fp8-blockwise", 576, 6144, BOTH, "2.0007"),
        ("mxfp8", 1216, 2560, BOTH, "2.0658"),
        ("mxfp8", 64, 96, BOTH, "2.1667"),
        ("mxfp8", 64, 2048, BOTH, "2.1250"),
        ("nvfp4", 64, 2048, BOTH, "1.1876"),
        ("fp8-blockwise", 64, 2048, BOTH, "2.0024"),
        ("mxfp8", 192, 1536, BOTH, "2.0833"),
        ("nvfp4", 192, 1536, BOTH, "1.1459"),
        ("fp8-blockwise", 192, 1536, BOTH, "2.0010"),
    ],
)
def test_padded_shapes(name: str, rows: int, cols: int, directions: Directions, expected: str) -> None:
    ratio = on_blackwell(name).weight_bytes(rows, cols, directions) / (rows * cols)
    assert f"{ratio:.4f}" == expected


LINEAR = Weight("self_attention.linear_proj", 64, 64, module=Module.LINEAR)
GROUPED = Weight("mlp.experts.linear_fc1", 64, 64, module=Module.GROUPED_LINEAR)
NORMED = Weight("mlp.linear_fc1", 64, 64, module=Module.LAYERNORM_LINEAR)


@pytest.mark.parametrize("weight", [LINEAR, GROUPED, NORMED], ids=lambda weight: weight.module)
@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"moment": Moment.INIT}, NOTHING),
        ({"moment": Moment.NO_GRAD}, ROW),
        ({}, BOTH),
        ({"override": Override.DEQUANTIZED}, ROW),
        ({"override": Override.HIGH_PRECISION}, ROW),
        ({"recompute": Recompute.FULL}, BOTH),
        ({"override": Override.DEQUANTIZED, "recompute": Recompute.FULL, "te_version": (2, 18)}, ROW),
    ],
)
def test_directions_at_the_moment_of_sleep(weight: Weight, more: dict[str, Any], expected: Directions) -> None:
    assert on_blackwell("nvfp4", **more).directions(weight) == expected


@pytest.mark.parametrize("release", [(2, 17), (2, 19)])
@pytest.mark.parametrize("recompute", [Recompute.FULL, Recompute.SELECTIVE])
def test_a_recompute_region_undoes_row_only(recompute: Recompute, release: tuple[int, int]) -> None:
    recipe = on_blackwell("nvfp4", override=Override.DEQUANTIZED, recompute=recompute, te_version=release)
    selective = recompute is Recompute.SELECTIVE
    assert recipe.directions(GROUPED) == (BOTH if selective or release >= (2, 19) else ROW)
    assert recipe.directions(LINEAR) == (BOTH if not selective and release >= (2, 19) else ROW)
    assert recipe.directions(NORMED) == ROW


@pytest.mark.parametrize(
    ("name", "rows", "cols"),
    [("mxfp8", 48, 64), ("mxfp8", 64, 48), ("nvfp4", 24, 64), ("nvfp4", 64, 8), ("fp8-blockwise", 64, 24)],
)
def test_refused_shapes_name_layer_and_weight(name: str, rows: int, cols: int) -> None:
    with pytest.raises(UsageError, match=r"decoder\.layers\.3: mlp\.linear_fc2") as caught:
        on_blackwell(name).check_shape(rows, cols, layer="decoder.layers.3", weight="mlp.linear_fc2")
    assert (caught.value.rows, caught.value.cols) == (rows, cols)


def test_a_split_that_the_recipe_refuses() -> None:
    # 1536 / 32 ranks = 48 columns of fc2, no multiple of 32.
    model = build_model(read_config("glm-4.7"))
    layout = Layout(gpus=32, etp=32, tp=32)
    forecast(model, layout, Recipe(format=Format.FP8_BLOCKWISE))
    with pytest.raises(UsageError, match=r"linear_fc2 is \[5120, 48\] on a rank, mxfp8"):
        forecast(model, layout, on_blackwell("mxfp8"))


def test_formats_that_an_architecture_lacks() -> None:
    for name in ("mxfp8", "nvfp4"):
        with pytest.raises(UsageError, match="Hopper"):
            Recipe(format=Format(name))


def test_delayed_scaling_has_no_override_and_no_single_bf16_layer() -> None:
    with pytest.raises(UsageError, match="override"):
        Recipe(format=Format.FP8_DELAYED, override=Override.DEQUANTIZED)
    with pytest.raises(UsageError, match="bf16"):
        Recipe(format=Format.FP8_DELAYED, first_layers_bf16=1)


def test_delayed_scaling_state_is_kept() -> None:
    model = build_model(read_config("qwen3-0.6b"))
    account = forecast(model, recipe=Recipe(format=Format.FP8_DELAYED, amax_history=1024))
    lines = [line for line in account.fullest.lines if line.role is Role.BUFFER]
    assert [(line.fate, line.nbytes) for line in lines] == [(Fate.KEPT, 112 * 5 * 4 * 1025)]


def test_first_and_last_layers_in_bf16() -> None:
    model = build_model(read_config("qwen3-0.6b"))
    whole = forecast(model, recipe=Recipe(format=Format.FP8_CURRENT))
    trimmed = forecast(model, recipe=Recipe(format=Format.FP8_CURRENT, first_layers_bf16=1, last_layers_bf16=2))
    cached = (whole.total(Role.QUANTIZED_CACHE), trimmed.total(Role.QUANTIZED_CACHE))
    assert cached[1] * 28 == cached[0] * 25


def test_primary_weights_are_state_and_leave_no_cache() -> None:
    model = build_model(read_config("qwen3-0.6b"))
    recipe = Recipe(format=Format.FP8_BLOCKWISE, primary_weights=True)
    plain = forecast(model, recipe=Recipe(format=Format.FP8_BLOCKWISE))
    account = forecast(model, recipe=recipe)
    assert account.total(Role.QUANTIZED_CACHE) == 0
    moved = [line.nbytes for line in account.fullest.lines if line.role is Role.PARAM and line.fate is Fate.MOVED]
    assert moved == [plain.total(Role.QUANTIZED_CACHE)]


def test_no_cache_is_held_when_each_microbatch_quantizes_anew() -> None:
    model = build_model(read_config("qwen3-0.6b"))
    account = forecast(model, recipe=Recipe(format=Format.FP8_BLOCKWISE, cache=False))
    assert account.total(Role.QUANTIZED_CACHE) == 0


def test_data_parallelism_does_not_shard_caches() -> None:
    model = build_model(read_config("qwen3-0.6b"))
    totals = [
        forecast(model, Layout(gpus=gpus), Recipe(format=Format.FP8_BLOCKWISE)).total(Role.QUANTIZED_CACHE)
        for gpus in (1, 8)
    ]
    assert totals[1] == 8 * totals[0]
