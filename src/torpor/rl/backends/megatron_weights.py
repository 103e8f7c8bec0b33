"""Weights of a Llama-shaped model under Megatron-Core's names and under those of transformers, and back.

Megatron-Core keeps query, key and value in one matrix, one query group after the other, and gate and up of the
feed-forward in another; tensor parallelism cuts the first dimension of what is read from and the second of what
is written to the residual stream. Pure functions of tensors: nothing here imports Megatron.

Letters: `H` hidden width, `G` query groups (key-value heads), `R` query heads of one group, `D` width of a head,
`F` width of the feed-forward, `V` vocabulary, `P` tensor-parallel ranks. `...` is `H` for a weight, nothing for a bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from torpor.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron-Core 0.19.2 takes for granted of the scaling that it calls `rope_scaling`."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shape of a decoder with grouped attention and a gated feed-forward.

    Example: SmolLM2-135M is `Architecture(30, 576, 1536, 9, 3, 64, 49152, 8192, 100000.0, None, 1e-5, True, False,
    False)`.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    rope_factor: float | None
    """Of Llama 3's scaling of the rotary frequencies; None: they are not scaled."""
    norm_epsilon: float
    ties_embeddings: bool
    has_qk_norm: bool
    has_qkv_bias: bool

    @classmethod
    def of(cls, config: PretrainedConfig) -> Architecture:
        """The shape that a configuration of transformers describes.

        Raises:
            UnsupportedError: another kind of model, or one with something that is not converted.
        """
        _require_convertible(config)
        rope: Mapping[str, Any] = config.rope_parameters
        head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
        return cls(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_query_groups=config.num_key_value_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            rope_theta=float(rope["rope_theta"]),
            rope_factor=float(rope["factor"]) if rope["rope_type"] == "llama3" else None,
            norm_epsilon=config.rms_norm_eps,
            ties_embeddings=config.tie_word_embeddings,
            has_qk_norm=config.model_type == "qwen3",
            has_qkv_bias=config.model_type == "qwen2",
        )


def _require_convertible(config: PretrainedConfig) -> None:
    for key, value, known in _traits(config):
        if value not in known:
            raise UnsupportedError(
                f"the model's {key} is {value!r}: models with {' or '.join(map(repr, known))} are converted to Megatron"
            )


def _traits(config: PretrainedConfig) -> Iterator[tuple[str, Any, Sequence[Any]]]:
    """What decides whether a model can be converted: name, value, and the values that can."""
    yield "model_type", config.model_type, _MODEL_TYPES
    values = config.to_dict()
    yield "hidden_act", values.get("hidden_act"), ("silu",)
    yield "attention_bias", values.get("attention_bias", False), (False,)
    yield "mlp_bias", values.get("mlp_bias", False), (False,)
    yield "use_sliding_window", values.get("use_sliding_window", False), (False,)
    if config.model_type == "mistral":
        yield "sliding_window", values.get("sliding_window"), (None,)
    rope = values["rope_parameters"]
    yield "rope_type", rope["rope_type"], ("default", "llama3")
    if rope["rope_type"] == "llama3":
        for key, value in _LLAMA3_ROPE.items():
            yield key, rope[key], (value,)


class Layout(Protocol):
    """How several tensors of transformers lie in one of Megatron-Core."""

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """The one, of all tensor-parallel ranks together."""

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        """The several again: `split(fuse(parts))` equals `parts`."""


@dataclass(frozen=True, slots=True)
class Plain:
    """The same tensor on both sides."""

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        (whole,) = parts
        return whole

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        return (whole,)


@dataclass(frozen=True, slots=True)
class Qkv:
    """`q [G*R*D, ...]`, `k [G*D, ...]` and `v [G*D, ...]` as `[G*(R+2)*D, ...]`: for each group its R queries, key,
    value."""

    num_groups: int
    queries_per_group: int
    head_dim: int

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.unflatten(0, (self.num_groups, -1)) for part in parts], dim=1).flatten(0, 1)  # type: ignore[no-untyped-call]

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        widths = [self.queries_per_group * self.head_dim, self.head_dim, self.head_dim]
        grouped = whole.unflatten(0, (self.num_groups, -1))  # type: ignore[no-untyped-call]
        return [part.flatten(0, 1) for part in grouped.split(widths, dim=1)]


