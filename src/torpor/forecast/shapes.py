"""What a model is made of: weights with their full shapes, how each is split, and who multiplies with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum


class Split(StrEnum):
    """Which dimension of a weight the tensor-parallel ranks share."""

    NONE = "duplicated"
    ROWS = "rows"
    COLS = "columns"


class Module(StrEnum):
    """The class that multiplies with the weight; it decides which directions TransformerEngine quantizes."""

    PLAIN = "plain"
    """Embedding, output layer, norm, router, bias, `torch.nn.Linear`, or a weight that is read around its
    module: never in a quantized cache."""
    LINEAR = "Linear"
    LAYERNORM_LINEAR = "LayerNormLinear"
    GROUPED_LINEAR = "GroupedLinear"


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter, or `count` equal ones (the experts of a layer), before any sharding.

    Example: `Weight("mlp.linear_fc1", 24576, 4096, Split.ROWS, module=Module.LAYERNORM_LINEAR)`.
    """

    name: str
    rows: int
    """Output features N; the length of a vector."""
    cols: int = 1
    """Input features K; 1 for a vector."""
    split: Split = Split.NONE
    count: int = 1
    expert: bool = False
    """Split over expert parallelism (by `count`) and expert tensor parallelism instead of TP."""
    module: Module = Module.PLAIN
    fp32: bool = False
    """Kept in fp32 by the implementation: the parameter is its own master."""
    embedding: bool = False
    """Word embedding or output layer: its rows are padded, and Muon leaves it to Adam."""
    heads: int = 0
    """Attention heads along the split dimension; the tensor-parallel size must divide them. 0: no rule."""
    kv_groups: int = 0
    """Key/value groups; the tensor-parallel size must be a divisor or a multiple of them. 0: no rule."""
    trainable: bool = True
    adapter: bool = False

    @property
    def elements(self) -> int:
        """Elements of all `count` copies."""
        return self.rows * self.cols * self.count

    @property
    def is_matrix(self) -> bool:
        """Whether Muon orthogonalizes it: two dimensions, and neither embedding nor output layer."""
        return self.cols > 1 and not self.embedding


@dataclass(frozen=True, slots=True)
class Buffer:
    """State of a layer that is no parameter, whole on every rank. Example: `Buffer("expert_bias", 1024)`."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layer:
    """One unit of the pipeline. `name` is what an error shows, for example `decoder.layers.3`."""

    name: str
    weights: tuple[Weight, ...]
    buffers: tuple[Buffer, ...] = ()
    index: int | None = None
    """Place among the decoder layers, from 0; None for embedding, head and MTP layers."""

    @property
    def elements(self) -> int:
        """Parameters of the layer, before sharding."""
        return sum(weight.elements for weight in self.weights)


WeightChange = Callable[[Layer, Weight], Iterable[Weight]]


@dataclass(frozen=True, slots=True)
class Model:
    """A model as a stack: embedding, decoder layers, multi-token-prediction layers, head."""

    name: str
    architecture: str
    hidden: int
    tied: bool
    embedding: Layer
    layers: tuple[Layer, ...]
    head: Layer
    """Final norm, and the output layer (also when it is tied: a later stage holds a copy of it)."""
    mtp: tuple[Layer, ...] = ()
    """Multi-token-prediction layers that are built; they live on the last pipeline stage."""
    notes: tuple[str, ...] = ()
    """What the reader should know about where these shapes came from."""

    @property
    def units(self) -> tuple[Layer, ...]:
        """Every layer, in pipeline order."""
        return (self.embedding, *self.layers, *self.mtp, self.head)

    def weights(self) -> Iterator[tuple[Layer, Weight]]:
        """Every weight with its layer; a tied output layer is left out, it is the embedding."""
        for layer in self.units:
            for weight in layer.weights:
                if not (self.tied and layer is self.head and weight.embedding):
                    yield layer, weight

    @property
    def parameters(self) -> int:
        """Parameters before sharding and padding, tied weights once."""
        return sum(weight.elements for _, weight in self.weights())

    def map_weights(self, change: WeightChange) -> Model:
        """The same model, each weight replaced by the weights that `change(layer, weight)` gives."""

        def mapped(layer: Layer) -> Layer:
            return replace(layer, weights=tuple(new for old in layer.weights for new in change(layer, old)))

        return replace(
            self,
            embedding=mapped(self.embedding),
            layers=tuple(map(mapped, self.layers)),
            head=mapped(self.head),
            mtp=tuple(map(mapped, self.mtp)),
        )
