"""How a model lies on GPUs: pipeline stages, tensor and expert shards, data-parallel groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torpor.errors import UsageError
from torpor.forecast.recipes import round_up
from torpor.forecast.shapes import Layer, Model, Split, Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the parallel groups; example: `Layout(gpus=64, tp=8, pp=4, ep=16, first_layers=18)`.

    Raises `UsageError` when the groups do not tile the GPUs.
    """

    gpus: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    """Tensor parallelism inside an expert. Megatron's own default is `tp`; 1 here."""
    cp: int = 1
    """Context parallelism: its ranks share no weights, they are part of the data-parallel group."""
    vpp: int = 1
    """Virtual stages on each pipeline rank (interleaved schedule)."""
    first_layers: int | None = None
    """Decoder layers of the first stage (`--decoder-first-pipeline-num-layers`); None: an even share."""
    last_layers: int | None = None
    embedding_in_split: bool = False
    """Count the embedding as a layer when layers are shared out."""
    loss_in_split: bool = False
    distributed_optimizer: bool = True
    optimizer_instances: int = 1
    """`--num-distributed-optimizer-instances`: optimizer state is sharded inside each instance only."""
    vocab_multiple: int = 128
    """The vocabulary is padded to a multiple of this times `tp`; 1 pads to a multiple of `tp` only."""
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for name in ("gpus", "tp", "pp", "ep", "etp", "cp", "vpp", "optimizer_instances", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; the least is 1.", option=name)
        self._check_tiling(self.tp * self.pp * self.cp, "tp x pp x cp", (self.tp, self.pp, self.cp))
        self._check_tiling(self.etp * self.ep * self.pp, "etp x ep x pp", (self.etp, self.ep, self.pp))
        if self.dp % self.optimizer_instances or self.expert_dp % self.optimizer_instances:
            raise UsageError(
                f"{self.optimizer_instances} optimizer instances do not divide the data-parallel sizes "
                f"{self.dp} (dense) and {self.expert_dp} (experts).",
                option="optimizer_instances",
            )

    def _check_tiling(self, group: int, words: str, sizes: tuple[int, ...]) -> None:
        if self.gpus % group:
            shown = " x ".join(map(str, sizes))
            raise UsageError(
                f"{self.gpus} GPUs are no multiple of {words} = {shown} = {group}. "
                f"Use {round_up(self.gpus, group)} GPUs, or smaller groups.",
                gpus=self.gpus,
                group=group,
            )

    @property
    def dp(self) -> int:
        """Ranks that hold the same dense shard, context-parallel ones included."""
        return self.gpus // (self.tp * self.pp)

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        return self.gpus // (self.etp * self.ep * self.pp)

    @property
    def ranks_per_stage(self) -> int:
        """GPUs of one pipeline stage; ranks of a stage follow each other."""
        return self.gpus // self.pp

    def optimizer_shards(self, *, expert: bool) -> int:
        """Into how many parts the optimizer state of a shard is cut."""
        if not self.distributed_optimizer:
            return 1
        return (self.expert_dp if expert else self.dp) // self.optimizer_instances

    @property
    def label(self) -> str:
        """A short name for tables: `8 GPUs tp4 ep8`."""
        sizes = (("tp", self.tp), ("pp", self.pp), ("ep", self.ep), ("etp", self.etp), ("cp", self.cp))
        return " ".join([f"{self.gpus} GPUs", *(f"{name}{size}" for name, size in sizes if size > 1)])


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of a weight: `count` tensors `[rows, cols]`."""

    layer: Layer
    weight: Weight
    rows: int
    cols: int
    count: int

    @property
    def elements(self) -> int:
        """Elements on this rank."""
        return self.rows * self.cols * self.count


def stages(model: Model, layout: Layout) -> list[list[Layer]]:
    """The layers of each pipeline stage, embedding first and head last.

    A tied embedding is held twice when first and last stage differ, and a stage with MTP layers has a copy of
    the embedding too (Megatron-Core `models/gpt/gpt_model.py`). Raises `UsageError` when the layers cannot be
    shared out.
    """
    found: list[list[Layer]] = [[] for _ in range(layout.pp)]
    found[0].append(model.embedding)
    for stage, layers in enumerate(_decoder_split(model, layout)):
        found[stage] += layers
    if model.mtp and layout.pp > 1:
        found[-1].append(model.embedding)
    head = model.head
    if model.tied and (layout.pp == 1 or model.mtp):
        head = Layer(head.name, tuple(weight for weight in head.weights if not weight.embedding))
    found[-1] += [*model.mtp, head]
    return found


def _decoder_split(model: Model, layout: Layout) -> Iterator[list[Layer]]:
    sizes = _stage_sizes(len(model.layers), layout)
    if layout.vpp == 1:
        start = 0
        for size in sizes:
            yield list(model.layers[start : start + size])
            start += size
        return
    chunk = _virtual_chunk(sizes, layout)
    for stage in range(layout.pp):
        starts = [(virtual * layout.pp + stage) * chunk for virtual in range(layout.vpp)]
        yield [layer for start in starts for layer in model.layers[start : start + chunk]]


def _virtual_chunk(sizes: list[int], layout: Layout) -> int:
    if len(set(sizes)) > 1 or sizes[0] % layout.vpp:
        raise UsageError(
            f"{layout.vpp} virtual stages need equal pipeline stages that they divide; the stages have "
            f"{', '.join(map(str, sizes))} layers. Leave out --vpp, or change the split.",
            option="vpp",
        )
    return sizes[0] // layout.vpp


def _stage_sizes(num_layers: int, layout: Layout) -> list[int]:
    """Decoder layers of each stage (Megatron-Core `transformer_block.py`, `get_num_layers_to_build`)."""
    ends = {0: layout.first_layers, layout.pp - 1: layout.last_layers} if layout.pp > 1 else {}
    fixed = {stage: size for stage, size in ends.items() if size is not None}
    if fixed and (layout.embedding_in_split or layout.loss_in_split):
        raise UsageError("layers of the first or last stage are given and counted too; use one of the two.")
    extra = int(layout.embedding_in_split) + int(layout.loss_in_split)
    rest, free = num_layers + extra - sum(fixed.values()), layout.pp - len(fixed)
    if rest < 0 or (free == 0 and rest) or (free and rest % free):
        raise UsageError(
            f"{num_layers} layers do not share out evenly over {layout.pp} pipeline stages"
            f"{f' with {dict(fixed)} fixed' if fixed else ''}: {rest} left for {free}. "
            "Set --first-layers and --last-layers, or another --pp.",
            layers=num_layers,
            pp=layout.pp,
        )
    sizes = [fixed.get(stage, rest // free if free else 0) for stage in range(layout.pp)]
    sizes[0] -= int(layout.embedding_in_split)
    sizes[-1] -= int(layout.loss_in_split)
    return sizes


def shards(layers: Iterable[Layer], layout: Layout) -> list[Shard]:
    """What one rank holds of the layers. Raises `UsageError`, with the layer, where a split is uneven."""
    return [_shard(layer, weight, layout) for layer in layers for weight in layer.weights]


def _shard(layer: Layer, weight: Weight, layout: Layout) -> Shard:
    ways = layout.etp if weight.expert else layout.tp
    _check_heads(layer, weight, ways)
    rows, cols, count = weight.rows, weight.cols, weight.count
    if weight.embedding:
        rows = round_up(rows, layout.vocab_multiple * layout.tp)
    if weight.split is Split.ROWS:
        rows = _divide(rows, ways, layer, weight, "rows")
    elif weight.split is Split.COLS:
        cols = _divide(cols, ways, layer, weight, "columns")
    if weight.expert:
        count = _divide(count, layout.ep, layer, weight, "experts")
    return Shard(layer, weight, rows, cols, count)


def _check_heads(layer: Layer, weight: Weight, ways: int) -> None:
    if weight.heads % ways:
        raise _indivisible(layer, weight, weight.heads, "heads", ways)
    groups = weight.kv_groups
    if groups and groups % ways and ways % groups:
        raise _indivisible(layer, weight, groups, "key/value groups", ways)


def _divide(size: int, ways: int, layer: Layer, weight: Weight, what: str) -> int:
    if size % ways:
        raise _indivisible(layer, weight, size, what, ways)
    return size // ways


def _indivisible(layer: Layer, weight: Weight, size: int, what: str, ways: int) -> UsageError:
    return UsageError(
        f"{layer.name}: {weight.name} has {size} {what}, which {ways} ranks cannot share evenly. "
        f"Use a divisor of {size}.",
        layer=layer.name,
        weight=weight.name,
        size=size,
        ways=ways,
    )
