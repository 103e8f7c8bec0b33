"""`torpor plan`: the forecast on the command line. Imports no torch, and answers in well under 300 ms."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torpor.errors import TorporError, UsageError
from torpor.forecast import render
from torpor.forecast.actor import Forecast, forecast
from torpor.forecast.config import built_in_names, read_config
from torpor.forecast.families import build_model, known_architectures
from torpor.forecast.fates import Options
from torpor.forecast.layout import Layout
from torpor.forecast.link import current_link
from torpor.forecast.megatron import is_argument_file, read_arguments
from torpor.forecast.optimizers import Kind, Optimizer
from torpor.forecast.recipes import Architecture, Format, Moment, Override, Recipe, Recompute, Scope
from torpor.forecast.shapes import Model
from torpor.forecast.training import LORA_TARGETS, add_lora, freeze

EXIT_REFUSED = 2
EXIT_DOES_NOT_FIT = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """What a command line or an argument file asks for."""

    model: Model
    layout: Layout
    recipe: Recipe
    optimizer: Optimizer
    options: Options

    def forecast(self) -> Forecast:
        """The account of it."""
        return forecast(self.model, self.layout, self.recipe, self.optimizer, self.options)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `plan` to a command line."""
    parser = subparsers.add_parser(
        "plan",
        help="bytes of an actor, before anything runs",
        description=__doc__,
        epilog=f"built-in models: {', '.join(built_in_names())}. Architectures: {', '.join(known_architectures())}.",
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser, *, with_model: bool = True) -> None:
    """The options of `torpor plan`. Each is absent from the result unless it was given, and its `dest` names
    the dataclass and field that it sets."""
    if with_model:
        parser.add_argument(
            "config",
            help="a Hugging Face config.json (or its directory), the name of a built-in model, "
            "or a file of Megatron arguments",
        )
        _add_output(parser)
    _add_model(parser)
    _add_layout(parser)
    _add_recipe(parser)
    _add_training(parser)
    _add_sleep(parser)


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print JSON; bytes are whole numbers")
    group.add_argument("--segments", action="store_true", help="also show what an allocator-level saver copies")
    group.add_argument(
        "--compare",
        nargs="+",
        metavar="KEY=VALUE[,...]",
        default=[],
        help="plan these variants too, side by side; for example --compare tp=4,ep=8 recipe=mxfp8",
    )
    group.add_argument("--link-gbps", type=float, metavar="GB/s", help="rate of one GPU's link to the host")
    group.add_argument("--host-gib", type=float, metavar="GiB", help="host memory of a node")
    group.add_argument(
        "--ignore", action="append", default=[], metavar="NAME", help="skip this flag of an argument file"
    )


class _Options:
    """Adds options whose `dest` is `group.field` and which are absent unless given."""

    def __init__(self, parser: argparse.ArgumentParser, title: str, target: str) -> None:
        self.group = parser.add_argument_group(title)
        self.target = target

    def add(self, flag: str, field: str, help: str, **more: Any) -> None:
        self.group.add_argument(flag, dest=f"{self.target}.{field}", default=argparse.SUPPRESS, help=help, **more)

    def number(self, flag: str, field: str, help: str) -> None:
        self.add(flag, field, help, type=int, metavar="N")

    def choice(self, flag: str, field: str, help: str, words: Any) -> None:
        self.add(flag, field, help, type=words, choices=list(words), metavar="|".join(words))

    def switch(self, flag: str, field: str, help: str, value: bool = True) -> None:
        self.add(flag, field, help, action="store_const", const=value)


def _add_model(parser: argparse.ArgumentParser) -> None:
    model = _Options(parser, "model", "model")
    model.number("--mtp", "mtp", "multi-token-prediction layers that are built (default 0)")
    model.number("--lora-rank", "lora_rank", "train adapters of this rank, freeze the rest")
    model.add(
        "--lora-targets",
        "lora_targets",
        f"linears with adapters (default {' '.join(LORA_TARGETS)})",
        nargs="+",
    )
    model.add("--freeze", "freeze", "freeze weights that match a pattern, for example '*router*'", nargs="+")
    model.switch("--tied", "tied", "one weight for embedding and output layer")
    model.switch("--untied", "tied", "two weights", value=False)


