"""Small Megatron-Core actors for GPU tests: a Llama-shaped model on TransformerEngine, its buffers and optimizer."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed

from gpu import DEVICE

VOCABULARY = 512
SEQUENCE = 128
ROWS = 2

#: Megatron's names for the recipes that run on Hopper; None trains in bf16.
RECIPES: dict[str, str | None] = {
    "bf16": None,
    "blockwise": "blockwise",
    "current": "tensorwise",
    "delayed": "delayed",
}


def start(*, graphs: bool = False) -> None:
    """Process groups of one rank, and seeds; with `graphs` in a form that captured graphs can use."""
    from megatron.core import parallel_state

    torch.cuda.set_device(DEVICE)
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    seed(graphs=graphs)


def seed(*, graphs: bool = False) -> None:
    """Everything as after `start`, for a second actor that is to be like the first."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    gc.collect()
    FP8GlobalStateManager.reset()
    model_parallel_cuda_manual_seed(7, te_rng_tracker=graphs, force_reset_rng=True)
    torch.manual_seed(7)


@dataclass
class MegatronActor:
    """A model wrapped as Megatron trains it, and its optimizer."""

    model: Any
    optimizer: Any
    losses: list[float] = field(default_factory=list)

    def microbatch(self, step: int, number: int) -> None:
        """Forward and backward of one microbatch; the first one refreshes quantized copies of weights."""
        if number == 0:
            self.model.module.module.set_is_first_microbatch()
        loss = self.forward(1000 * step + number).mean()
        loss.backward()
        self.losses.append(loss.item())

    def forward(self, seed: int) -> torch.Tensor:
        """Losses of one batch of random tokens, shape [ROWS, SEQUENCE]."""
        tokens, positions = batch(seed)
        return self.model(tokens, positions, None, labels=tokens.roll(-1, 1))

    def log_probabilities(self, seed: int) -> torch.Tensor:
        """As a loop asks for them between two steps: without gradients."""
        self.model.module.module.set_is_first_microbatch()
        with torch.no_grad():
            return self.forward(seed)

    def update(self) -> None:
        """The end of a step."""
        self.model.finish_grad_sync()
        success, _, _ = self.optimizer.step()
        assert success

    def step(self, step: int, between: Callable[[], None] = lambda: None, microbatches: int = 2) -> None:
        """One training step; `between` is called between two microbatches."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        for number in range(microbatches):
            if number:
                between()
            self.microbatch(step, number)
        if self.model.config.cuda_graph_impl == "local":
            create_graphs()
        self.update()

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything that decides the training that follows: parameters, buffers, masters, moments."""
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()
        for index, optimizer in enumerate(torch_optimizers(self.optimizer)):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for number, parameter in enumerate(parameters):
                yield f"optimizer{index}.{number}", parameter
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        yield f"optimizer{index}.{number}.{key}", value

    def digest(self) -> dict[str, str]:
        """Name -> hash of the exact bits, of quantized parameters those of their values; and the losses themselves."""
        found = {"losses": repr(self.losses)}
        for name, tensor in self.state():
            is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
            found[name] = hash_of(tensor if is_plain else tensor.dequantize())
        for module_name, module in self.model.named_modules():
            for key, meta in getattr(module, "fp8_meta", {}).items():
                for attribute in ("scale", "amax_history"):
                    if key.startswith("scaling_") and isinstance(getattr(meta, attribute, None), torch.Tensor):
                        found[f"{module_name}.{key}.{attribute}"] = hash_of(getattr(meta, attribute))
        return found


def create_graphs() -> None:
    """Capture what the first step recorded, as Megatron's schedules do; nothing from the second step on."""
    from megatron.core.transformer.cuda_graphs import create_cudagraphs

    create_cudagraphs()


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    chained = vars(optimizer).get("chained_optimizers")
    if chained is None:
        return [] if optimizer.optimizer is None else [optimizer.optimizer]
    return [inner for part in chained for inner in torch_optimizers(part)]


