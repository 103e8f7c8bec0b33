"""The optimizer of a run, by name."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import Parameter

from torpor.errors import UnsupportedError
from torpor.rl.config import OptimizerConfig


def build_optimizer(config: OptimizerConfig, parameters: Iterable[Parameter]) -> torch.optim.Optimizer:
    """The optimizer that `config` names, over `parameters`, with the peak learning rate.

    Raises:
        UnsupportedError: `adamw_8bit` without bitsandbytes.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    rate, decay = config.learning_rate, config.weight_decay
    match config.name:
        case "adamw":
            return torch.optim.AdamW(parameters, rate, betas=config.betas, weight_decay=decay, fused=True)
        case "adamw_8bit":
            return _adamw_8bit(config, parameters)
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