def _add_layout(parser: argparse.ArgumentParser) -> None:
    layout = _Options(parser, "layout", "layout")
    layout.number("--gpus", "gpus", "GPUs of the job (default: the fewest that the groups need)")
    layout.number("--tp", "tp", "tensor-parallel size")
    layout.number("--pp", "pp", "pipeline stages")
    layout.number("--ep", "ep", "expert-parallel size")
    layout.number("--etp", "etp", "tensor-parallel size inside an expert (default 1)")
    layout.number("--cp", "cp", "context-parallel size")
    layout.number("--vpp", "vpp", "virtual stages on each pipeline rank")
    layout.number("--first-layers", "first_layers", "decoder layers of the first stage")
    layout.number("--last-layers", "last_layers", "decoder layers of the last stage")
    layout.number("--gpus-per-node", "gpus_per_node", "GPUs that share a host (default 8)")
    layout.number("--vocab-multiple", "vocab_multiple", "pad the vocabulary to this times tp (default 128)")
    layout.number("--optimizer-instances", "optimizer_instances", "distributed optimizer instances")
    layout.switch(
        "--no-distributed-optimizer",
        "distributed_optimizer",
        "whole optimizer state on each rank",
        value=False,
    )


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    recipe = _Options(parser, "precision recipe", "recipe")
    recipe.choice("--recipe", "format", "precision of the linears", Format)
    recipe.choice(
        "--architecture", "architecture", "of the GPU (default: the oldest that has the recipe)", Architecture
    )
    recipe.choice("--scope", "scope", "which linears are quantized", Scope)
    recipe.number("--first-bf16", "first_layers_bf16", "first layers left in bf16")
    recipe.number("--last-bf16", "last_layers_bf16", "last layers left in bf16")
    recipe.switch("--primary-weights", "primary_weights", "the parameters themselves are quantized")
    recipe.switch("--no-cache", "cache", "weights are quantized anew in each microbatch", value=False)
    recipe.choice("--moment", "moment", "what ran last before the sleep", Moment)
    recipe.choice("--recompute", "recompute", "which linears are recomputed in the backward", Recompute)
    recipe.choice("--backward-override", "override", "what the backward multiplies with", Override)
    recipe.add("--te", "te_version", "TransformerEngine release, for example 2.17", type=_version, metavar="X.Y")
    recipe.number("--amax-history", "amax_history", "length of delayed scaling's history")


def _add_training(parser: argparse.ArgumentParser) -> None:
    optimizer = _Options(parser, "optimizer", "optimizer")
    optimizer.choice("--optimizer", "kind", "which optimizer", Kind)
    optimizer.add("--grad-dtype", "grad_bytes", "of the gradient buffer", type=_width, metavar="fp32|bf16")
    optimizer.add("--exp-avg-dtype", "exp_avg_bytes", "of the first moment", type=_width, metavar="TYPE")
    optimizer.add("--exp-avg-sq-dtype", "exp_avg_sq_bytes", "of the second moment", type=_width, metavar="TYPE")
    optimizer.switch("--no-param-remainders", "param_remainders", "fp32 masters in precision-aware Adam", value=False)
    optimizer.switch("--no-momentum", "sgd_momentum", "SGD without momentum", value=False)
    optimizer.add("--cpu-offload", "cpu_offload", "fraction of the optimizer on the host", type=float, metavar="0..1")


def _add_sleep(parser: argparse.ArgumentParser) -> None:
    options = _Options(parser, "sleep", "options")
    options.switch("--copy-caches", "drop_caches", "copy quantized caches instead of dropping them", value=False)
    options.switch("--copy-grads", "zero_grads", "copy gradients instead of zeroing them", value=False)
    options.switch("--copy-params", "rebuild_params", "copy parameters instead of rebuilding them", value=False)
    options.switch("--copy-unchanged", "keep_unchanged", "copy frozen weights in each sleep", value=False)
    options.switch("--cuda-graphs", "cuda_graphs", "CUDA graphs were captured over the training step")


def _version(text: str) -> tuple[int, int]:
    major, _, rest = text.partition(".")
    try:
        return int(major), int(rest.split(".")[0])
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no version such as 2.17") from error


def _width(text: str) -> int:
    widths = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
    if text not in widths:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(widths)}")
    return widths[text]


Given = dict[str, dict[str, Any]]


def given_by(args: argparse.Namespace) -> Given:
    """What was given on a command line, by dataclass and field."""
    found: Given = {"model": {}, "layout": {}, "recipe": {}, "optimizer": {}, "options": {}}
    for key, value in vars(args).items():
        target, dot, field = key.partition(".")
        if dot:
            found[target][field] = value
    return found


