"""Every row of the worked tables, to the printed digit.

`data/worked_numbers.json` holds numbers that a second program computed from the same public sources.
`CORRECTED` lists the cells where that second program was wrong, with the reason.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from torpor.forecast.actor import Forecast, forecast
from torpor.forecast.config import read_config
from torpor.forecast.families import build_model
from torpor.forecast.fates import Options
from torpor.forecast.layout import Layout
from torpor.forecast.recipes import Architecture, Format, Override, Recipe, Scope
from torpor.forecast.segments import segment_view
from torpor.forecast.shapes import Model, Module
from torpor.kinds import Role

TABLES: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "data" / "worked_numbers.json").read_text(encoding="utf-8")
)

#: (table, model, cell, printed) -> the right number.
CORRECTED = {
    # Both hyper-connections of a layer, as in the class in transformers: the total equals its count.
    ("unsharded", "deepseek-v4-flash", "parameters", "284.31"): "284.33",
    ("actors", "deepseek-v4-flash-4layer", "param", "13.773"): "13.778",
    ("actors", "deepseek-v4-flash-4layer", "grad", "27.546"): "27.556",
    ("actors", "deepseek-v4-flash-4layer", "master", "27.546"): "27.556",
    ("actors", "deepseek-v4-flash-4layer", "moment", "55.092"): "55.113",
    ("actors", "deepseek-v4-flash-4layer", "param", "16.117"): "16.122",
    ("actors", "deepseek-v4-flash-4layer", "grad", "32.233"): "32.243",
    ("actors", "deepseek-v4-flash-4layer", "master", "27.386"): "27.388",
    ("actors", "deepseek-v4-flash-4layer", "moment", "54.771"): "54.776",
    # 1766.470, 993.458 and 436.496, rounded twice.
    ("splits", "glm-5.2", "fp8-blockwise", "1767"): "1766",
    ("splits", "glm-5.2", "nvfp4", "994"): "993",
    ("splits", "glm-5.2", "nvfp4 row", "437"): "436",
    # 8.037495 and 30.570504, rounded twice.
    ("actors", "qwen3-30b-a3b", "param", "8.038"): "8.037",
    ("actors", "qwen3-30b-a3b", "moment", "30.570"): "30.571",
    # 46.355573.
    ("actors", "glm-5.2-5layer", "moment", "46.355"): "46.356",
}


def printed(value: float, like: str) -> str:
    """A number with as many decimals as `like` has."""
    return str(Decimal(value).quantize(Decimal(like.rstrip("%"))))


def right(table: str, model: str, cell: str, number: str) -> str:
    return CORRECTED.get((table, model, cell, number), number)


def recipe_of(words: str, **more: Any) -> Recipe:
    """`nvfp4 row experts`, `fp8-current hopper`, ... as a recipe."""
    name, *rest = words.split()
    architecture = Architecture.HOPPER if "hopper" in rest else Architecture.BLACKWELL
    override = Override.DEQUANTIZED if "row" in rest else Override.NONE
    scope = Scope.EXPERTS if "experts" in rest else Scope.ALL
    return Recipe(format=Format(name), architecture=architecture, override=override, scope=scope, **more)


def model_of(name: str) -> Model:
    return build_model(read_config(name))


def planned(row: dict[str, Any], words: str) -> Forecast:
    """The tables pad no vocabulary; GLM's NVFP4 rows leave the first and last layer in bf16."""
    name: str = row["model"]
    bf16 = int("experts" in words and name.startswith("glm"))
    recipe = recipe_of(words, first_layers_bf16=bf16, last_layers_bf16=bf16)
    return forecast(model_of(name), Layout(**row["layout"], vocab_multiple=1), recipe)


@pytest.mark.parametrize("row", TABLES["unsharded"], ids=lambda row: row["model"])
def test_one_copy_of_every_cached_weight(row: dict[str, Any]) -> None:
    model = model_of(row["model"])
    cached = [weight for _, weight in model.weights() if weight.module is not Module.PLAIN]
    found = {
        "weights": float(sum(weight.count for weight in cached)),
        "elements": sum(weight.elements for weight in cached) / 1e9,
        "experts": sum(weight.elements for weight in cached if weight.expert) / 1e9,
        "parameters": model.parameters / 1e9,
    }
    for words in row.keys() - found.keys() - {"model"}:
        account = forecast(model, Layout(vocab_multiple=1), recipe_of(words))
        found[words] = account.total(Role.QUANTIZED_CACHE) / 1e9
    for cell, value in found.items():
        expected = right("unsharded", row["model"], cell, row[cell])
        assert printed(value, expected) == expected, cell


