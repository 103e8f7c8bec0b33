"""Fingerprints see every kind of damage; the CPU reference is what a GPU computes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.fingerprint import fingerprint, fingerprint_of_zeros, fingerprints
from torpor.fingerprint_reference import KEY0, KEY1, reference_digest

RNG = np.random.default_rng(7)


def on_cpu(data: bytes) -> bytes:
    return fingerprint(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte())


@pytest.fixture(params=[on_cpu, reference_digest], ids=["cpu", "reference"])
def digest(request: pytest.FixtureRequest):
    return request.param


def damaged(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def test_it_has_128_bits_and_depends_on_the_bytes_alone(digest):
    data = RNG.bytes(1000)
    assert len(digest(data)) == 16
    assert digest(data) == digest(bytes(data))


def test_every_flipped_bit_is_seen(digest):
    data = RNG.bytes(45)
    seen = {digest(data)}
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        seen.add(digest(bytes(flipped)))
    assert len(seen) == 8 * len(data) + 1


@pytest.mark.parametrize("word", [1, 2, 4, 8, 16, 64, 512])
def test_swapped_moved_and_zeroed_words_are_seen(digest, word):
    data = RNG.bytes(8 * word)
    words = [data[i : i + word] for i in range(0, len(data), word)]
    swapped = [b"".join(words[i] for i in (3, 1, 2, 0, 4, 5, 6, 7)), b"".join(reversed(words))]
    moved = [b"".join(words[1:] + words[:1]), b"".join(words[-1:] + words[:-1])]
    zeroed = [damaged(data, i * word, bytes(word)) for i in range(8)]
    assert len({digest(d) for d in (data, *swapped, *moved, *zeroed)}) == 13


def test_in_data_full_of_zeros_or_of_one_value_places_still_count(digest):
    block = RNG.bytes(64)
    seen = {digest(damaged(bytes(4096), 64 * i, block)) for i in range(64)}
    seen |= {digest(damaged(b"\x3f" * 4096, 64 * i, bytes(64))) for i in range(64)}
    assert len(seen) == 128


def test_flipping_the_sign_of_two_numbers_is_seen(digest):
    """What a sum of weakly mixed words misses: two changes of the top bit that cancel."""
    data = np.ones(512, np.float32)
    seen = set()
    for stride in (1, 2, 4, 8, 16, 64, 128):
        for start in range(0, 128, 4):
            other = data.copy()
            other[[start, start + stride]] *= -1
            seen.add(digest(other.tobytes()))
    assert len(seen) == 7 * 32
    assert digest((-data).tobytes()) != digest(data.tobytes())


def test_zeros_at_the_end_count(digest):
    assert len({digest(bytes(n)) for n in range(100)}) == 100
    data = RNG.bytes(24)
    assert len({digest(data + bytes(n)) for n in range(100)}) == 100


def test_the_reference_follows_its_definition():
    def product(x: int) -> int:
        return (x & 0xFFFFFFFF) * (x >> 32)

    data = RNG.bytes(37)
    padded = data + bytes(11)
    units = [
        (
            p,
            int.from_bytes(padded[16 * p :][:8], "little"),
            int.from_bytes(padded[16 * p + 8 :][:8], "little"),
        )
        for p in range(3)
    ]
    sums = [0, 0]
    for p, w0, w1 in [*units, (-1, len(data), 0)]:
        x0, x1 = (w0 + (p + 1) * KEY0) % 2**64, (w1 + (p + 1) * KEY1) % 2**64
        for i in range(5):
            if i % 2:
                x0 = (x0 + product(x1)) % 2**64
            else:
                x1 = (x1 + product(x0)) % 2**64
        sums = [(sums[0] + x0) % 2**64, (sums[1] + x1) % 2**64]
    assert reference_digest(data) == b"".join(s.to_bytes(8, "little") for s in sums)


def test_its_differences_do_not_repeat():
    """The change of one unit's sums under a fixed flip: among 2^18 units no two alike, in either sum."""
    num = 1 << 18
    for flip in (1 << 63, 1 << 31, (1 << 63) | (1 << 31), 1):
        words = RNG.integers(0, 2**64, (num, 2), dtype=np.uint64)
        before = _units(words)
        for mask in ([flip, 0], [0, flip], [flip, flip]):
            change = _units(words ^ np.array(mask, np.uint64)) - before
            assert len(np.unique(change[:, 0])) == num
            assert len(np.unique(change[:, 1])) == num


def _units(words):
    from torpor.fingerprint_reference import _rounds

    place = np.arange(1, len(words) + 1, dtype=np.uint64)
    return np.stack(_rounds(words[:, 0] + place * np.uint64(KEY0), words[:, 1] + place * np.uint64(KEY1)), axis=1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=6))
def test_many_blocks_at_once_are_as_one_by_one(parts):
    blocks = [torch.frombuffer(bytearray(b"x" + part), dtype=torch.uint8)[1:] for part in parts]
    assert fingerprints(blocks) == [fingerprint(block) for block in blocks]


def test_a_storage_has_the_fingerprint_of_its_bytes():
    blocks = [torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for nbytes in (0, 1, 1000)]
    assert fingerprints([block.untyped_storage() for block in blocks]) == fingerprints(blocks)
    assert fingerprints([blocks[2].untyped_storage(), blocks[1]]) == [fingerprint(blocks[2]), fingerprint(blocks[1])]


@pytest.mark.parametrize("nbytes", [0, 1, 240, 241, 2**18 - 1, 2**18, 2**18 + 1, 2**20 + 7])
def test_the_fingerprint_of_zeros_needs_no_zeros(nbytes):
    assert fingerprint_of_zeros(nbytes) == fingerprint(torch.zeros(nbytes, dtype=torch.uint8))
