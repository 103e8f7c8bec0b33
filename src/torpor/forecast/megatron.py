"""From a Megatron-LM argument file to a model, a layout, a recipe and an optimizer.

The file is text or shell: anything with `--num-layers 32 ...` in it. Comments, line continuations, arrays and
`NAME=value` assignments with `$NAME` or `${NAME}` references are understood. Defaults are Megatron's own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torpor.errors import UnsupportedError, UsageError
from torpor.forecast.blocks import GQA, MLA, MoE, dense_mlp, embedding, vector
from torpor.forecast.families import Block, mtp_layer
from torpor.forecast.megatron_flags import INTEGERS, LISTS, SWITCHES, WORDS, is_harmless
from torpor.forecast.optimizers import Kind
from torpor.forecast.recipes import Format, Recompute
from torpor.forecast.shapes import Layer, Model, Weight

_WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_FP8_RECIPES = {
    "delayed": Format.FP8_DELAYED,
    "tensorwise": Format.FP8_CURRENT,
    "blockwise": Format.FP8_BLOCKWISE,
    "mxfp8": Format.MXFP8,
}
_CHECKPOINTED_MODULES = {"mlp", "moe", "shared_experts"}
_END = ";"
_REFERENCE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class MegatronPlan:
    """What an argument file asks for: the model, and the fields that it sets of each dataclass of a plan.

    `layout` has no `etp` unless the file has; Megatron's default is the tensor-parallel size in the end.
    """

    model: Model
    layout: dict[str, Any]
    recipe: dict[str, Any]
    optimizer: dict[str, Any]
    options: dict[str, Any]


def is_argument_file(source: str) -> bool:
    """Whether `source` is a file of Megatron arguments."""
    path = Path(source)
    return path.is_file() and path.suffix != ".json" and "--num-layers" in path.read_text(encoding="utf-8")


def read_arguments(source: str, ignore: Collection[str] = ()) -> MegatronPlan:
    """Read an argument file; flags named in `ignore` (without dashes) are skipped.

    Raises `UnsupportedError` with the names of flags that might change bytes and are not understood, and
    `UsageError` for values that cannot be read.
    """
    given = _Arguments(_parse(Path(source).read_text(encoding="utf-8"), source, ignore))
    if not given.on("bf16"):
        raise UnsupportedError(f"{source}: no --bf16. Actors with other parameter types are not known.")
    return MegatronPlan(
        _model(given, Path(source).stem),
        _layout(given),
        _recipe(given),
        _optimizer(given),
        {"cuda_graphs": _captures_graphs(given)},
    )


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Values by flag; a switch has an empty list."""

    values: dict[str, list[str]] = field(default_factory=dict)

    def on(self, switch: str) -> bool:
        return switch in self.values

    def word(self, flag: str, default: str) -> str:
        return self.values[flag][0] if flag in self.values else default

    def number(self, flag: str, default: int | None = None) -> int:
        if flag not in self.values:
            if default is None:
                raise UsageError(f"--{flag} is missing, the forecast needs it.", flag=flag)
            return default
        try:
            return int(self.values[flag][0])
        except ValueError as error:
            raise UsageError(f"--{flag} {self.values[flag][0]}: not a whole number.", flag=flag) from error

    def optional(self, flag: str) -> int | None:
        return self.number(flag) if flag in self.values else None


def _parse(text: str, source: str, ignore: Collection[str]) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    unknown: list[str] = []
    for flag, words in _flags(text):
        if flag in ignore or is_harmless(flag):
            continue
        if flag not in INTEGERS | WORDS | LISTS | SWITCHES:
            unknown.append(f"--{flag}")
            continue
        values[flag] = _values(flag, words, source)
    if unknown:
        raise UnsupportedError(
            f"{source}: {', '.join(sorted(unknown))} might change bytes and the forecast does not know how. "
            "Where one does not matter to you, say --ignore NAME.",
            flags=sorted(unknown),
        )
    return values


