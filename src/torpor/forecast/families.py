"""From a Hugging Face config to a `Model`: one function for each architecture, and no guess for any other.

Every shape follows the class of the same `model_type` in transformers 5.24; the tests compare parameter
counts with those classes. What multiplies with each weight, and how it is split, is Megatron-Core's way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torpor.errors import UnsupportedError
from torpor.forecast.blocks import (
    GQA,
    MLA,
    ROWS,
    GatedDeltaNet,
    Indexer,
    MoE,
    dense_mlp,
    embedding,
    vector,
)
from torpor.forecast.config import Config
from torpor.forecast.deepseek_v4 import compression_ratio, hyper_connections, hyper_head, v4_attention
from torpor.forecast.shapes import Buffer, Layer, Model, Module, Weight


@dataclass(frozen=True, slots=True)
class Block:
    """The contents of one decoder layer."""

    weights: list[Weight]
    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture reads its config."""

    layer: Callable[[Config, int], Block]
    """The decoder layer of an index."""
    mtp: Callable[[Config], Block] | None = None
    """The decoder layer inside a multi-token-prediction layer; None: one like the last."""
    tied: bool = False
    """Default of `tie_word_embeddings`."""
    head: Callable[[Config], list[Weight]] = lambda config: []
    """Weights after the last layer, beyond the final norm and the output layer."""


def build_model(config: Config, *, mtp_layers: int = 0) -> Model:
    """The model of a config, with `mtp_layers` multi-token-prediction layers built.

    Raises `UnsupportedError` for an unknown architecture, with the list of the known ones.
    """
    family, text = _family(config)
    hidden, vocab = text.number("hidden_size"), text.number("vocab_size")
    return Model(
        name=config.name,
        architecture=text.model_type,
        hidden=hidden,
        tied=config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", family.tied)),
        embedding=Layer("embedding", (embedding("word_embeddings", vocab, hidden),)),
        layers=tuple(_decoder_layer(family, text, index) for index in range(text.number("num_hidden_layers"))),
        head=Layer(
            "head",
            (
                vector("final_layernorm", hidden),
                *family.head(text),
                embedding("output_layer", vocab, hidden),
            ),
        ),
        mtp=tuple(_mtp_layer(family, text, number, hidden) for number in range(mtp_layers)),
        notes=() if text is config else ("the language model only: other towers of the config are not counted",),
    )


def known_architectures() -> list[str]:
    """Every `model_type` that can be planned."""
    return sorted(FAMILIES)


def _family(config: Config) -> tuple[Family, Config]:
    text = config.text()
    for candidate in (config, text):
        if candidate.model_type in FAMILIES:
            return FAMILIES[candidate.model_type], text
    raise UnsupportedError(
        f"{config.name}: unknown architecture '{config.model_type or text.model_type}'. Its bytes would be a "
        f"guess. Known: {', '.join(known_architectures())}; or plan from a Megatron argument file.",
        architecture=config.model_type,
        known=known_architectures(),
    )


def _decoder_layer(family: Family, config: Config, index: int) -> Layer:
    block = family.layer(config, index)
    return Layer(f"decoder.layers.{index}", tuple(block.weights), block.buffers, index)


def _mtp_layer(family: Family, config: Config, number: int, hidden: int) -> Layer:
    block = family.mtp(config) if family.mtp else family.layer(config, config.number("num_hidden_layers") - 1)
    return mtp_layer(number, hidden, block.weights, block.buffers)


def mtp_layer(number: int, hidden: int, weights: list[Weight], buffers: tuple[Buffer, ...]) -> Layer:
    """A decoder layer behind `eh_proj [hidden, 2 hidden]` and two norms, with a norm of its own at the end
    (Megatron-Core `transformer/multi_token_prediction.py`)."""
    front = [
        vector("enorm", hidden),
        vector("hnorm", hidden),
        Weight("eh_proj", hidden, 2 * hidden, ROWS, module=Module.LINEAR),
    ]
    return Layer(f"mtp.layers.{number}", (*front, *weights, vector("final_layernorm", hidden)), buffers)


