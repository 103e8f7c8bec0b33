"""Bytes of an actor from a model config, a precision recipe and a parallel layout; imports no torch.

model = build_model(read_config("qwen3-4b"))
account = forecast(model, Layout(gpus=8, tp=2), Recipe(format=Format.FP8_BLOCKWISE))
account.fullest.copied_bytes        # what one sleep copies on the fullest rank
account.total(Role.QUANTIZED_CACHE) # over all ranks
"""

from torpor.forecast.actor import Forecast, RankForecast, forecast
from torpor.forecast.config import built_in_names, read_config
from torpor.forecast.families import build_model, known_architectures
from torpor.forecast.fates import Line, Options
from torpor.forecast.layout import Layout
from torpor.forecast.link import Link, current_link, link_file, write_link
from torpor.forecast.optimizers import Kind, Optimizer
from torpor.forecast.recipes import Architecture, Format, Moment, Override, Recipe, Recompute, Scope
from torpor.forecast.segments import segment_view
from torpor.forecast.shapes import Buffer, Layer, Model, Module, Split, Weight
from torpor.forecast.training import add_lora, freeze

__all__ = [
    "Architecture",
    "Buffer",
    "Forecast",
    "Format",
    "Kind",
    "Layer",
    "Layout",
    "Line",
    "Link",
    "Model",
    "Module",
    "Moment",
    "Optimizer",
    "Options",
    "Override",
    "RankForecast",
    "Recipe",
    "Recompute",
    "Scope",
    "Split",
    "Weight",
    "add_lora",
    "build_model",
    "built_in_names",
    "current_link",
    "forecast",
    "freeze",
    "known_architectures",
    "link_file",
    "read_config",
    "segment_view",
    "write_link",
]
