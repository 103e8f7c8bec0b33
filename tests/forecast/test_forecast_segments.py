"""The caching allocator's segments, and what an allocator-level saver copies."""

from __future__ import annotations

import pytest

from torpor.forecast.actor import forecast
from torpor.forecast.config import read_config
from torpor.forecast.families import build_model
from torpor.forecast.fates import Options
from torpor.forecast.layout import Layout
from torpor.forecast.optimizers import Kind, Optimizer
from torpor.forecast.recipes import Format, Recipe
from torpor.forecast.segments import MIB, segment_bytes, segment_view
from torpor.forecast.training import add_lora
from torpor.kinds import Role


@pytest.mark.parametrize(
    ("tensors", "segments_mib"),
    [
        ([1], 2),
        ([1] * 4096, 2),
        ([1] * 4097, 4),
        ([MIB], 2),
        ([MIB + 1], 20),
        ([8 * MIB] * 2, 20),
        ([8 * MIB] * 3, 40),
        ([9 * MIB, 9 * MIB, 3 * MIB], 40),
        ([10 * MIB - 512], 20),
        ([10 * MIB], 10),
        ([11 * MIB], 12),
        ([21 * MIB], 22),
        ([10 * MIB + 512, 512 * 1024], 14),
    ],
)
def test_rules_of_the_allocator(tensors: list[int], segments_mib: int) -> None:
    assert segment_bytes(tensors) == segments_mib * MIB


def test_a_saver_copies_all_segments_where_torpor_moves_only_state() -> None:
    model = build_model(read_config("qwen3-4b"))
    account = forecast(model, Layout(gpus=8, tp=2), Recipe(format=Format.FP8_BLOCKWISE))
    view = segment_view(account)
    everything = account.with_options(Options.off()).fullest
    tensors = sum(role.tensor_bytes for role in view)
    assert tensors == pytest.approx(everything.copied_bytes, rel=1e-6)
    for role in view:
        assert role.segment_bytes >= role.tensor_bytes
        assert role.tensor_bytes == pytest.approx(account.fullest.bytes_of(role.role), rel=1e-6)


@pytest.mark.parametrize("kind", [Kind.MUON, Kind.SGD])
@pytest.mark.parametrize("distributed", [True, False])
def test_the_view_holds_the_same_bytes_as_the_account(kind: Kind, distributed: bool) -> None:
    model = add_lora(build_model(read_config("qwen3-0.6b")), 16)
    layout = Layout(gpus=4, distributed_optimizer=distributed)
    recipe = Recipe(format=Format.FP8_BLOCKWISE, primary_weights=True)
    account = forecast(model, layout, recipe, Optimizer(kind=kind))
    for role in segment_view(account):
        held = account.fullest.bytes_of(role.role)
        held += account.fullest.bytes_of(Role.ADAPTER) if role.role is Role.PARAM else 0
        assert role.tensor_bytes == pytest.approx(held, rel=1e-4), role.role