def _gqa(
    config: Config,
    *,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
    output_gate: bool = False,
    sinks: bool = False,
) -> list[Weight]:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    return GQA(
        hidden=hidden,
        heads=heads,
        kv_heads=config.number("num_key_value_heads", default=heads),
        head_dim=config.number("head_dim", default=head_dim or hidden // heads),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
        output_gate=output_gate,
        sinks=sinks,
    ).weights()


def _dense(config: Config, *, bias: bool = False) -> list[Weight]:
    return dense_mlp(config.number("hidden_size"), config.number("intermediate_size"), bias=bias)


def _llama(config: Config, index: int) -> Block:
    bias = config.flag("attention_bias")
    attention = _gqa(config, qkv_bias=bias, out_bias=bias)
    return Block(attention + _dense(config, bias=config.flag("mlp_bias")))


def _qwen2(config: Config, index: int) -> Block:
    return Block(_gqa(config, qkv_bias=True) + _dense(config))


def _qwen3(config: Config, index: int) -> Block:
    return Block(_qwen3_attention(config) + _dense(config))


def _qwen3_attention(config: Config) -> list[Weight]:
    bias = config.flag("attention_bias")
    return _gqa(config, head_dim=128, qkv_bias=bias, out_bias=bias, qk_norm=True)


def _gemma(config: Config, index: int) -> Block:
    bias = config.flag("attention_bias")
    return Block(_gqa(config, head_dim=256, qkv_bias=bias, out_bias=bias) + _dense(config))


def _gemma2(config: Config, index: int) -> Block:
    hidden = config.number("hidden_size")
    extra = [vector("post_attention_layernorm", hidden), vector("post_feedforward_layernorm", hidden)]
    block = _gemma(config, index)
    return Block(block.weights + extra)


def _gemma3(config: Config, index: int) -> Block:
    head_dim = config.number("head_dim", default=256)
    norms = [vector(f"self_attention.{side}_layernorm", head_dim) for side in "qk"]
    return Block(_gemma2(config, index).weights + norms)


def _mixtral(config: Config, index: int) -> Block:
    moe = MoE(
        hidden=config.number("hidden_size"),
        experts=config.number("num_local_experts", "num_experts"),
        ffn=config.number("intermediate_size"),
    )
    return Block(_gqa(config) + moe.weights())


def _is_sparse(config: Config, index: int) -> bool:
    dense = config.items("mlp_only_layers") or []
    return index not in dense and (index + 1) % config.number("decoder_sparse_step", default=1) == 0


def _qwen_moe(config: Config, *, shared: bool) -> list[Weight]:
    return MoE(
        hidden=config.number("hidden_size"),
        experts=config.number("num_experts", "num_local_experts"),
        ffn=config.number("moe_intermediate_size"),
        shared_ffn=config.number("shared_expert_intermediate_size") if shared else 0,
        shared_gate=shared,
    ).weights()


def _qwen2_moe(config: Config, index: int) -> Block:
    mlp = _qwen_moe(config, shared=True) if _is_sparse(config, index) else _dense(config)
    return Block(_gqa(config, qkv_bias=config.flag("qkv_bias", True)) + mlp)


def _qwen3_moe(config: Config, index: int) -> Block:
    mlp = _qwen_moe(config, shared=False) if _is_sparse(config, index) else _dense(config)
    bias = config.flag("attention_bias")
    return Block(_gqa(config, qkv_bias=bias, out_bias=bias, qk_norm=True) + mlp)


def _hybrid_attention(config: Config, index: int) -> list[Weight]:
    """Full attention with an output gate in every fourth layer, a gated delta net in the others."""
    types = config.items("layer_types")
    interval = config.number("full_attention_interval", default=4)
    full = types[index] == "full_attention" if types is not None else (index + 1) % interval == 0
    if full:
        bias = config.flag("attention_bias")
        return _gqa(config, head_dim=256, qkv_bias=bias, out_bias=bias, qk_norm=True, output_gate=True)
    return GatedDeltaNet(
        hidden=config.number("hidden_size"),
        key_heads=config.number("linear_num_key_heads", default=16),
        value_heads=config.number("linear_num_value_heads", default=32),
        key_dim=config.number("linear_key_head_dim", default=128),
        value_dim=config.number("linear_value_head_dim", default=128),
        kernel=config.number("linear_conv_kernel_dim", default=4),
    ).weights()


def _qwen3_5(config: Config, index: int) -> Block:
    return Block(_hybrid_attention(config, index) + _dense(config))


def _qwen3_5_moe(config: Config, index: int) -> Block:
    return Block(_hybrid_attention(config, index) + _qwen_moe(config, shared=True))


def _qwen3_next(config: Config, index: int) -> Block:
    mlp = _qwen_moe(config, shared=True) if _is_sparse(config, index) else _dense(config)
    return Block(_hybrid_attention(config, index) + mlp)


def _gpt_oss(config: Config, index: int) -> Block:
    bias = config.flag("attention_bias", True)
    moe = MoE(
        hidden=config.number("hidden_size"),
        experts=config.number("num_local_experts", "num_experts"),
        ffn=config.number("intermediate_size"),
        router_bias=True,
        expert_bias=True,
    )
    attention = _gqa(config, head_dim=64, qkv_bias=bias, out_bias=bias, sinks=True)
    return Block(attention + moe.weights())


def _deepseek_mlp(config: Config, index: int, *, first_dense: int) -> Block:
    types = config.items("mlp_layer_types")
    if types is not None:
        dense = types[index] == "dense"
    else:
        dense = index < config.number("first_k_dense_replace", default=first_dense)
    if dense:
        return Block(_dense(config))
    ffn = config.number("moe_intermediate_size")
    moe = MoE(
        hidden=config.number("hidden_size"),
        experts=config.number("n_routed_experts", "num_local_experts", "num_experts"),
        ffn=ffn,
        shared_ffn=ffn * config.number("n_shared_experts", default=1),
        balance_bias=True,
    )
    return Block(moe.weights(), moe.buffers())


def _glm4_moe(config: Config, index: int) -> Block:
    attention = _gqa(config, qkv_bias=config.flag("attention_bias"), qk_norm=config.flag("use_qk_norm"))
    mlp = _deepseek_mlp(config, index, first_dense=1)
    return Block(attention + mlp.weights, mlp.buffers)


def _mla(config: Config, *, absorbed: bool = False, indexer: Indexer | None = None) -> list[Weight]:
    return MLA(
        hidden=config.number("hidden_size"),
        heads=config.number("num_attention_heads"),
        q_lora=config.optional("q_lora_rank"),
        kv_lora=config.number("kv_lora_rank"),
        nope=config.number("qk_nope_head_dim"),
        rope=config.number("qk_rope_head_dim"),
        value_dim=config.number("v_head_dim"),
        down_bias=config.flag("attention_bias"),
        absorbed=absorbed,
        indexer=indexer,
    ).weights()


def _deepseek_v3(config: Config, index: int) -> Block:
    mlp = _deepseek_mlp(config, index, first_dense=3)
    return Block(_mla(config) + mlp.weights, mlp.buffers)


def _glm4_moe_lite(config: Config, index: int) -> Block:
    mlp = _deepseek_mlp(config, index, first_dense=1)
    return Block(_mla(config) + mlp.weights, mlp.buffers)


def _indexer(config: Config) -> Indexer:
    return Indexer(
        hidden=config.number("hidden_size"),
        q_lora=config.number("q_lora_rank"),
        heads=config.number("index_n_heads"),
        head_dim=config.number("index_head_dim"),
    )


def _deepseek_v32(config: Config, index: int) -> Block:
    mlp = _deepseek_mlp(config, index, first_dense=3)
    return Block(_mla(config, absorbed=True, indexer=_indexer(config)) + mlp.weights, mlp.buffers)


def _glm_moe_dsa(config: Config, index: int) -> Block:
    """Layers whose indexer is "shared" reuse the choice of an earlier layer and have no indexer."""
    indexer = _indexer(config) if _runs_indexer(config, index) else None
    mlp = _deepseek_mlp(config, index, first_dense=3)
    return Block(_mla(config, absorbed=True, indexer=indexer) + mlp.weights, mlp.buffers)


def _runs_indexer(config: Config, index: int) -> bool:
    types = config.items("indexer_types")
    if types is not None:
        return bool(types[index] == "full")
    frequency = max(config.number("index_topk_freq", default=1), 1)
    offset = config.number("index_skip_topk_offset", default=2)
    return max(index - offset + 1, 0) % frequency == 0


def _deepseek_v4(config: Config, index: int) -> Block:
    hashed = index < _hash_layers(config)
    return _v4_block(config, v4_attention(config, compression_ratio(config, index)), hashed=hashed)


def _deepseek_v4_mtp(config: Config) -> Block:
    return _v4_block(config, v4_attention(config, 0), hashed=False)


def _hash_layers(config: Config) -> int:
    """How many leading layers route by a table of token ids instead of by a learned choice."""
    types = config.items("mlp_layer_types")
    return types.count("hash_moe") if types is not None else config.number("num_hash_layers", default=3)


def _v4_block(config: Config, attention: list[Weight], *, hashed: bool) -> Block:
    ffn = config.number("moe_intermediate_size")
    moe = MoE(
        hidden=config.number("hidden_size"),
        experts=config.number("n_routed_experts", "num_local_experts"),
        ffn=ffn,
        shared_ffn=ffn * config.number("n_shared_experts", default=1),
        balance_bias=not hashed,
    )
    choices = config.number("num_experts_per_tok", default=6)
    table = Buffer("mlp.router.tid2eid", 8 * config.number("vocab_size") * choices)
    weights = attention + hyper_connections(config) + moe.weights()
    return Block(weights, (table,) if hashed else moe.buffers())


FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family(_deepseek_v3),
    "deepseek_v32": Family(_deepseek_v32),
    "deepseek_v4": Family(_deepseek_v4, mtp=_deepseek_v4_mtp, head=hyper_head),
    "gemma": Family(_gemma, tied=True),
    "gemma2": Family(_gemma2, tied=True),
    "gemma3_text": Family(_gemma3, tied=True),
    "glm4_moe": Family(_glm4_moe),
    "glm4_moe_lite": Family(_glm4_moe_lite),
    "glm_moe_dsa": Family(_glm_moe_dsa),
    "gpt_oss": Family(_gpt_oss),
    "kimi_k2": Family(_deepseek_v3),
    "llama": Family(_llama),
    "mixtral": Family(_mixtral),
    "qwen2": Family(_qwen2),
    "qwen2_moe": Family(_qwen2_moe),
    "qwen3": Family(_qwen3),
    "qwen3_5_moe_text": Family(_qwen3_5_moe),
    "qwen3_5_text": Family(_qwen3_5),
    "qwen3_moe": Family(_qwen3_moe),
    "qwen3_next": Family(_qwen3_next),
}
