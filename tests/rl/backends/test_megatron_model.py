"""What is refused before Megatron-Core is asked, and what the configuration says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from torpor.errors import UnsupportedError, UsageError
from torpor.rl.backends.megatron import MegatronBackend
from torpor.rl.backends.megatron_model import (
    optimizer_uses_shards,
    require_shapes,
    start_process_groups,
    token_multiple,
)
from torpor.rl.backends.megatron_weights import Architecture
from torpor.rl.config import MegatronConfig, OptimizerConfig
from torpor.rl.config_cli import config_from_mapping, parse_run_config

SMOLLM2 = Architecture(30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5, None, 1e-5, True, False, False)


def settings(**options: Any) -> MegatronConfig:
    return MegatronConfig.model_validate(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "blockwise"}, "blockwise needs multiples of 128, and the model's hidden width is 576"),
        ({"precision": "delayed", "transformer_impl": "local"}, "needs transformer_impl = transformer_engine"),
    ],
)
def test_shapes_that_a_precision_cannot_take(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        require_shapes(SMOLLM2, settings(**options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_by_name() -> None:
    options: dict[str, Any] = {"megatron": settings(), "optimizer": OptimizerConfig(), "temperature": 1.0}
    with pytest.raises(UnsupportedError, match="backend = megatron needs an NVIDIA GPU"):
        MegatronBackend(LlamaConfig(), **options, logit_chunk_tokens=8)


def test_bf16_takes_any_shape() -> None:
    require_shapes(SMOLLM2, settings(transformer_impl="local"))
    assert token_multiple(settings()) == 1
    assert token_multiple(settings(precision="blockwise")) == 128


def test_the_stack_of_layers_is_not_cut() -> None:
    with pytest.raises(UnsupportedError, match="pipeline_model_parallel_size = 2"):
        start_process_groups(settings(pipeline_model_parallel_size=2), 0)


def test_ranks_that_do_not_divide_the_model() -> None:
    with pytest.raises(UnsupportedError, match=r"tensor_model_parallel_size = 2 does not divide .* key-value heads, 3"):
        require_shapes(SMOLLM2, settings(tensor_model_parallel_size=2))


def test_muon_has_whole_matrices() -> None:
    assert optimizer_uses_shards(settings(), OptimizerConfig())
    assert not optimizer_uses_shards(settings(), OptimizerConfig(name="muon"))
    assert not optimizer_uses_shards(settings(use_distributed_optimizer=False), OptimizerConfig())


def test_flags_have_the_names_of_the_frameworks() -> None:
    config = parse_run_config(
        None,
        [
            *("--backend", "megatron", "--transformer-impl", "local"),
            *("--rematerialize-param-from-master-weight", "--no-clear-quantized-weight-workspaces-on-offload"),
        ],
    )
    assert config.megatron == settings(
        transformer_impl="local",
        rematerialize_param_from_master_weight=True,
        clear_quantized_weight_workspaces_on_offload=False,
    )


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"megatron": {"precision": "current"}}, "precision and backend = local clash"),
        ({"backend": "megatron", "runtime": "ray"}, "backend = megatron and runtime = ray clash"),
        (
            {
                "backend": "megatron",
                "algorithm": {"advantages": "gae", "kl_in": "reward", "kl_coefficient": 0.1},
            },
            "backend = megatron and algorithm.kl_in = reward clash",
        ),
    ],
)
def test_clashes(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config_from_mapping(raw, "a.toml")