def tensors_in(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        yield name, tensor
    else:
        attributes, _ = tensor.__tensor_flatten__()
        for attribute in attributes:
            yield from tensors_in(f"{name}.{attribute}", getattr(tensor, attribute))


def hash_of(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token and position ids, both [ROWS, SEQUENCE]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (ROWS, SEQUENCE), generator=generator)
    positions = torch.arange(SEQUENCE).expand(ROWS, -1)
    return tokens.to(DEVICE), positions.to(DEVICE)


def transformer_config(recipe: str = "blockwise", **options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    fp8 = RECIPES[recipe]
    precision = {} if fp8 is None else {"fp8": "hybrid" if fp8 == "delayed" else "e4m3", "fp8_recipe": fp8}
    if fp8 == "delayed":
        precision |= {"fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}
    shape = {
        "num_layers": 2,
        "hidden_size": 256,
        "ffn_hidden_size": 512,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 64,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "attention_backend": AttnBackend.unfused,  # gives the same bits twice
    }
    return TransformerConfig(**{**shape, **precision, **options})


def build(
    recipe: str = "blockwise",
    optimizer: str = "adam",
    *,
    distributed_optimizer: bool = True,
    prepare: Callable[[torch.nn.Module], None] = lambda model: None,
    ddp_options: dict[str, Any] | None = None,
    optimizer_options: dict[str, Any] | None = None,
    moe: bool = False,
    **options: Any,
) -> MegatronActor:
    """Model, data parallelism and optimizer.

    Args:
        recipe: one of `RECIPES`.
        optimizer: as Megatron names it.
        distributed_optimizer: whether parameters live in one flat buffer and masters are sharded.
        prepare: called with the model before it is wrapped; adds adapters, freezes, changes dtypes.
        ddp_options: more of `DistributedDataParallelConfig`.
        optimizer_options: more of `OptimizerConfig`.
        moe: four experts in grouped linears, with an expert bias.
        options: more of `TransformerConfig`.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.module import Float16Module

    if moe:
        options |= {
            "num_moe_experts": 4,
            "moe_ffn_hidden_size": 256,
            "moe_router_topk": 2,
            "moe_grouped_gemm": True,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_dtype": "fp32",
        }
    config = transformer_config(recipe, **options)
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=4 if moe else None, moe_grouped_gemm=moe, qk_layernorm=False
    )
    model = GPTModel(
        config,
        spec,
        VOCABULARY,
        SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).to(DEVICE)
    prepare(model)
    chunk = wrap(config, Float16Module(config, model), optimizer, distributed_optimizer, ddp_options or {})
    return MegatronActor(chunk, make_optimizer(chunk, optimizer, distributed_optimizer, optimizer_options or {}))


def wrap(config: Any, model: Any, optimizer: str, distributed_optimizer: bool, options: dict[str, Any]) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    ddp_config = DistributedDataParallelConfig(
        **{
            "grad_reduce_in_fp32": True,
            "use_distributed_optimizer": distributed_optimizer and "muon" not in optimizer,
            "overlap_grad_reduce": False,
            **options,
        }
    )
    layout = None
    if ddp_config.use_distributed_optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        layout = DistributedOptimizer.compute_full_param_layout(trained, None, 1, ddp_config)
    return DistributedDataParallel(config, ddp_config, model, full_param_layout=layout)


def make_optimizer(chunk: Any, optimizer: str, distributed_optimizer: bool, options: dict[str, Any]) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        **{
            "optimizer": optimizer,
            "lr": 1e-3,
            "weight_decay": 0.01,
            "bf16": True,
            "params_dtype": torch.bfloat16,
            "use_distributed_optimizer": distributed_optimizer and "muon" not in optimizer,
            "clip_grad": 1.0,
            **options,
        }
    )
    return get_megatron_optimizer(config, [chunk], use_gloo_process_groups=False)


def workspaces(model: torch.nn.Module) -> dict[str, Any]:
    """Every quantized copy of a weight, by name."""
    return {
        f"{path}.{key}": workspace
        for path, module in model.named_modules()
        for key, workspace in getattr(module, "_fp8_workspaces", {}).items()
    }


def workspace_bytes(model: torch.nn.Module) -> int:
    parts = [part for name, workspace in workspaces(model).items() for _, part in tensors_in(name, workspace)]
    return sum(part.nbytes for part in parts)


def quantized_shapes(model: torch.nn.Module) -> Sequence[tuple[int, int]]:
    return [tuple(workspace.shape) for workspace in workspaces(model).values()]
