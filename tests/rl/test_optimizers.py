"""Which optimizer steps what."""

from __future__ import annotations

import pytest
import torch
from small_actors import VOCABULARY

from torpor.errors import UnsupportedError
from torpor.rl.config import OptimizerConfig
from torpor.rl.models import tiny_model, value_model
from torpor.rl.optimizers import build_optimizer, build_optimizers, set_learning_rate

MUON = OptimizerConfig(name="muon", learning_rate=0.01, betas=(0.8, 0.9), weight_decay=0.1)


def _names(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> set[str]:
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return {known[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]}


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest(kind: str) -> None:
    policy = tiny_model(VOCABULARY, hidden_size=32)
    critic = value_model(policy)
    model = policy if kind == "policy" else critic
    backbone = policy.get_decoder() if kind == "policy" else critic.backbone  # type: ignore[no-untyped-call]
    optimizers = build_optimizers(MUON, model, backbone)
    muon, adamw = (_names(optimizers[name], model) for name in ("muon", "adamw"))
    assert muon.isdisjoint(adamw)
    assert muon | adamw == {name for name, _ in model.named_parameters()}
    assert all(".layers." in name and "norm" not in name for name in muon)
    assert len(muon) == 2 * 7  # four of attention and three of the feed-forward part in each of two blocks
    assert {"head.weight", "head.bias"} <= adamw or kind == "policy"


def test_an_untied_output_head_is_not_muons() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizers = build_optimizers(MUON, model, model.get_decoder())  # type: ignore[no-untyped-call]
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= _names(optimizers["adamw"], model)


def test_both_take_their_settings_from_one_section() -> None:
    model = tiny_model(VOCABULARY, hidden_size=32)
    optimizers = build_optimizers(MUON, model, model.get_decoder())  # type: ignore[no-untyped-call]
    (muon,), (adamw,) = (optimizers[name].param_groups for name in ("muon", "adamw"))
    assert (muon["lr"], muon["momentum"], muon["weight_decay"]) == (0.01, 0.8, 0.1)
    assert (adamw["lr"], adamw["betas"], adamw["weight_decay"]) == (0.01, (0.8, 0.9), 0.1)
    for optimizer in optimizers.values():
        set_learning_rate(optimizer, 0.5)
    assert muon["lr"] == adamw["lr"] == 0.5


def test_a_frozen_parameter_belongs_to_neither() -> None:
    model = tiny_model(VOCABULARY, hidden_size=32)
    frozen = {name for name, p in model.named_parameters() if "layers.0." in name and p.requires_grad_(False) is p}
    optimizers = build_optimizers(MUON, model, model.get_decoder())  # type: ignore[no-untyped-call]
    stepped = {name for optimizer in optimizers.values() for name in _names(optimizer, model)}
    assert stepped == {name for name, _ in model.named_parameters()} - frozen


def test_muon_alone_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"optimizer\.name = muon"):
        build_optimizer(MUON, [])