def _values(flag: str, words: list[str], source: str) -> list[str]:
    """The words that belong to a flag; what follows them in the file is somebody else's."""
    if flag in SWITCHES:
        return []
    found = words if flag in LISTS else words[:1]
    if not found or any("$" in word for word in found):
        raise UsageError(
            f"{source}: --{flag} {' '.join(words)}: no value here. Write it out, or assign the variable.",
            flag=flag,
        )
    return found


def _flags(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the words up to the next one or to the end of its array, variables filled in."""
    variables: dict[str, str] = {}
    flag, words = "", list[str]()
    for token in [*_tokens(text), _END]:
        assignment = _ASSIGNMENT.fullmatch(token)
        if assignment:
            variables[assignment[1]] = _fill(assignment[2], variables)
            continue
        word = _fill(token, variables)
        if not word.startswith("--") and word != _END:
            words.append(word)
            continue
        if flag:
            yield flag, words
        flag, _, value = word.removeprefix("--").removeprefix(_END).partition("=")
        words = [value] if value else []


def _tokens(text: str) -> Iterator[str]:
    """Shell words; the bracket that opens an array is left out, the one that closes it is an `_END`."""
    for token in shlex.split(text, comments=True):
        opened = re.sub(r"^\w+\+?=\(", "", token)
        closed = opened.removesuffix(")") if opened.count(")") > opened.count("(") else opened
        if closed:
            yield closed
        if closed != opened:
            yield _END


def _fill(word: str, variables: dict[str, str]) -> str:
    return _REFERENCE.sub(lambda match: variables.get(match[1] or match[2], match[0]), word)


def _model(given: _Arguments, name: str) -> Model:
    hidden = given.number("hidden-size")
    layers = given.number("num-layers")
    sparse = _sparse_layers(given, layers)
    blocks = [_block(given, sparse[index]) for index in range(layers)]
    mtp = range(given.number("mtp-num-layers", 0))
    vocab = given.number("vocab-size")
    model = Model(
        name=name,
        architecture="Megatron arguments",
        hidden=hidden,
        tied=not given.on("untie-embeddings-and-output-weights"),
        embedding=Layer("embedding", (embedding("word_embeddings", vocab, hidden), *_positions(given, hidden))),
        layers=tuple(
            Layer(f"decoder.layers.{index}", tuple(block.weights), block.buffers, index)
            for index, block in enumerate(blocks)
        ),
        head=Layer("head", (vector("final_layernorm", hidden), embedding("output_layer", vocab, hidden))),
        mtp=tuple(mtp_layer(number, hidden, blocks[-1].weights, blocks[-1].buffers) for number in mtp),
    )
    if given.word("normalization", "LayerNorm") == "LayerNorm":
        return model.map_weights(_with_norm_bias)
    return model


def _with_norm_bias(layer: Layer, weight: Weight) -> tuple[Weight, ...]:
    """LayerNorm has a bias beside each weight, RMSNorm has not."""
    if "norm" in weight.name.rsplit(".", 1)[-1] and weight.cols == 1:
        return weight, replace(weight, name=f"{weight.name}.bias")
    return (weight,)


def _positions(given: _Arguments, hidden: int) -> list[Weight]:
    """Learned positions are Megatron's default, and weights."""
    kind = given.word("position-embedding-type", "learned_absolute")
    if given.on("use-rotary-position-embeddings") or kind in ("rope", "mrope", "yarn", "none"):
        return []
    if kind == "relative":
        raise UnsupportedError("--position-embedding-type relative belongs to an architecture that is not known.")
    positions = given.number("max-position-embeddings")
    return [Weight("position_embeddings", positions, hidden)]


def _sparse_layers(given: _Arguments, layers: int) -> list[bool]:
    """Which layers have experts: every n-th (`--moe-layer-freq n`), or a list such as `([0]*3+[1]*58)`."""
    if not given.on("num-experts"):
        return [False] * layers
    text = given.word("moe-layer-freq", "1")
    if text.isdigit():
        return [index % int(text) == 0 for index in range(layers)]
    pattern = _pattern(text)
    if len(pattern) != layers:
        raise UsageError(f"--moe-layer-freq {text} describes {len(pattern)} layers, --num-layers is {layers}.")
    return pattern


def _pattern(text: str) -> list[bool]:
    """`([0]*3+[1]*58)` as booleans; sums of lists of 0 and 1, each perhaps times a number."""
    found: list[bool] = []
    for term in text.replace(" ", "").strip("()").split("+"):
        match = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d+))?", term)
        if match is None:
            raise UsageError(f"--moe-layer-freq {text}: a number or a sum such as ([0]*3+[1]*58) is needed.")
        found += [digit == "1" for digit in match[1].split(",")] * int(match[2] or 1)
    return found


