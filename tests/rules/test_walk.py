"""The walker: what it enters, what it resolves, what it names."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, deque, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torpor.rules.walk import Place, is_container, leaves, module_tensors, plain


@dataclasses.dataclass
class _Open:
    a: torch.Tensor
    late: torch.Tensor = dataclasses.field(init=False)


@dataclasses.dataclass(slots=True)
class _Slotted:
    a: torch.Tensor


_Pair = namedtuple("_Pair", ["x", "y"])


class _Opaque:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _names(value: object) -> list[str]:
    return [name for name, _ in leaves("v", value)]


def test_every_kind_of_container_is_entered() -> None:
    t = torch.zeros(1)
    value = {
        "list": [t],
        "tuple": (t, (t,)),
        "named": _Pair(t, None),
        "deque": deque([t]),
        "set": {t},
        "ordered": OrderedDict(k=t),
        "user": UserDict(k=t),
        "space": SimpleNamespace(k=t),
        "open": _Open(t),
        "slotted": _Slotted(t),
        3: t,
        t: t,
    }
    assert _names(value) == [
        "v.list[0]",
        "v.tuple[0]",
        "v.tuple[1][0]",
        "v.named[0]",
        "v.deque[0]",
        "v.set[0]",
        "v.ordered.k",
        "v.user.k",
        "v.space.k",
        "v.open.a",
        "v.slotted.a",
        "v[3]",
        "v[Tensor 11]",
    ]


def test_what_was_hung_on_a_dataclass_later_is_found() -> None:
    value = _Open(torch.zeros(1))
    value.surprise = torch.zeros(2)  # type: ignore[attr-defined]
    assert _names(value) == ["v.a", "v.surprise"]


def test_other_objects_are_not_entered() -> None:
    assert _names([_Opaque(torch.zeros(1)), _Open, "text", b"bytes", 3, None]) == []
    assert not is_container(_Opaque(torch.zeros(1)))
    assert not is_container("text")


def test_cycles_end_and_shared_containers_are_entered_once() -> None:
    inner: list[object] = [torch.zeros(1)]
    inner.append(inner)
    assert _names({"a": inner, "b": inner}) == ["v.a[0]"]


def test_a_container_made_on_the_fly_is_not_mistaken_for_a_freed_one() -> None:
    class Fresh(UserDict[str, object]):
        def items(self):  # type: ignore[no-untyped-def]
            return [(str(i), [torch.zeros(1)]) for i in range(50)]

    assert len(_names([Fresh(), Fresh(), Fresh()])) == 150


def test_attributes_of_tensors_are_found() -> None:
    weight = nn.Parameter(torch.zeros(3))
    weight.main_grad = torch.zeros(3)  # type: ignore[attr-defined]
    assert _names(weight) == ["v", "v.main_grad"]


def _parts(tensor: torch.Tensor) -> list[tuple[str, str]]:
    return [(name, why_left) for name, _, why_left in plain("t", tensor)]


def test_sparse_tensors_resolve_to_indices_and_values() -> None:
    dense = torch.eye(4)
    assert _parts(dense.to_sparse()) == [("t.indices", ""), ("t.values", "")]
    assert [n for n, _ in _parts(dense.to_sparse_csr())] == ["t.crow_indices", "t.col_indices", "t.values"]
    assert [n for n, _ in _parts(dense.to_sparse_csc())] == ["t.ccol_indices", "t.row_indices", "t.values"]
    assert len(_parts(dense.to_sparse_bsr((2, 2)))) == 3


def test_resolved_sparse_parts_are_the_memory_itself() -> None:
    sparse = torch.eye(4).to_sparse()
    with torch.no_grad():
        [values] = [tensor for name, tensor, _ in plain("t", sparse) if name == "t.values"]
        values.fill_(7.0)
    assert sparse.to_dense()[2, 2] == 7.0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_resolve_to_their_buffer(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    tensors = [tensor for _, tensor, why in plain("t", nested) if not why]
    assert any(t.numel() == 5 and bool((t == 1).all()) for t in tensors)
    assert not any(t.is_nested for t in tensors)


class _TwoParts(torch.Tensor):
    """A wrapper as quantized weights are: elements in one tensor, scales in another."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> _TwoParts:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.data_, made.scale_ = data, scale
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale_"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.detach.default:
            return _TwoParts(args[0].data_, args[0].scale_)
        raise NotImplementedError(func)