def make_plan(config: str, given: Given, ignore: Sequence[str] = ()) -> Plan:
    """The plan of a config and what was given beside it; what is given wins over an argument file."""
    choices = dict(given["model"])
    if is_argument_file(config):
        base = read_arguments(config, ignore)
        model = base.model
        from_file: Given = {name: getattr(base, name) for name in ("layout", "recipe", "optimizer", "options")}
        if "mtp" in choices:
            raise UsageError("--mtp is for a config.json; an argument file has --mtp-num-layers.")
    else:
        model = build_model(read_config(config), mtp_layers=choices.get("mtp", 0))
        from_file = {"layout": {}, "recipe": {}, "optimizer": {}, "options": {}}
    merged = {name: from_file[name] | given[name] for name in from_file}
    if from_file["layout"]:  # Megatron's default for experts, whoever set the tensor-parallel size
        merged["layout"].setdefault("etp", merged["layout"]["tp"])
    return Plan(
        _trained(model, choices),
        _layout(merged["layout"]),
        _recipe(merged["recipe"]),
        Optimizer(**merged["optimizer"]),
        Options(**merged["options"]),
    )


def _trained(model: Model, choices: dict[str, Any]) -> Model:
    if "tied" in choices:
        model = replace(model, tied=choices["tied"])
    if "freeze" in choices:
        model = freeze(model, choices["freeze"])
    if "lora_rank" in choices:
        return add_lora(model, choices["lora_rank"], choices.get("lora_targets", LORA_TARGETS))
    if "lora_targets" in choices:
        raise UsageError("--lora-targets without --lora-rank adapts nothing; give a rank.")
    return model


def _layout(values: dict[str, Any]) -> Layout:
    """The layout; without a number of GPUs, the fewest that all groups tile."""
    if "gpus" not in values:
        dense = math.prod(values.get(name, 1) for name in ("tp", "pp", "cp"))
        experts = math.prod(values.get(name, 1) for name in ("etp", "ep", "pp"))
        values = {**values, "gpus": math.lcm(dense, experts)}
    return Layout(**values)


def _recipe(values: dict[str, Any]) -> Recipe:
    """The recipe; without an architecture, the oldest that has it."""
    if "architecture" not in values and values.get("format") in (Format.MXFP8, Format.NVFP4):
        values = {**values, "architecture": Architecture.BLACKWELL}
    return Recipe(**values)


def variants(texts: Sequence[str], given: Given) -> list[tuple[str, Given]]:
    """What each text of `--compare` changes, on top of what was given: `tp=4,recipe=mxfp8`."""
    parser = argparse.ArgumentParser(prog="--compare", add_help=False, allow_abbrev=False)
    add_arguments(parser, with_model=False)
    found = []
    for text in texts:
        words = [word for item in text.split(",") for word in _as_flags(item)]
        changes = given_by(parser.parse_args(words))
        found.append((text, {name: given[name] | changes[name] for name in given}))
    return found


def _as_flags(item: str) -> list[str]:
    key, equals, value = item.strip().partition("=")
    return [f"--{key}", *(shlex.split(value) if equals else [])]


def run(args: argparse.Namespace) -> int:
    """Print the forecast. Returns 0, 2 where the plan cannot be, or 3 where it does not fit the host."""
    try:
        return _run(args)
    except TorporError as error:
        print(f"torpor plan: {error}", file=sys.stderr)
        return EXIT_REFUSED


def _run(args: argparse.Namespace) -> int:
    given = given_by(args)
    link = current_link(args.link_gbps)
    named = [("as given", given), *variants(args.compare, given)]
    forecasts = [(name, make_plan(args.config, each, args.ignore).forecast()) for name, each in named]
    if args.json:
        shown = [
            {"plan": name, **render.as_json(each, link, args.host_gib, segments=args.segments)}
            for name, each in forecasts
        ]
        print(json.dumps(shown if args.compare else shown[0], indent=2))
    else:
        print(render.report(forecasts[0][1], link, args.host_gib, segments=args.segments))
        if args.compare:
            print("\n" + render.compare(forecasts, link))
    all_fit = args.host_gib is None or all(render.fits(each, args.host_gib) for _, each in forecasts)
    return 0 if all_fit else EXIT_DOES_NOT_FIT


def main(argv: Sequence[str] | None = None) -> int:
    """`torpor plan` on its own: `python -m torpor.forecast.command CONFIG ...`."""
    parser = argparse.ArgumentParser(prog="torpor plan", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
