"""Stages, shards, padding, and the splits that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from torpor.errors import UsageError
from torpor.forecast.actor import forecast
from torpor.forecast.config import read_config
from torpor.forecast.families import build_model
from torpor.forecast.layout import Layout, shards, stages
from torpor.forecast.shapes import Layer, Model
from torpor.kinds import Role


def model_of(name: str, mtp: int = 0) -> Model:
    return build_model(read_config(name), mtp_layers=mtp)


def decoder_indices(stage: list[Layer]) -> list[int]:
    return [layer.index for layer in stage if layer.index is not None]


def names(stage: list[Layer]) -> list[str]:
    return [weight.name for layer in stage for weight in layer.weights if weight.embedding]


def test_even_stages() -> None:
    found = stages(model_of("qwen3-4b"), Layout(gpus=4, pp=4))
    assert [len(decoder_indices(stage)) for stage in found] == [9, 9, 9, 9]


def test_first_and_last_stage_of_their_own_size() -> None:
    found = stages(model_of("glm-5.2"), Layout(gpus=4, pp=4, first_layers=18, last_layers=20))
    assert [len(decoder_indices(stage)) for stage in found] == [18, 20, 20, 20]


def test_embedding_and_loss_counted_as_layers() -> None:
    # 28 layers + 2 = 30 over 5 stages: six each, one less at either end.
    layout = Layout(gpus=5, pp=5, embedding_in_split=True, loss_in_split=True)
    found = stages(model_of("qwen2.5-7b"), layout)
    assert [len(decoder_indices(stage)) for stage in found] == [5, 6, 6, 6, 5]


def test_virtual_stages_interleave() -> None:
    found = stages(model_of("qwen3-0.6b"), Layout(gpus=2, pp=2, vpp=7))
    assert decoder_indices(found[0]) == [i for i in range(28) if i // 2 % 2 == 0]
    assert decoder_indices(found[1]) == [i for i in range(28) if i // 2 % 2 == 1]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"pp": 1}, [["word_embeddings"]]),
        ({"pp": 2}, [["word_embeddings"], ["output_layer"]]),
    ],
)
def test_tied_embeddings_are_held_once_or_on_both_ends(more: dict[str, Any], expected: list[list[str]]) -> None:
    layout = Layout(gpus=more["pp"], **more)
    assert [names(stage) for stage in stages(model_of("qwen3-4b"), layout)] == expected


def test_untied_embeddings() -> None:
    found = stages(model_of("qwen3-8b"), Layout(gpus=2, pp=2))
    assert [names(stage) for stage in found] == [["word_embeddings"], ["output_layer"]]


def test_mtp_lives_on_the_last_stage_with_a_copy_of_the_embedding() -> None:
    found = stages(model_of("glm-4.7-flash", mtp=1), Layout(gpus=2, pp=2, first_layers=24, last_layers=23))
    assert names(found[-1]) == ["word_embeddings", "output_layer"]
    assert "mtp.layers.0" in [layer.name for layer in found[-1]]
    assert "mtp.layers.0" not in [layer.name for layer in found[0]]
    (single,) = stages(model_of("glm-4.7-flash", mtp=1), Layout())
    assert names(single) == ["word_embeddings", "output_layer"]


def test_context_parallel_ranks_are_data_parallel_ranks() -> None:
    model = model_of("qwen3-0.6b")
    plain, context = (forecast(model, Layout(gpus=8, cp=cp)) for cp in (1, 4))
    assert plain.ranks == context.ranks


def test_vocabulary_is_padded_to_a_multiple_of_128_per_rank() -> None:
    # 50,000 -> 50,176 = 2 ranks x 196 x 128.
    config = read_config("qwen3-0.6b")
    config.values = {**config.values, "vocab_size": 50_000}
    held = shards(stages(build_model(config), Layout(gpus=2, tp=2))[0], Layout(gpus=2, tp=2))
    assert held[0].rows == 50_176 // 2


def test_experts_split_over_their_own_groups() -> None:
    layout = Layout(gpus=16, tp=4, ep=4, etp=2)
    held = shards(stages(model_of("qwen3-30b-a3b"), layout)[0], layout)
    by_name = {shard.weight.name: shard for shard in held}
    assert (by_name["mlp.experts.linear_fc1"].count, by_name["mlp.experts.linear_fc1"].rows) == (32, 768)
    assert by_name["mlp.experts.linear_fc2"].cols == 384
    assert by_name["self_attention.linear_proj"].cols == 1024
    assert (layout.dp, layout.expert_dp) == (4, 2)


def test_optimizer_instances_keep_whole_copies() -> None:
    model = model_of("qwen3-0.6b")
    one, two = (forecast(model, Layout(gpus=8, optimizer_instances=n)) for n in (1, 2))
    assert two.total(Role.MOMENT) == pytest.approx(2 * one.total(Role.MOMENT), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("qwen3-4b", {"gpus": 3, "tp": 3}, r"decoder\.layers\.0: self_attention\.linear_qkv has 32 heads"),
        ("qwen2.5-14b", {"gpus": 5, "tp": 5}, r"8 key/value groups"),
        ("qwen2.5-0.5b", {"gpus": 4, "tp": 4}, r"14 heads"),
        ("qwen3-30b-a3b", {"gpus": 3, "ep": 3}, r"mlp\.experts\.linear_fc1 has 128 experts"),
        ("glm-5.2", {"gpus": 4, "pp": 4}, r"78 layers do not share out evenly over 4"),
        ("glm-5.2", {"gpus": 2, "pp": 2, "first_layers": 20, "last_layers": 20}, r"38 left for 0"),
        ("qwen3-4b", {"gpus": 2, "pp": 2, "vpp": 4}, r"4 virtual stages"),
    ],
)
def test_splits_that_do_not_divide_name_the_layer(name: str, layout: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        forecast(model_of(name), Layout(**layout))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"gpus": 6, "tp": 4}, r"tp x pp x cp = 4 x 1 x 1 = 4. Use 8 GPUs"),
        ({"gpus": 8, "ep": 3}, r"etp x ep x pp"),
        ({"gpus": 8, "tp": 0}, r"tp is 0"),
        ({"gpus": 8, "optimizer_instances": 3}, r"3 optimizer instances"),
    ],
)
def test_groups_that_do_not_tile_the_gpus(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Layout(**sizes)