@dataclass(frozen=True, slots=True)
class GateUp:
    """`gate [F, ...]` and `up [F, ...]` as `[2*F, ...]`: for each tensor-parallel rank its gate, then its up."""

    num_ranks: int

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.unflatten(0, (self.num_ranks, -1)) for part in parts], dim=1).flatten(0, 1)  # type: ignore[no-untyped-call]

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        by_rank = whole.unflatten(0, (self.num_ranks, 2, -1))  # type: ignore[no-untyped-call]
        return [by_rank[:, index].flatten(0, 1) for index in (0, 1)]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of Megatron-Core, and what it is called and how it is cut up in transformers."""

    name: str
    parts: tuple[str, ...]
    layout: Layout = Plain()
    cut_dim: int | None = None
    """The dimension that tensor parallelism cuts; None: every rank has the whole."""

    def shard(self, whole: Tensor, rank: int, num_ranks: int) -> Tensor:
        """What one tensor-parallel rank holds."""
        return whole if self.cut_dim is None else whole.chunk(num_ranks, self.cut_dim)[rank]

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole, from what the ranks hold."""
        return shards[0] if self.cut_dim is None or len(shards) == 1 else torch.cat(list(shards), self.cut_dim)


def parameters_of(architecture: Architecture, num_ranks: int, *, fused_norms: bool) -> Iterator[Parameter]:
    """All parameters, in the order of the model.

    Args:
        num_ranks: tensor-parallel ranks.
        fused_norms: whether norms belong to the linear layer behind them, as in TransformerEngine's layers.
    """
    yield Parameter("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), cut_dim=0)
    for index in range(architecture.num_layers):
        yield from _layer(architecture, index, num_ranks, fused_norms)
    yield Parameter("decoder.final_layernorm.weight", ("model.norm.weight",))
    if not architecture.ties_embeddings:
        yield Parameter("output_layer.weight", ("lm_head.weight",), cut_dim=0)


def _layer(architecture: Architecture, index: int, num_ranks: int, fused_norms: bool) -> Iterator[Parameter]:
    ours, theirs = f"decoder.layers.{index}", f"model.layers.{index}"
    groups = architecture.num_query_groups
    qkv = Qkv(groups, architecture.num_heads // groups, architecture.head_dim)
    attention_norm = "self_attention.linear_qkv.layer_norm_weight" if fused_norms else "input_layernorm.weight"
    mlp_norm = "mlp.linear_fc1.layer_norm_weight" if fused_norms else "pre_mlp_layernorm.weight"
    yield Parameter(f"{ours}.{attention_norm}", (f"{theirs}.input_layernorm.weight",))
    for kind in ("weight", "bias") if architecture.has_qkv_bias else ("weight",):
        yield Parameter(
            f"{ours}.self_attention.linear_qkv.{kind}",
            tuple(f"{theirs}.self_attn.{letter}_proj.{kind}" for letter in "qkv"),
            qkv,
            cut_dim=0,
        )
    if architecture.has_qk_norm:
        for letter in "qk":
            yield Parameter(
                f"{ours}.self_attention.{letter}_layernorm.weight", (f"{theirs}.self_attn.{letter}_norm.weight",)
            )
    yield Parameter(f"{ours}.self_attention.linear_proj.weight", (f"{theirs}.self_attn.o_proj.weight",), cut_dim=1)
    yield Parameter(f"{ours}.{mlp_norm}", (f"{theirs}.post_attention_layernorm.weight",))
    yield Parameter(
        f"{ours}.mlp.linear_fc1.weight",
        (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight"),
        GateUp(num_ranks),
        cut_dim=0,
    )
    yield Parameter(f"{ours}.mlp.linear_fc2.weight", (f"{theirs}.mlp.down_proj.weight",), cut_dim=1)


def to_megatron(
    weights: Mapping[str, Tensor], parameters: Sequence[Parameter], *, rank: int = 0, num_ranks: int = 1
) -> Iterator[tuple[str, Tensor]]:
    """What one tensor-parallel rank holds, under Megatron-Core's names.

    Raises:
        UsageError: a weight is missing.
    """
    missing = [part for parameter in parameters for part in parameter.parts if part not in weights]
    if missing:
        raise UsageError(f"the weights lack {missing[0]} and {len(missing) - 1} more", missing=missing)
    for parameter in parameters:
        whole = parameter.layout.fuse([weights[part] for part in parameter.parts])
        yield parameter.name, parameter.shard(whole, rank, num_ranks)


def to_transformers(parameter: Parameter, shards: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights that one parameter consists of, whole and contiguous, from what the tensor-parallel ranks hold."""
    parts = parameter.layout.split(parameter.join(shards))
    return ((name, part.contiguous()) for name, part in zip(parameter.parts, parts, strict=True))
