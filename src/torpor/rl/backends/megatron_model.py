"""Megatron-Core's parts of an actor: process groups, a model wrapped for data parallelism, its optimizer.

Read and run with Megatron-Core 0.19.2 and TransformerEngine 2.20.2. Neither is imported before it is used.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torpor.errors import UnsupportedError
from torpor.rl.backends.megatron_weights import Architecture
from torpor.rl.config import MegatronConfig, OptimizerConfig

Allocation = Callable[[], AbstractContextManager[None]]
"""What decides, from `with` to its end, in which memory tensors are allocated."""


@dataclass(frozen=True, slots=True)
class _Recipe:
    """A precision: how Megatron-Core is told, and what TransformerEngine asks of shapes and of the card."""

    options: Mapping[str, Any]
    multiple: int
    """Both dimensions of a quantized weight, and the tokens of a microbatch, are multiples of it."""
    check: str | None
    """The function of `transformer_engine.pytorch.quantization` that knows whether the card can."""


_DELAYED = {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
_RECIPES = {
    "bf16": _Recipe({}, 1, None),
    "blockwise": _Recipe({"fp8": "e4m3", "fp8_recipe": "blockwise"}, 128, "is_fp8_block_scaling_available"),
    "current": _Recipe({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, 16, "is_fp8_available"),
    "delayed": _Recipe({"fp8": "hybrid", "fp8_recipe": "delayed", **_DELAYED}, 16, "is_fp8_available"),
    "mxfp8": _Recipe({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 32, "is_mxfp8_available"),
    "nvfp4": _Recipe({"fp4": "e2m1", "fp4_recipe": "nvfp4"}, 32, "is_nvfp4_available"),
}


@dataclass(slots=True)
class Parts:
    """A model and its optimizer as Megatron-Core trains them."""

    chunk: Any
    """`DistributedDataParallel` around `Float16Module` around `GPTModel`."""
    optimizer: Any
    """A `MegatronOptimizer`."""

    @property
    def model(self) -> Any:
        """The `GPTModel`."""
        return self.chunk.module.module


def token_multiple(config: MegatronConfig) -> int:
    """The tokens of a microbatch are a multiple of it."""
    return _RECIPES[config.precision].multiple


def require_megatron() -> None:
    """
    Raises:
        UnsupportedError: Megatron-Core, or a package that it needs, is not installed.
    """
    try:
        import megatron.core  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"backend = megatron needs Megatron-Core ({error}): pip install megatron-core"
        ) from error


def start_process_groups(config: MegatronConfig, seed: int) -> None:
    """Process groups and random number trackers, where nobody has made them yet.

    Without a launcher (no `RANK` in the environment) this process is alone.

    Raises:
        UnsupportedError: pipeline parallelism.
    """
    if config.pipeline_model_parallel_size > 1:
        raise UnsupportedError(
            f"pipeline_model_parallel_size = {config.pipeline_model_parallel_size}: this backend cuts layers, not the "
            "stack of them; set it to 1 and raise tensor_model_parallel_size"
        )
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        _start_distributed()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            config.tensor_model_parallel_size,
            config.pipeline_model_parallel_size,
            create_gloo_process_groups=dist.get_world_size() > 1,
        )
    if not get_cuda_rng_tracker().is_initialized():
        model_parallel_cuda_manual_seed(seed)


def _start_distributed() -> None:
    names = "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ:
        dist.init_process_group(names)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined] # public, but not in `__all__`
        dist.init_process_group(names, store=store, rank=0, world_size=1)
    atexit.register(dist.destroy_process_group)


def require_shapes(architecture: Architecture, config: MegatronConfig) -> None:
    """
    Raises:
        UnsupportedError: the precision needs TransformerEngine, another card, or other shapes; or tensor parallelism
            does not divide the model.
    """
    _require_divisible(architecture, config.tensor_model_parallel_size)
    recipe = _RECIPES[config.precision]
    if recipe.check is None:
        return
    if config.transformer_impl != "transformer_engine":
        raise UnsupportedError(
            f"precision = {config.precision} needs transformer_impl = transformer_engine, not {config.transformer_impl}"
        )
    for name, size in _quantized_sizes(architecture, config):
        if size % recipe.multiple:
            raise UnsupportedError(
                f"precision = {config.precision} needs multiples of {recipe.multiple}, and the model's {name} is "
                f"{size}: choose bf16, or current or delayed, which need multiples of 16"
            )
    from transformer_engine.pytorch import quantization

    is_available, reason = getattr(quantization, recipe.check)(return_reason=True)
    if not is_available:
        raise UnsupportedError(f"precision = {config.precision}: {reason}")


def _require_divisible(architecture: Architecture, ranks: int) -> None:
    for name, size in (
        ("key-value heads", architecture.num_query_groups),
        ("feed-forward width", architecture.ffn_hidden_size),
        ("vocabulary", architecture.vocab_size),
    ):
        if size % ranks:
            raise UnsupportedError(f"tensor_model_parallel_size = {ranks} does not divide the model's {name}, {size}")


def _quantized_sizes(architecture: Architecture, config: MegatronConfig) -> Iterator[tuple[str, int]]:
    """The dimensions of quantized weights, of one tensor-parallel rank."""
    ranks = config.tensor_model_parallel_size
    query_width = architecture.num_heads * architecture.head_dim
    yield "hidden width", architecture.hidden_size
    yield "feed-forward width", architecture.ffn_hidden_size // ranks
    yield "query width", query_width // ranks
    key_value_width = 2 * architecture.num_query_groups * architecture.head_dim
    yield "width of queries, keys and values", (query_width + key_value_width) // ranks


def build(
    architecture: Architecture,
    config: MegatronConfig,
    optimizer: OptimizerConfig,
    device: torch.device,
    memory: Allocation,
    extend: Callable[[Any], None],
    fill: Callable[[nn.Module], None] | None,
    seed: int,
) -> Parts:
    """Model and optimizer on `device`.

    Args:
        memory: what they are allocated in.
        extend: adds modules to the `GPTModel`, which keep the precision that they have.
        fill: sets the parameters of the model, before masters are made from them; None leaves them random.
        seed: random parameters follow from it alone: for them Megatron-Core's trackers start anew.

    Raises:
        UnsupportedError: TransformerEngine, or the package for the optimizer, is not installed.
    """
    if fill is None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(seed)
    with memory():
        model = _model(architecture, config, device, initialize=fill is None)
        extend(model.module)
        if fill is not None:
            fill(model)
        chunk = _wrap(model, optimizer_uses_shards(config, optimizer))
        parts = Parts(chunk, _optimizer(chunk, config, optimizer))
    _connect(parts)
    return parts


def _model(architecture: Architecture, config: MegatronConfig, device: torch.device, *, initialize: bool) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.module import Float16Module

    if config.transformer_impl == "transformer_engine":
        _require_transformer_engine()
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=architecture.has_qk_norm)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=architecture.has_qk_norm, normalization="RMSNorm")
    transformer = _transformer_config(architecture, config, initialize=initialize)
    model = GPTModel(
        transformer,
        spec,
        architecture.vocab_size,
        architecture.max_positions,
        share_embeddings_and_output_weights=architecture.ties_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
        rope_scaling=architecture.rope_factor is not None,
        rope_scaling_factor=architecture.rope_factor or 1.0,
    ).to(device)
    return Float16Module(transformer, model)


def _require_transformer_engine() -> None:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"transformer_impl = transformer_engine needs TransformerEngine ({error}): "
            "pip install transformer-engine[pytorch], or set transformer_impl = local"
        ) from error


def _transformer_config(architecture: Architecture, config: MegatronConfig, *, initialize: bool) -> Any:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    recompute: dict[str, Any] = {}
    if config.recompute_granularity != "none":
        recompute["recompute_granularity"] = config.recompute_granularity
    if config.recompute_granularity == "full":
        recompute |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_query_groups,
        kv_channels=architecture.head_dim,
        layernorm_epsilon=architecture.norm_epsilon,
        qk_layernorm=architecture.has_qk_norm,
        add_qkv_bias=architecture.has_qkv_bias,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        attention_backend=AttnBackend[config.attention_backend],
        disable_parameter_transpose_cache=config.disable_parameter_transpose_cache,
        perform_initialization=initialize,
        # Losses are weighed by the whole batch already: gradients are summed over the ranks, not averaged.
        calculate_per_token_loss=True,
        **_RECIPES[config.precision].options,
        **recompute,
    )


def optimizer_uses_shards(config: MegatronConfig, optimizer: OptimizerConfig) -> bool:
    """Whether masters and moments are sharded element by element. Muon needs whole matrices."""
    return config.use_distributed_optimizer and optimizer.name != "muon"


def _wrap(model: Any, use_shards: bool) -> Any:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=use_shards
    )
    layout = None
    if use_shards:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        layout = DistributedOptimizer.compute_full_param_layout(trained, None, ranks, ddp)
    return DistributedDataParallel(model.config, ddp, model, full_param_layout=layout)


def _optimizer(chunk: Any, config: MegatronConfig, optimizer: OptimizerConfig) -> Any:
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer

    kinds = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}
    if optimizer.name not in kinds:
        raise UnsupportedError(
            f"optimizer.name = {optimizer.name} is none of Megatron-Core's: choose {', '.join(kinds)}"
        )
    options = MegatronOptimizerConfig(
        optimizer=kinds[optimizer.name],
        lr=optimizer.learning_rate,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        sgd_momentum=optimizer.betas[0],
        muon_momentum=optimizer.betas[0],
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=optimizer_uses_shards(config, optimizer),
        use_layer_wise_distributed_optimizer=optimizer.name == "muon" and config.use_distributed_optimizer,
        clip_grad=optimizer.max_grad_norm or 0.0,
    )
    try:
        return get_megatron_optimizer(options, [chunk], use_gloo_process_groups=False)
    except ImportError as error:  # of the package behind Muon
        raise UnsupportedError(f"optimizer.name = {optimizer.name}: {error}") from error


def _connect(parts: Parts) -> None:
    """Tell the schedule how this model's gradients are summed."""
    from megatron.core.distributed import finalize_model_grads

    def finalize(chunks: list[Any], num_tokens: Tensor | None, **options: Any) -> None:
        finalize_model_grads(chunks, None, **options)  # a number of tokens would divide what is weighed already

    parts.model.config.finalize_model_grads_func = finalize
    parts.model.config.no_sync_func = parts.chunk.no_sync
