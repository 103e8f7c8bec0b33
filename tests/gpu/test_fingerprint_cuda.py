"""The GPU's fingerprint is the reference's, bit for bit, whatever the sizes and alignments."""

import numpy as np
import pytest
import torch

from gpu import DEVICE, MIB
from torpor.fingerprint import fingerprint, fingerprints
from torpor.fingerprint_reference import reference_digest
from torpor.memory.base import byte_view

pytest.importorskip("triton", reason="only a GPU's torch brings Triton")


def random_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=DEVICE)


def test_it_is_the_reference_for_all_sizes_and_alignments():
    from torpor.fingerprint_cuda import CHUNK_BYTES

    sizes = [0, 1, 7, 15, 16, 17, 31, 4096, 16 * 1024, 16 * 1024 + 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1]
    sizes += [3 * CHUNK_BYTES + 12345, 5 * MIB + 8]
    whole = random_bytes(sum(sizes) + 64 * len(sizes) * 2)
    blocks, at = [], 0
    for shift in (0, 1, 4, 8, 15):
        at = 0
        for size in sizes:
            at += -at % 16 + shift
            blocks.append(whole[at : at + size])
            at += size
    assert fingerprints(blocks) == [reference_digest(block.cpu().numpy()) for block in blocks]


def test_20000_small_blocks_and_one_large():
    blocks = [random_bytes(int(n)) for n in np.random.default_rng(0).integers(16, 3000, 20_000)]
    blocks.append(random_bytes(64 * MIB + 3))
    digests = fingerprints(blocks)
    assert len(set(digests)) == len(blocks)
    for i in (0, 1, 777, 19_999, 20_000):
        assert digests[i] == reference_digest(blocks[i].cpu().numpy())


def test_damage_is_seen_on_the_device():
    x = torch.randn(4 * MIB, device=DEVICE)
    view = byte_view(x.untyped_storage())
    seen = {fingerprint(view)}
    for bit in range(64):
        view[9999 + 100_000 * bit] ^= 1 << bit % 8
        seen.add(fingerprint(view))
    x[:1024] = x[1024:2048].clone()
    seen.add(fingerprint(view))
    x[5000:6000].zero_()
    seen.add(fingerprint(view))
    x[[1, 2]] = x[[2, 1]]
    seen.add(fingerprint(view))
    assert len(seen) == 68


def test_blocks_of_cpu_and_gpu_mix():
    on_gpu = random_bytes(1000)
    on_cpu = on_gpu.cpu()
    mixed = fingerprints([on_cpu, on_gpu, on_cpu])
    assert mixed[0] == mixed[2] == fingerprint(on_cpu)
    assert mixed[1] == reference_digest(on_cpu.numpy())


@pytest.mark.exclusive
def test_it_does_not_wait_for_copies_to_the_host():
    device, host = random_bytes(2048 * MIB), torch.empty(2048 * MIB, dtype=torch.uint8, pin_memory=True)
    blocks = [random_bytes(16 * MIB) for _ in range(4)]
    expected = fingerprints(blocks)
    torch.cuda.synchronize()
    over, copying = torch.cuda.Event(), torch.cuda.Stream()
    with torch.cuda.stream(copying):
        for begin in range(0, len(host), 64 * MIB):
            host[begin : begin + 64 * MIB].copy_(device[begin : begin + 64 * MIB], non_blocking=True)
        over.record()
    assert fingerprints(blocks) == expected
    assert not over.query(), "some 40 ms of copies are over before a millisecond of fingerprints"
    copying.synchronize()
