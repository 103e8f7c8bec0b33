"""Weights to Megatron-Core's names and layouts and back: pure tensors, no Megatron."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torpor.errors import UnsupportedError, UsageError
from torpor.rl.backends.megatron_weights import (
    Architecture,
    GateUp,
    Qkv,
    parameters_of,
    to_megatron,
    to_transformers,
)

SMALL = Architecture(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_heads=8,
    num_query_groups=4,
    head_dim=16,
    vocab_size=64,
    max_positions=128,
    rope_theta=10000.0,
    rope_factor=None,
    norm_epsilon=1e-6,
    ties_embeddings=True,
    has_qk_norm=False,
    has_qkv_bias=False,
)


def test_queries_keys_and_values_lie_group_by_group() -> None:
    # 2 groups of 2 queries, heads of one element: q0 q1 k0 v0, q2 q3 k1 v1
    q, k, v = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    assert Qkv(2, 2, 1).fuse([q, k, v]).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_each_rank_has_its_gate_and_its_up() -> None:
    gate, up = torch.arange(4), torch.arange(10, 14)
    assert GateUp(1).fuse([gate, up]).tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    whole = GateUp(2).fuse([gate, up])
    assert [shard.tolist() for shard in whole.chunk(2)] == [[0, 1, 10, 11], [2, 3, 12, 13]]


@given(groups=st.integers(1, 4), queries=st.integers(1, 4), head=st.integers(1, 5), width=st.sampled_from([None, 1, 7]))
def test_queries_keys_and_values_come_back(groups: int, queries: int, head: int, width: int | None) -> None:
    rest = () if width is None else (width,)
    parts = [torch.randn(size * head, *rest) for size in (groups * queries, groups, groups)]
    layout = Qkv(groups, queries, head)
    whole = layout.fuse(parts)
    assert whole.shape == (groups * (queries + 2) * head, *rest)
    assert all(torch.equal(a, b) for a, b in zip(parts, layout.split(whole), strict=True))


@given(ranks=st.integers(1, 4), per_rank=st.integers(1, 5), width=st.integers(1, 4))
def test_gate_and_up_come_back(ranks: int, per_rank: int, width: int) -> None:
    parts = [torch.randn(ranks * per_rank, width) for _ in range(2)]
    whole = GateUp(ranks).fuse(parts)
    assert whole.shape == (2 * ranks * per_rank, width)
    assert all(torch.equal(a, b) for a, b in zip(parts, GateUp(ranks).split(whole), strict=True))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("changes", [{}, {"has_qk_norm": True, "ties_embeddings": False}, {"has_qkv_bias": True}])
def test_all_weights_of_a_model_go_there_and_back(changes: dict[str, Any], num_ranks: int) -> None:
    architecture = replace(SMALL, **changes)
    weights = {name: parameter.detach() for name, parameter in _model(architecture).named_parameters()}
    parameters = list(parameters_of(architecture, num_ranks, fused_norms=True))
    shards = [dict(to_megatron(weights, parameters, rank=rank, num_ranks=num_ranks)) for rank in range(num_ranks)]
    qkv = shards[0]["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert qkv.shape == (4 * (2 + 2) * 16 // num_ranks, 32)
    back = {
        name: tensor
        for parameter in parameters
        for name, tensor in to_transformers(parameter, [shard[parameter.name] for shard in shards])
    }
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) and back[name].is_contiguous() for name in weights)


def test_norms_are_where_the_layers_have_them() -> None:
    fused = {p.name for p in parameters_of(SMALL, 1, fused_norms=True)}
    apart = {p.name for p in parameters_of(SMALL, 1, fused_norms=False)}
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in fused - apart
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in apart - fused


def test_a_missing_weight_is_named() -> None:
    with pytest.raises(UsageError, match=r"lack model\.embed_tokens\.weight and \d+ more"):
        dict(to_megatron({}, list(parameters_of(SMALL, 1, fused_norms=True))))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Gemma2Config", {}, "model_type is 'gemma2'"),
        ("LlamaConfig", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("LlamaConfig", {"attention_bias": True}, "attention_bias is True"),
        ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_type"),
        ("Qwen3Config", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window is True"),
    ],
)
def test_what_is_not_converted_is_refused_by_name(name: str, options: dict[str, Any], message: str) -> None:
    import transformers

    with pytest.raises(UnsupportedError, match=message):
        Architecture.of(getattr(transformers, name)(**options))


def test_the_shape_of_a_configuration() -> None:
    import transformers

    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    llama = Architecture.of(transformers.LlamaConfig(num_key_value_heads=8, rope_parameters=rope))
    assert (llama.rope_theta, llama.rope_factor, llama.head_dim, llama.num_query_groups) == (5e5, 32.0, 128, 8)
    qwen = Architecture.of(transformers.Qwen3Config(hidden_size=64, num_attention_heads=2, head_dim=128))
    assert (qwen.head_dim, qwen.has_qk_norm, qwen.has_qkv_bias) == (128, True, False)
    assert Architecture.of(transformers.Qwen2Config()).has_qkv_bias


def _model(architecture: Architecture) -> torch.nn.Module:
    import transformers

    kind = "Qwen3" if architecture.has_qk_norm else "Qwen2" if architecture.has_qkv_bias else "Llama"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=architecture.vocab_size,
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.ffn_hidden_size,
        num_hidden_layers=architecture.num_layers,
        num_attention_heads=architecture.num_heads,
        num_key_value_heads=architecture.num_query_groups,
        head_dim=architecture.head_dim,
        tie_word_embeddings=architecture.ties_embeddings,
    )
    model: torch.nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model
