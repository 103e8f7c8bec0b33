"""The built-in models against transformers: the same config, the real class, counted on the meta device."""

from __future__ import annotations

import pytest

from torpor.forecast.config import built_in_names, read_config
from torpor.forecast.families import build_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

#: model_type of the config -> model_type that transformers knows the same class by.
SAME_CLASS = {"kimi_k2": "deepseek_v3"}


def count_in_transformers(name: str) -> int:
    values = dict(read_config(name).values)
    model_type = values.pop("model_type")
    config = transformers.AutoConfig.for_model(SAME_CLASS.get(model_type, model_type), **values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())  # parameters() yields tied ones once


@pytest.mark.parametrize("name", built_in_names())
def test_parameter_total_equals_transformers(name: str) -> None:
    assert build_model(read_config(name)).parameters == count_in_transformers(name)
