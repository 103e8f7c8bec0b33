"""The rule for PEFT adapters, with PEFT itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from contracts.rule_contract import RuleContract
from torpor.fingerprint import fingerprint
from torpor.inventory import Inventory, take_inventory
from torpor.kinds import Role
from torpor.memory.base import byte_view
from torpor.rules.base import Actor, Rule
from torpor.rules.peft import PeftRule
from torpor.rules.standard import standard_rules

peft = pytest.importorskip("peft")
zoo = pytest.importorskip("zoo")


def _adapted(config: object, model: nn.Module | None = None) -> nn.Module:
    base = model or nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    made: nn.Module = peft.get_peft_model(base, config)
    return made


class TestContract(RuleContract):
    def make_rule(self) -> Rule:
        return PeftRule()

    def make_actor(self) -> Actor:
        return Actor({"model": _adapted(peft.LoraConfig(target_modules=["0", "2"]))})


def _take(model: nn.Module) -> Inventory:
    return take_inventory(Actor({"model": model}), standard_rules())


def _adapter_names(model: nn.Module) -> set[str]:
    return {e.name for e in _take(model).entries if e.component == "adapters"}


def test_exactly_what_trains_is_an_adapter_and_the_rest_stays_params() -> None:
    situation = zoo.peft_lora()
    model = situation.actor.models["model"]
    inventory = take_inventory(situation.actor, standard_rules())
    for name, parameter in model.named_parameters():
        entry = inventory.find(parameter)
        assert entry is not None
        expected = (Role.ADAPTER, "adapters") if parameter.requires_grad else (Role.PARAM, "params")
        assert (entry.role, entry.component) == expected, name


def test_adapter_state_stays_with_the_optimizer_and_gradients_with_the_gradients() -> None:
    situation = zoo.peft_lora()
    situation.step()
    components = take_inventory(situation.actor, standard_rules()).by_component()
    assert set(components) == {"adapters", "params", "grads", "buffers", "optimizer"}
    assert {e.role for e in components["optimizer"]} == {Role.MOMENT}
    assert len(components["grads"]) == len(components["adapters"])


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(target_modules=["0"], use_dora=True),
        peft.IA3Config(target_modules=["0"], feedforward_modules=[]),
        peft.OFTConfig(target_modules=["0"], oft_block_size=4),
        peft.VeraConfig(target_modules=["0"], r=2),
        peft.LoHaConfig(target_modules=["0"]),
        peft.LoraConfig(target_modules=["0"], modules_to_save=["2"]),
    ],
    ids=lambda c: type(c).__name__,
)
def test_trainable_members_of_other_tuners_are_adapters(config: object) -> None:
    model = _adapted(config)
    inventory = _take(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert trainable
    for parameter in trainable:
        entry = inventory.find(parameter)
        assert entry is not None
        assert entry.component == "adapters"


def test_two_adapters_are_both_claimed() -> None:
    model = _adapted(peft.LoraConfig(target_modules=["0"]))
    model.add_adapter("second", peft.LoraConfig(target_modules=["0"]))
    assert {n.rsplit(".", 2)[1] for n in _adapter_names(model)} == {"default", "second"}


def test_a_merge_changes_the_fingerprint_of_the_base_and_nothing_else_of_it() -> None:
    model = _adapted(peft.LoraConfig(target_modules=["0"], init_lora_weights=False))

    def marks() -> dict[str, object]:
        return {e.name: fingerprint(byte_view(e.storage)) for e in _take(model).entries}

    before = marks()
    model.merge_adapter()
    after = marks()
    assert {name for name in before if before[name] != after[name]} == {"model.base_model.model.0.base_layer.weight"}


def test_members_are_told_by_their_whole_name() -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    class Layer(nn.Module, BaseTunerLayer):
        adapter_layer_names = ("delta",)

        def __init__(self) -> None:
            super().__init__()
            self.delta = nn.Parameter(torch.zeros(3))
            self.delta_base = nn.Parameter(torch.zeros(3))

    assert _adapter_names(nn.Sequential(Layer())) == {"model.0.delta"}
    assert {c.name for c in PeftRule().claims(Actor({"": Layer()}))} == {"delta"}


def test_a_model_without_adapters_has_no_claims() -> None:
    assert list(PeftRule().claims(Actor({"model": nn.Linear(2, 2)}))) == []


def test_peft_is_not_imported_by_the_rule() -> None:
    program = (
        "import sys, torch\n"
        "from torpor.rules.peft import PeftRule\n"
        "from torpor.rules.base import Actor\n"
        "assert list(PeftRule().claims(Actor({'m': torch.nn.Linear(1, 1)}))) == []\n"
        "assert 'peft' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_prompt_learning_parameters_are_adapters() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = _adapted(prompt, LlamaForCausalLM(config))
    [name] = _adapter_names(model)
    assert name.startswith("model.prompt_encoder.")
    assert torch.is_tensor(model.get_parameter(name.removeprefix("model.")))
