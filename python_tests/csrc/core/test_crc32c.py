"""csrc/core/crc32c.h: every backend gives the value of the bit-by-bit definition."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import UsageError


def _backends():
    try:
        native.crc32c(b"", backend="sse42")
    except UsageError:
        return ["portable", "best"]
    return ["portable", "sse42", "best"]


def _bitwise(data, crc=0):
    """RFC 3720: reflected polynomial 0x1EDC6F41, one bit at a time."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


# RFC 3720, B.4.
PUBLISHED = {
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
    b"123456789": 0xE3069283,
    b"": 0,
}

pytestmark = pytest.mark.parametrize("backend", _backends())


def test_published_vectors_are_reproduced(backend):
    for data, crc in PUBLISHED.items():
        assert native.crc32c(data, backend=backend) == crc


@given(st.binary(max_size=300), st.integers(0, 2**32 - 1))
def test_any_bytes_from_any_start_give_the_bitwise_value(backend, data, crc):
    assert native.crc32c(data, crc, backend=backend) == _bitwise(data, crc)


# 3072 bytes is where the SSE4.2 backend begins to run three streams side by side.
@given(st.integers(0, 20_000), st.integers(0, 20_000), st.integers(0, 7))
@example(3071, 0, 0)
@example(3072, 1, 0)
@example(3080, 3072, 1)
@example(9216, 3072, 3)
def test_a_checksum_may_be_continued_from_any_split(backend, size, split, shift):
    data = np.random.default_rng(size).integers(0, 256, size + shift, dtype=np.uint8)[shift:]
    split = min(split, size)
    whole = native.crc32c(data, backend=backend)
    head = native.crc32c(data[:split], backend=backend)
    assert native.crc32c(data[split:], head, backend=backend) == whole
    assert native.crc32c(data, backend="portable") == whole


def test_scattered_bytes_and_an_unknown_backend_are_refused(backend):
    data = np.arange(64, dtype=np.uint8)
    for scattered in (data[::2], data[::-1], data.reshape(8, 8).T):
        with pytest.raises(UsageError, match="contiguous"):
            native.crc32c(scattered, backend=backend)
    with pytest.raises(UsageError, match="best, portable, sse42"):
        native.crc32c(b"", backend=backend + "?")
