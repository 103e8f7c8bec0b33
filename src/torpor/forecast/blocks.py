"""The blocks that the model families are built from, with Megatron-Core's names and splits.

Shapes `[N, K]` are out features x in features of the whole model. Sources: Megatron-Core 0.19
`models/gpt/gpt_layer_specs.py`, `transformer/attention.py`, `transformer/multi_latent_attention.py`,
`transformer/moe/`; for blocks that Megatron-Core does not have, the class in transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torpor.forecast.shapes import Buffer, Module, Split, Weight

ROWS, COLS, DUPLICATED = Split.ROWS, Split.COLS, Split.NONE


def vector(name: str, length: int, *, split: Split = DUPLICATED, fp32: bool = False) -> Weight:
    """A norm, bias or scale."""
    return Weight(name, length, split=split, fp32=fp32)


@dataclass(frozen=True, slots=True, kw_only=True)
class GQA:
    """Grouped-query attention; example: `GQA(hidden=4096, heads=32, kv_heads=8, head_dim=128)`."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    output_gate: bool = False
    """The query projection also makes a gate, one value for each query value."""
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and of k."""
    sinks: bool = False

    def weights(self) -> list[Weight]:
        """`linear_qkv [(heads (1 + gate) + 2 kv_heads) head_dim, hidden]`, `linear_proj`, and vectors."""
        query_heads = self.heads * (2 if self.output_gate else 1)
        qkv_rows = (query_heads + 2 * self.kv_heads) * self.head_dim
        out_cols = self.heads * self.head_dim
        found = [
            vector("self_attention.linear_qkv.layer_norm_weight", self.hidden),
            Weight(
                "self_attention.linear_qkv",
                qkv_rows,
                self.hidden,
                ROWS,
                module=Module.LAYERNORM_LINEAR,
                heads=self.heads,
                kv_groups=self.kv_heads,
            ),
        ]
        if self.qkv_bias:
            found.append(vector("self_attention.linear_qkv.bias", qkv_rows, split=ROWS))
        if self.qk_norm:
            found += [vector(f"self_attention.{side}_layernorm", self.head_dim) for side in "qk"]
        if self.sinks:
            found.append(vector("self_attention.softmax_offset", self.heads, split=ROWS, fp32=True))
        found.append(
            Weight(
                "self_attention.linear_proj",
                self.hidden,
                out_cols,
                COLS,
                module=Module.LINEAR,
                heads=self.heads,
            )
        )
        if self.out_bias:
            found.append(vector("self_attention.linear_proj.bias", self.hidden))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """The lightning indexer of DeepSeek sparse attention; every weight is duplicated over TP."""

    hidden: int
    q_lora: int
    heads: int
    head_dim: int

    def weights(self) -> list[Weight]:
        """`wq_b` and `wk` run as TransformerEngine linears; `weights_proj` is read around its module."""
        prefix = "self_attention.indexer"
        return [
            Weight(f"{prefix}.wq_b", self.heads * self.head_dim, self.q_lora, module=Module.LINEAR),
            Weight(f"{prefix}.wk", self.head_dim, self.hidden, module=Module.LINEAR),
            vector(f"{prefix}.k_norm.weight", self.head_dim),
            vector(f"{prefix}.k_norm.bias", self.head_dim),
            Weight(f"{prefix}.weights_proj", self.heads, self.hidden),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MLA:
    """Multi-head latent attention; example: `MLA(hidden=7168, heads=128, q_lora=1536, kv_lora=512, nope=128,
    rope=64, value_dim=128)`."""

    hidden: int
    heads: int
    q_lora: int | None
    kv_lora: int
    nope: int
    rope: int
    value_dim: int
    down_bias: bool = False
    absorbed: bool = False
    """The implementation multiplies `kv_up` into its neighbours and reads it around its module: no cache."""
    indexer: Indexer | None = None

    def weights(self) -> list[Weight]:
        """Down projections are duplicated over TP, up projections split by rows, the output by columns."""
        found = [vector("input_layernorm", self.hidden), *self._query()]
        kv_rows = self.kv_lora + self.rope
        found.append(Weight("self_attention.linear_kv_down_proj", kv_rows, self.hidden, module=Module.LINEAR))
        if self.down_bias:
            found.append(vector("self_attention.linear_kv_down_proj.bias", kv_rows))
        found += [
            vector("self_attention.linear_kv_up_proj.layer_norm_weight", self.kv_lora),
            Weight(
                "self_attention.linear_kv_up_proj",
                self.heads * (self.nope + self.value_dim),
                self.kv_lora,
                ROWS,
                module=Module.PLAIN if self.absorbed else Module.LAYERNORM_LINEAR,
                heads=self.heads,
            ),
        ]
        if self.indexer:
            found += self.indexer.weights()
        found.append(
            Weight(
                "self_attention.linear_proj",
                self.hidden,
                self.heads * self.value_dim,
                COLS,
                module=Module.LINEAR,
                heads=self.heads,
            )
        )
        if self.down_bias:
            found.append(vector("self_attention.linear_proj.bias", self.hidden))
        return found

    def _query(self) -> list[Weight]:
        rows = self.heads * (self.nope + self.rope)
        if self.q_lora is None:
            name = "self_attention.linear_q_proj"
            return [Weight(name, rows, self.hidden, ROWS, module=Module.LINEAR, heads=self.heads)]
        found = [Weight("self_attention.linear_q_down_proj", self.q_lora, self.hidden, module=Module.LINEAR)]
        if self.down_bias:
            found.append(vector("self_attention.linear_q_down_proj.bias", self.q_lora))
        up = "self_attention.linear_q_up_proj"
        return [
            *found,
            vector(f"{up}.layer_norm_weight", self.q_lora),
            Weight(up, rows, self.q_lora, ROWS, module=Module.LAYERNORM_LINEAR, heads=self.heads),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet:
    """Linear attention of Qwen3.5 as `torch.nn.Linear` modules, duplicated over TP and never quantized.

    Source: transformers `Qwen3_5GatedDeltaNet`.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    def weights(self) -> list[Weight]:
        """Projections to q, k, v, the gate z and the two scalars b and a; a depthwise convolution; output."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        prefix = "self_attention"
        return [
            vector("input_layernorm", self.hidden),
            Weight(f"{prefix}.in_proj_qkv", 2 * keys + values, self.hidden),
            Weight(f"{prefix}.in_proj_z", values, self.hidden),
            Weight(f"{prefix}.in_proj_b", self.value_heads, self.hidden),
            Weight(f"{prefix}.in_proj_a", self.value_heads, self.hidden),
            Weight(f"{prefix}.conv1d", 2 * keys + values, self.kernel),
            vector(f"{prefix}.dt_bias", self.value_heads),
            vector(f"{prefix}.A_log", self.value_heads, fp32=True),
            vector(f"{prefix}.norm", self.value_dim),
            Weight(f"{prefix}.out_proj", self.hidden, values),
        ]


def dense_mlp(hidden: int, ffn: int, *, bias: bool = False, gated: bool = True) -> list[Weight]:
    """An MLP with its norm in front: `linear_fc1 [2 ffn or ffn, hidden]`, `linear_fc2 [hidden, ffn]`."""
    fc1_rows = 2 * ffn if gated else ffn
    found = [
        vector("mlp.linear_fc1.layer_norm_weight", hidden),
        Weight("mlp.linear_fc1", fc1_rows, hidden, ROWS, module=Module.LAYERNORM_LINEAR),
        Weight("mlp.linear_fc2", hidden, ffn, COLS, module=Module.LINEAR),
    ]
    if bias:
        found += [vector("mlp.linear_fc1.bias", fc1_rows, split=ROWS), vector("mlp.linear_fc2.bias", hidden)]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """Routed experts as grouped linears, and shared ones: `MoE(hidden=2048, experts=128, ffn=768)`."""

    hidden: int
    experts: int
    ffn: int
    shared_ffn: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    """The experts' linears have biases (gpt-oss)."""
    balance_bias: bool = False
    """The router has a bias that is adjusted outside the optimizer: a buffer."""
    gated: bool = True

    def weights(self) -> list[Weight]:
        """Router; per expert `fc1 [2 ffn or ffn, hidden]` and `fc2 [hidden, ffn]`; shared `fc1`, `fc2`."""
        halves = 2 if self.gated else 1
        found = [
            vector("pre_mlp_layernorm", self.hidden),
            Weight("mlp.router", self.experts, self.hidden),
        ]
        if self.router_bias:
            found.append(vector("mlp.router.bias", self.experts))
        found += self._routed()
        if self.shared_ffn:
            found += [
                Weight(
                    "mlp.shared_experts.linear_fc1",
                    halves * self.shared_ffn,
                    self.hidden,
                    ROWS,
                    module=Module.LINEAR,
                ),
                Weight("mlp.shared_experts.linear_fc2", self.hidden, self.shared_ffn, COLS, module=Module.LINEAR),
            ]
        if self.shared_gate:
            found.append(Weight("mlp.shared_experts.gate", 1, self.hidden))
        return found

    def _routed(self) -> list[Weight]:
        def expert(name: str, rows: int, cols: int, split: Split, module: Module) -> Weight:
            name = f"mlp.experts.{name}"
            return Weight(name, rows, cols, split, count=self.experts, expert=True, module=module)

        fc1_rows = 2 * self.ffn if self.gated else self.ffn
        found = [
            expert("linear_fc1", fc1_rows, self.hidden, ROWS, Module.GROUPED_LINEAR),
            expert("linear_fc2", self.hidden, self.ffn, COLS, Module.GROUPED_LINEAR),
        ]
        if self.expert_bias:
            found += [
                expert("linear_fc1.bias", fc1_rows, 1, ROWS, Module.PLAIN),
                expert("linear_fc2.bias", self.hidden, 1, DUPLICATED, Module.PLAIN),
            ]
        return found

    def buffers(self) -> tuple[Buffer, ...]:
        """fp32 `expert_bias` and `local_tokens_per_expert` of the router (Megatron-Core `moe/router.py`)."""
        if not self.balance_bias:
            return ()
        return (
            Buffer("mlp.router.expert_bias", 4 * self.experts),
            Buffer("mlp.router.local_tokens_per_expert", 4 * self.experts),
        )


def embedding(name: str, vocab: int, hidden: int) -> Weight:
    """Word embedding or output layer `[vocab, hidden]`, rows split over TP."""
    return Weight(name, vocab, hidden, ROWS, embedding=True)