@pytest.mark.parametrize("row", TABLES["splits"], ids=lambda row: f"{row['model']}-{row['layout']}")
def test_fullest_rank_and_all_ranks(row: dict[str, Any]) -> None:
    for words in row.keys() - {"model", "layout"}:
        account = planned(row, words)
        rank, job = (right("splits", row["model"], words, number) for number in row[words])
        assert printed(account.most(Role.QUANTIZED_CACHE) / 1e9, rank) == rank, words
        assert printed(account.total(Role.QUANTIZED_CACHE) / 1e9, job) == job, words


@pytest.mark.parametrize("row", TABLES["segments"], ids=lambda row: f"{row['model']}-{row['layout']}")
def test_segments_over_tensors(row: dict[str, Any]) -> None:
    view = {role.role: role for role in segment_view(planned(row, row["recipe"]))}
    cache = view[Role.QUANTIZED_CACHE]
    assert printed(cache.segment_bytes / cache.tensor_bytes, row["ratio"]) == row["ratio"]


@pytest.mark.parametrize("row", TABLES["actors"], ids=lambda row: f"{row['model']}-{row['recipe']}")
def test_actor_by_role(row: dict[str, Any]) -> None:
    rank = planned(row, row["recipe"]).fullest
    roles = (Role.PARAM, Role.GRAD, Role.MASTER, Role.MOMENT, Role.QUANTIZED_CACHE)
    held = {role: rank.bytes_of(role) for role in roles}
    for role, nbytes in held.items():
        expected = right("actors", row["model"], role, row[role])
        assert printed(nbytes / 1e9, expected) == expected, role
    # The printed sum adds the printed columns, before the corrections above.
    assert sum(held.values()) / 1e9 == pytest.approx(float(row["sum"]), abs=0.06)
    cache = held[Role.QUANTIZED_CACHE]
    share = 100 * cache / (held[Role.PARAM] + cache)
    assert printed(share, row["share"]) + "%" == row["share"]


def test_multi_token_prediction_adds_these_cached_elements() -> None:
    added = {
        "deepseek-v3": "11.61",
        "glm-5": "9.94",
        "deepseek-v4-flash": "6.57",
        "qwen3.5-35b-a3b": "0.84",
        "glm-4.7-flash": "0.64",
    }
    for name, expected in added.items():
        layer = build_model(read_config(name), mtp_layers=1).mtp[0]
        cached = sum(weight.elements for weight in layer.weights if weight.module is not Module.PLAIN)
        assert printed(cached / 1e9, expected) == expected, name


def test_one_moe_layer_of_glm_in_nvfp4() -> None:
    row = {"model": "glm-5.2-5layer", "layout": {"gpus": 4, "tp": 4, "ep": 4}}
    cache = planned(row, "nvfp4 row experts").total(Role.QUANTIZED_CACHE)
    assert printed(cache / 1024**3, "5.0625") == "5.0625"
    assert printed(cache / 1e9, "5.436") == "5.436"
    both = planned(row, "nvfp4 experts").total(Role.QUANTIZED_CACHE)
    assert printed(both / 1e9, "10.87") == "10.87"


def test_deepseek_v4_with_four_layers_in_mxfp8() -> None:
    split = {"model": "deepseek-v4-flash-4layer", "layout": {"gpus": 4, "tp": 4, "ep": 4}}
    whole = {"model": "deepseek-v4-flash-4layer", "layout": {"gpus": 4, "ep": 4}}
    for row, decimal, binary in ((split, "54.188", "50.467"), (whole, "56.472", "52.594")):
        cache = planned(row, "mxfp8").total(Role.QUANTIZED_CACHE)
        assert printed(cache / 1e9, decimal) == decimal
        assert printed(cache / 1024**3, binary) == binary


def test_irreducible_bytes_are_twelve_a_parameter_over_the_group() -> None:
    model = model_of("llama-3.1-8b")
    account = forecast(model, Layout(gpus=4, vocab_multiple=1))
    moved = account.total(Role.MASTER) + account.total(Role.MOMENT)
    assert account.copied_bytes == moved
    assert moved / model.parameters == pytest.approx(12, abs=1e-6)


def test_avoidable_share_of_a_copy_of_everything() -> None:
    # About 72% at four data-parallel ranks with the blockwise recipe, about 40% at one.
    row = {"model": "qwen3-4b", "layout": {"gpus": 8, "tp": 2}}
    account = planned(row, "fp8-blockwise")
    everything = account.with_options(Options.off())
    assert 1 - account.copied_bytes / everything.copied_bytes == pytest.approx(0.72, abs=0.005)
    alone = planned({"model": "qwen3-4b", "layout": {"gpus": 1}}, "fp8-blockwise")
    ratio = 1 - alone.copied_bytes / alone.with_options(Options.off()).copied_bytes
    assert ratio == pytest.approx(0.40, abs=0.01)
