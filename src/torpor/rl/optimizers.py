"""The optimizers of a model, by name."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import Module, Parameter

from torpor.errors import UnsupportedError
from torpor.rl.config import OptimizerConfig


def build_optimizers(config: OptimizerConfig, model: Module, backbone: Module) -> dict[str, torch.optim.Optimizer]:
    """The optimizers that together step `model`, by name; one of them but for `muon`.

    Muon (K. Jordan, 2024) takes the matrices of the blocks; embeddings, norms, biases and whatever lies outside
    `backbone`, such as an output head, go to AdamW. Its steps are scaled to the size of AdamW's
    (arXiv:2502.16982), so that one learning rate does for both.

    Raises:
        UnsupportedError: see `build_optimizer`.
    """
    if config.name != "muon":
        return {config.name: build_optimizer(config, model.parameters())}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    matrices = [p for p in backbone.parameters() if p.ndim == 2 and id(p) not in tables and p.requires_grad]
    taken = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    muon = torch.optim.Muon(
        matrices,
        config.learning_rate,
        momentum=config.betas[0],
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return {"muon": muon, "adamw": build_optimizer(config.model_copy(update={"name": "adamw"}), rest)}


def build_optimizer(config: OptimizerConfig, parameters: Iterable[Parameter]) -> torch.optim.Optimizer:
    """The optimizer that `config` names, over `parameters`, with the peak learning rate.

    Raises:
        UnsupportedError: `adamw_8bit` without bitsandbytes, or `muon`, which is never alone.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    rate, decay = config.learning_rate, config.weight_decay
    match config.name:
        case "adamw":
            return torch.optim.AdamW(parameters, rate, betas=config.betas, weight_decay=decay, fused=True)
        case "adamw_8bit":
            return _adamw_8bit(config, parameters)
        case "muon":
            raise UnsupportedError(
                "optimizer.name = muon is two optimizers, and this backend steps one: choose adamw, or backend local"
            )
        case "sgd":
            return torch.optim.SGD(parameters, rate, momentum=config.betas[0], weight_decay=decay)
        case "adagrad":
            return torch.optim.Adagrad(parameters, rate, weight_decay=decay)
        case "rmsprop":
            return torch.optim.RMSprop(parameters, rate, alpha=config.betas[1], weight_decay=decay)


def _adamw_8bit(config: OptimizerConfig, parameters: list[Parameter]) -> torch.optim.Optimizer:
    try:
        from bitsandbytes.optim.adamw import AdamW8bit
    except ImportError as error:
        raise UnsupportedError(
            "optimizer.name = adamw_8bit needs bitsandbytes, which is not installed: pip install bitsandbytes"
        ) from error
    optimizer: torch.optim.Optimizer = AdamW8bit(  # type: ignore[no-untyped-call]
        parameters, config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
    )
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """The learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
