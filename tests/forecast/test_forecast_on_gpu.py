"""The formulas against the libraries themselves: TransformerEngine's shapes, and PyTorch's allocator."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest

from torpor.forecast.recipes import BOTH, ROW, Architecture, Directions, Format, Recipe
from torpor.forecast.segments import segment_bytes

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]

SHAPES = [(4096, 8192), (576, 6144), (1216, 2560), (64, 2048), (192, 1536), (28672, 4096)]


def bytes_of_specs(specs: dict[str, tuple[tuple[int, ...], Any]]) -> int:
    """Bytes of `inner_tensor_specs`, which is what TransformerEngine allocates for a quantized tensor."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs.values())


def quantizer(name: Format, directions: Directions) -> Any:
    """The weight quantizer of a recipe, as TransformerEngine 2.20 builds it."""
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    usage = {"rowwise": directions.row, "columnwise": directions.column}
    match name:
        case Format.FP8_CURRENT:
            return Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cuda"), **usage)
        case Format.FP8_BLOCKWISE:
            return Float8BlockQuantizer(DType.kFloat8E4M3, block_scaling_dim=2, **usage)
        case Format.MXFP8:
            return MXFP8Quantizer(DType.kFloat8E4M3, **usage)
        case Format.NVFP4:
            return NVFP4Quantizer(with_2d_quantization=True, **usage)
    raise AssertionError(name)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("directions", [ROW, BOTH], ids=["row", "both"])
@pytest.mark.parametrize("name", [Format.FP8_BLOCKWISE, Format.FP8_CURRENT, Format.MXFP8, Format.NVFP4])
def test_bytes_of_a_quantized_weight(name: Format, directions: Directions, shape: tuple[int, int]) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    blackwell = name in (Format.MXFP8, Format.NVFP4) or is_non_tn_fp8_gemm_supported()
    recipe = Recipe(format=name, architecture=Architecture.BLACKWELL if blackwell else Architecture.HOPPER)
    specs = quantizer(name, directions).inner_tensor_specs(shape)
    assert recipe.weight_bytes(*shape, directions) == bytes_of_specs(specs)


def test_a_cached_weight_after_a_training_step() -> None:
    te = pytest.importorskip("transformer_engine.pytorch")
    from transformer_engine.common.recipe import Float8BlockScaling

    linear = te.Linear(2048, 576 + 64, bias=False, params_dtype=torch.bfloat16, device="cuda")
    rows = torch.randn(256, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with te.fp8_autocast(enabled=True, fp8_recipe=Float8BlockScaling()):
        out = linear(rows, is_first_microbatch=True)
    out.sum().backward()
    (workspace,) = linear._fp8_workspaces.values()
    names = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
    held = sum(getattr(workspace, name).nbytes for name in names)
    assert held == Recipe(format=Format.FP8_BLOCKWISE).weight_bytes(576 + 64, 2048, BOTH)


def reserved_bytes(sizes: Iterable[int]) -> int:
    """What PyTorch's caching allocator takes for tensors of these sizes, in this order, in an empty pool."""
    pool = torch.cuda.MemPool()  # elsewhere a small segment of somebody else's may have room
    with torch.cuda.use_mem_pool(pool):
        held = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    taken = sum(segment["total_size"] for segment in pool.snapshot())
    del held
    return taken


@pytest.mark.parametrize("shape", [(2560, 9728), (768, 2048), (4096, 2048), (1024, 4096)], ids=str)
@pytest.mark.parametrize("name", [Format.FP8_BLOCKWISE, Format.MXFP8, Format.NVFP4])
def test_segments_of_a_cache(name: Format, shape: tuple[int, int]) -> None:
    recipe = Recipe(format=name, architecture=Architecture.BLACKWELL)
    sizes = [size for _ in range(24) for size in recipe.tensors(*shape, BOTH)]
    assert reserved_bytes(sizes) == segment_bytes(sizes)


def test_segments_of_mixed_sizes() -> None:
    mib = 1024**2
    sizes = [1, 700 * 1024, mib, mib + 1, 9 * mib, 3 * mib, 10 * mib, 10 * mib - 512, 21 * mib, 5 * mib, 512]
    assert reserved_bytes(sizes) == segment_bytes(sizes)