class _Secretive(torch.Tensor):
    """A wrapper that does not say what it holds."""

    @staticmethod
    def __new__(cls) -> _Secretive:
        return torch.Tensor._make_wrapper_subclass(cls, (3,))  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise NotImplementedError(func)


def test_wrapper_subclasses_resolve_recursively() -> None:
    inner = _TwoParts(torch.zeros(4, dtype=torch.int8), torch.ones(1))
    outer = _TwoParts(inner, torch.ones(2))
    assert [n for n, _ in _parts(outer)] == ["t.data_.data_", "t.data_.scale_", "t.scale_"]
    assert [n for n, _ in _parts(nn.Parameter(outer))] == [n for n, _ in _parts(outer)]


def test_a_plain_subclass_is_its_own_memory() -> None:
    class Labelled(torch.Tensor):
        pass

    assert _parts(torch.zeros(3).as_subclass(Labelled)) == [("t", "")]


def test_what_has_no_memory_is_left_with_the_reason() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(4)
    for tensor, reason in [
        (torch.empty(3, device="meta"), "meta"),
        (fake, "meta"),
        (nn.parameter.UninitializedParameter(), "lazy"),
        (nn.parameter.UninitializedBuffer(), "lazy"),
        (_Secretive(), "_Secretive without __tensor_flatten__"),
        (torch.randn(3, 3).to_mkldnn(), "opaque"),
    ]:
        [(name, why_left)] = _parts(tensor)
        assert name == "t"
        assert reason in why_left


class _Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 2, bias=False)
        self.again = self.child
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.register_buffer("absent", None)
        self.register_parameter("none", None)
        self.loose = torch.zeros(1)
        self.hidden = [nn.Linear(3, 3, bias=False), self]
        self.words = {"a": 1, "b": 2}


def test_every_place_of_a_module_is_told_apart() -> None:
    model = _Everything()
    model.child.weight.grad = torch.zeros(2, 2)
    held = {(h.name, h.place) for h in module_tensors("m", model)}
    assert held == {
        ("m.child.weight", Place.PARAMETER),
        ("m.child.weight.grad", Place.GRADIENT),
        ("m.kept", Place.BUFFER),
        ("m.scratch", Place.SCRATCH),
        ("m.loose", Place.ATTRIBUTE),
        ("m.hidden[0].weight", Place.PARAMETER),
    }


def test_without_a_name_the_paths_begin_at_the_top() -> None:
    assert {h.name for h in module_tensors("", nn.Sequential(nn.Linear(1, 1)))} == {"0.weight", "0.bias"}


def test_script_modules_are_walked() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    names = {h.name for h in module_tensors("m", scripted)}
    assert {"m.0.weight", "m.1.running_mean"} <= names


@pytest.mark.filterwarnings("error")
def test_attributes_inside_a_graph_are_not_asked_for_gradients() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.last = model(torch.ones(1, 2))
    assert {h.name for h in module_tensors("m", model)} == {"m.weight", "m.last"}


@pytest.mark.filterwarnings("ignore")
def test_torchao_weights_and_optimizer_state_resolve_to_codes_and_scales() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.optim.subclass_8bit import OptimState8bit

    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    weight = {h.name: h.tensor for h in module_tensors("m", model)}["m.0.weight"]
    found = {name: tensor for name, tensor, why_left in plain("w", weight) if not why_left}
    assert found["w.qdata"].dtype is torch.int8
    assert "w.scale" in found
    assert {n for n, _ in _parts(OptimState8bit.zeros((64, 64)))} == {"t.codes", "t.scale", "t.qmap"}