def _block(given: _Arguments, sparse: bool) -> Block:
    attention = _mla(given) if given.on("multi-latent-attention") else _gqa(given)
    gated, bias = given.on("swiglu"), not given.on("disable-bias-linear")
    hidden = given.number("hidden-size")
    ffn = given.number("ffn-hidden-size", int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)
    if not sparse:
        return Block(attention + dense_mlp(hidden, ffn, bias=bias, gated=gated))
    shared = given.number("moe-shared-expert-intermediate-size", 0)
    if shared and bias:
        raise UnsupportedError("shared experts with biases are not known; add --disable-bias-linear.")
    moe = MoE(
        hidden=hidden,
        experts=given.number("num-experts"),
        ffn=given.number("moe-ffn-hidden-size", ffn),
        shared_ffn=shared,
        shared_gate=given.on("moe-shared-expert-gate"),
        router_bias=bias,
        expert_bias=bias,
        balance_bias=given.on("moe-router-enable-expert-bias"),
        gated=gated,
    )
    return Block(attention + moe.weights(), moe.buffers())


def _gqa(given: _Arguments) -> list[Weight]:
    hidden, heads = given.number("hidden-size"), given.number("num-attention-heads")
    bias = not given.on("disable-bias-linear")
    return GQA(
        hidden=hidden,
        heads=heads,
        kv_heads=given.number("num-query-groups", 1) if given.on("group-query-attention") else heads,
        head_dim=given.number("kv-channels", hidden // heads),
        output_gate=given.on("attention-output-gate"),
        qkv_bias=bias or given.on("add-qkv-bias"),
        out_bias=bias,
        qk_norm=given.on("qk-layernorm"),
        sinks=given.word("softmax-type", "vanilla") == "learnable",
    ).weights()


def _mla(given: _Arguments) -> list[Weight]:
    if not given.on("disable-bias-linear"):
        raise UnsupportedError("multi-latent attention with biases is not known; add --disable-bias-linear.")
    if not given.on("qk-layernorm"):
        raise UnsupportedError("multi-latent attention without --qk-layernorm is not known.")
    return MLA(
        hidden=given.number("hidden-size"),
        heads=given.number("num-attention-heads"),
        q_lora=given.optional("q-lora-rank"),
        kv_lora=given.number("kv-lora-rank", 512),
        nope=given.number("qk-head-dim", 128),
        rope=given.number("qk-pos-emb-head-dim", 64),
        value_dim=given.number("v-head-dim", 128),
    ).weights()


def _layout(given: _Arguments) -> dict[str, Any]:
    pp = given.number("pipeline-model-parallel-size", 1)
    found: dict[str, Any] = {
        "tp": given.number("tensor-model-parallel-size", 1),
        "pp": pp,
        "cp": given.number("context-parallel-size", 1),
        "ep": given.number("expert-model-parallel-size", 1),
        "vpp": _virtual_stages(given, pp),
        "first_layers": given.optional("decoder-first-pipeline-num-layers"),
        "last_layers": given.optional("decoder-last-pipeline-num-layers"),
        "embedding_in_split": given.on("account-for-embedding-in-pipeline-split"),
        "loss_in_split": given.on("account-for-loss-in-pipeline-split"),
        "distributed_optimizer": given.on("use-distributed-optimizer") or _is_layer_wise(given),
        "optimizer_instances": given.number("num-distributed-optimizer-instances", 1),
        "vocab_multiple": given.number("make-vocab-size-divisible-by", 128),
    }
    if given.on("expert-tensor-parallel-size"):
        found["etp"] = given.number("expert-tensor-parallel-size")
    return found


def _virtual_stages(given: _Arguments, pp: int) -> int:
    per_stage = given.optional("num-layers-per-virtual-pipeline-stage")
    if per_stage is None:
        return given.number("num-virtual-stages-per-pipeline-rank", 1)
    return given.number("num-layers") // pp // per_stage


def _recipe(given: _Arguments) -> dict[str, Any]:
    found: dict[str, Any] = {
        "format": _format(given),
        "primary_weights": given.on("fp8-param-gather") or given.on("fp4-param-gather"),
        "cache": not given.on("disable-parameter-transpose-cache"),
        "recompute": _recompute(given),
        "amax_history": given.number("fp8-amax-history-len", 1),
    }
    if given.on("first-last-layers-bf16"):
        found["first_layers_bf16"] = given.number("num-layers-at-start-in-bf16", 1)
        found["last_layers_bf16"] = given.number("num-layers-at-end-in-bf16", 1)
    if given.word("transformer-impl", "transformer_engine") == "local" and found["format"] is not Format.BF16:
        raise UsageError("--transformer-impl local has no low-precision recipes; leave out --fp8-format.")
    return found


def _format(given: _Arguments) -> Format:
    if given.on("fp4-format"):
        return Format.NVFP4
    if not given.on("fp8-format"):
        return Format.BF16
    recipe = given.word("fp8-recipe", "delayed")
    if recipe not in _FP8_RECIPES:
        raise UnsupportedError(f"--fp8-recipe {recipe} is not known. Known: {', '.join(_FP8_RECIPES)}.")
    return _FP8_RECIPES[recipe]


def _recompute(given: _Arguments) -> Recompute:
    granularity = given.word("recompute-granularity", "none")
    if granularity == "selective" and not _CHECKPOINTED_MODULES & set(given.values.get("recompute-modules", [])):
        return Recompute.NONE
    return Recompute(granularity)


def _optimizer(given: _Arguments) -> dict[str, Any]:
    name = given.word("optimizer", "adam").removeprefix("dist_")
    if name not in ("adam", "muon", "sgd"):
        raise UnsupportedError(f"--optimizer {name} is not known. Known: adam, muon, sgd.")
    aware = given.on("use-precision-aware-optimizer")
    offload = float(given.word("optimizer-offload-fraction", "1.0")) if given.on("optimizer-cpu-offload") else 0.0
    return {
        "kind": Kind.PRECISION_AWARE_ADAM if aware else Kind(name),
        "grad_bytes": 2 if given.on("grad-reduce-in-bf16") else 4,
        "exp_avg_bytes": _width(given, "exp-avg-dtype") if aware else 4,
        "exp_avg_sq_bytes": _width(given, "exp-avg-sq-dtype") if aware else 4,
        "sgd_momentum": float(given.word("sgd-momentum", "0.9")) > 0,
        "cpu_offload": offload,
    }


def _width(given: _Arguments, flag: str) -> int:
    word = given.word(flag, "fp32")
    if word not in _WIDTHS:
        raise UsageError(f"--{flag} {word} is not known. Known: {', '.join(_WIDTHS)}.", flag=flag)
    return _WIDTHS[word]


def _is_layer_wise(given: _Arguments) -> bool:
    return given.on("use-layer-wise-distributed-optimizer") or given.word("optimizer", "").startswith("dist_")


def _captures_graphs(given: _Arguments) -> bool:
    return (
        given.on("enable-cuda-graph")
        or given.on("external-cuda-graph")
        or given.word("cuda-graph-impl", "none") != "none"
    )
