"""DeepSeek-V4's own blocks: latent attention with compressors, and hyper-connections between layers.

Shapes from transformers `modeling_deepseek_v4.py`. What is quantized follows a public Megatron
implementation: `wo_a` is read around its module, the compressors are `torch.nn.Linear`, and the indexer's
head weights are held in bf16 by its precision config, so none of these is in a cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from torpor.errors import UsageError
from torpor.forecast.blocks import COLS, ROWS, vector
from torpor.forecast.config import Config
from torpor.forecast.shapes import Module, Weight

_RATIO_OF_TYPE = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
_INDEXED_RATIO = 4


def compression_ratio(config: Config, index: int) -> int:
    """Tokens that one compressed key/value stands for in a layer; 0 where attention only slides.

    Read from `layer_types`, or from the `compress_ratios` of the original checkpoints. Raises `UsageError`
    for a config with neither.
    """
    types, ratios = config.items("layer_types"), config.items("compress_ratios")
    if types is not None:
        return _RATIO_OF_TYPE[types[index]]
    if ratios is not None:
        return int(ratios[index])
    raise UsageError(f"{config.name}: 'layer_types' or 'compress_ratios' is needed.", config=config.name)


def v4_attention(config: Config, ratio: int) -> list[Weight]:
    """Attention with one key/value head and a grouped output projection; compressors unless `ratio` is 0."""
    return _V4Attention(
        hidden=config.number("hidden_size"),
        heads=config.number("num_attention_heads"),
        head_dim=config.number("head_dim"),
        q_lora=config.number("q_lora_rank"),
        o_groups=config.number("o_groups"),
        o_lora=config.number("o_lora_rank"),
        index_heads=config.number("index_n_heads"),
        index_dim=config.number("index_head_dim"),
        ratio=ratio,
    ).weights()


def hyper_connections(config: Config) -> list[Weight]:
    """The mixing of n = `hc_mult` residual streams before attention and MLP: `[(2 + n) n, n hidden]`."""
    streams, hidden = config.number("hc_mult", default=4), config.number("hidden_size")
    mixes = (2 + streams) * streams
    found = []
    for place in ("self_attention", "mlp"):
        found += [
            Weight(f"{place}.hyper_connection.fn", mixes, streams * hidden),
            vector(f"{place}.hyper_connection.base", mixes),
            vector(f"{place}.hyper_connection.scale", 3),
        ]
    return found


def hyper_head(config: Config) -> list[Weight]:
    """The last mixing, which makes one stream of `hc_mult`."""
    streams, hidden = config.number("hc_mult", default=4), config.number("hidden_size")
    return [
        Weight("hyper_head.fn", streams, streams * hidden),
        vector("hyper_head.base", streams),
        vector("hyper_head.scale", 1),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _V4Attention:
    hidden: int
    heads: int
    head_dim: int
    q_lora: int
    o_groups: int
    o_lora: int
    index_heads: int
    index_dim: int
    ratio: int

    def weights(self) -> list[Weight]:
        name, group_cols = "self_attention", self.heads * self.head_dim // self.o_groups
        return [
            vector("input_layernorm", self.hidden),
            Weight(f"{name}.wq_a", self.q_lora, self.hidden, module=Module.LINEAR),
            vector(f"{name}.q_norm", self.q_lora),
            Weight(
                f"{name}.wq_b",
                self.heads * self.head_dim,
                self.q_lora,
                ROWS,
                module=Module.LINEAR,
                heads=self.heads,
            ),
            Weight(f"{name}.wkv", self.head_dim, self.hidden, module=Module.LINEAR),
            vector(f"{name}.kv_norm", self.head_dim),
            vector(f"{name}.attn_sink", self.heads, split=ROWS, fp32=True),
            *self._compressors(),
            Weight(f"{name}.wo_a", self.o_groups * self.o_lora, group_cols, ROWS, heads=self.o_groups),
            Weight(f"{name}.wo_b", self.hidden, self.o_groups * self.o_lora, COLS, module=Module.LINEAR),
        ]

    def _compressors(self) -> list[Weight]:
        if self.ratio == 0:
            return []
        name = "self_attention.compressor"
        if self.ratio != _INDEXED_RATIO:
            return self._compressor(name, self.head_dim, self.head_dim)
        indexer = "self_attention.indexer"
        return [
            *self._compressor(name, 2 * self.head_dim, self.head_dim),
            *self._compressor(f"{indexer}.compressor", 2 * self.index_dim, self.index_dim),
            Weight(f"{indexer}.linear_wq_b", self.index_heads * self.index_dim, self.q_lora, module=Module.LINEAR),
            Weight(f"{indexer}.linear_weights_proj", self.index_heads, self.hidden),
        ]

    def _compressor(self, name: str, width: int, head_dim: int) -> list[Weight]:
        return [
            Weight(f"{name}.wkv", width, self.hidden),
            Weight(f"{name}.wgate", width, self.hidden),
            Weight(f"{name}.ape", self.ratio, width, fp32=True),
            vector(f"{name}.norm", head_dim),
        ]
