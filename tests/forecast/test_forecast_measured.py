"""The forecast against bytes that were measured on a real actor."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from torpor.forecast.actor import Forecast
from torpor.forecast.command import given_by, make_plan
from torpor.forecast.fates import Options
from torpor.kinds import Role

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "megatron_actor.json"
#: The ways of `benchmarks/megatron_actor.py`, as options of the forecast.
WAYS = {
    "all off": Options.off(),
    "caches dropped": Options.off().only("drop_caches"),
    "gradients and parameters too": Options(),
}
ANCHOR = str(Path(__file__).parent / "data" / "anchor_8_layers.sh")


@pytest.fixture
def anchor() -> Forecast:
    return make_plan(ANCHOR, given_by(argparse.Namespace())).forecast()


def test_model_that_was_measured(anchor: Forecast) -> None:
    assert anchor.model.parameters / 1e9 == pytest.approx(2.013, abs=0.0005)


def test_everything_held_is_within_a_percent_of_39_83_gb(anchor: Forecast) -> None:
    # H200, TransformerEngine 2.20.2, Megatron-Core 0.19.2: allocated after a step; 19.78 bytes a parameter.
    everything = anchor.with_options(Options.off())
    assert everything.copied_bytes == anchor.awake_bytes
    assert everything.copied_bytes == pytest.approx(39.83e9, rel=0.01)
    assert everything.copied_bytes / anchor.model.parameters == pytest.approx(19.78, rel=0.01)


def test_each_role_that_was_measured(anchor: Forecast) -> None:
    measured_gb = {Role.PARAM: 4.03, Role.GRAD: 8.05, Role.MASTER: 8.05, Role.MOMENT: 16.11}
    for role, gigabytes in measured_gb.items():
        assert anchor.total(role) / 1e9 == pytest.approx(gigabytes, abs=0.005), role


def test_a_clear_that_missed_half_of_one_weight(anchor: Forecast) -> None:
    # Clearing gave back 3.373 GB at one point: all caches but one direction of one fc1 [28672, 4096].
    fc1_half = 28672 * 4096 + 4 * 224 * 32
    assert (anchor.total(Role.QUANTIZED_CACHE) - fc1_half) / 1e9 == pytest.approx(3.373, abs=0.0005)


@pytest.mark.parametrize("way", list(WAYS))
def test_what_a_real_sleep_copied_and_dropped(anchor: Forecast, way: str) -> None:
    """Recorded on an H200 by `benchmarks/megatron_actor.py --parts bytes`: the same model, blockwise FP8."""
    case: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))["cases"]["bytes/blockwise"]
    measured, planned = case["ways"][way], anchor.with_options(WAYS[way])
    assert case["parameters"] == anchor.model.parameters
    assert planned.copied_bytes == pytest.approx(measured["copied_bytes"], rel=0.01)
    assert measured["cache_bytes"] == anchor.total(Role.QUANTIZED_CACHE)
    assert measured["dropped_cache_bytes"] == (0 if way == "all off" else measured["cache_bytes"])
