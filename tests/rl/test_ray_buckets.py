"""Buckets: everything once, in order, to the bit, in no more memory than they say."""

import pickle
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from torpor.rl.runtimes.ray_buckets import Bucket, in_buckets

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn]


def tensors() -> dict[str, Tensor]:
    """Every dtype, with sizes that leave the next one at an odd byte, and the shapes that have none."""
    torch.manual_seed(0)
    found = {str(dtype): torch.randint(0, 2, (7, 3, 5)).to(dtype) for dtype in DTYPES}
    found["transposed"] = torch.randn(11, 13).t()
    found["scalar"] = torch.tensor(2.5, dtype=torch.float64)
    found["empty"] = torch.empty(0, 4)
    found["nan"] = torch.tensor([0x7FC12345, -1], dtype=torch.int32).view(torch.float32)
    return found


def through_ray(bucket: Bucket) -> Bucket:
    """As Ray does it: the array apart from the rest, and read-only where it arrives."""
    apart: list[pickle.PickleBuffer] = []
    rest = pickle.dumps(bucket, protocol=5, buffer_callback=apart.append)
    return pickle.loads(rest, buffers=[bytes(buffer.raw()) for buffer in apart])


@pytest.mark.parametrize("limit", [1, 300, 2**20])
def test_everything_comes_once_in_order_to_the_bit(limit: int) -> None:
    want = tensors()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        have = [item for bucket in in_buckets(want.items(), limit) for item in through_ray(bucket)]
    assert [name for name, _ in have] == list(want)
    for (name, tensor), other in zip(have, want.values(), strict=True):
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("limit", [1, 300, 2**20])
def test_a_bucket_is_within_its_limit_or_one_tensor(limit: int) -> None:
    for bucket in in_buckets(tensors().items(), limit):
        assert bucket.data.nbytes <= limit or len(bucket.places) == 1
        assert bucket.data.nbytes == bucket.places[-1].end
        assert len(pickle.dumps(bucket)) < bucket.data.nbytes + 4096


def test_neighbours_share_a_bucket_as_far_as_they_fit() -> None:
    weights = [(str(i), torch.ones(64, dtype=torch.uint8)) for i in range(5)]
    assert [len(bucket.places) for bucket in in_buckets(weights, 128)] == [2, 2, 1]


def test_a_tensor_is_done_with_before_the_next_is_asked_for() -> None:
    """Sources fill one buffer again and again."""

    def weights() -> Iterator[tuple[str, Tensor]]:
        buffer = torch.zeros(4)
        for i in range(6):
            yield str(i), buffer.fill_(i)
            buffer.fill_(np.nan)

    have = {name: tensor for bucket in in_buckets(weights(), 128) for name, tensor in bucket}
    assert {name: tensor.tolist() for name, tensor in have.items()} == {str(i): [float(i)] * 4 for i in range(6)}


def test_no_weights_are_no_buckets() -> None:
    assert list(in_buckets([])) == []
