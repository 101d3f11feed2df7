"""csrc/core/crc32c.h: every backend gives the value of the bit-by-bit definition."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import UsageError


def _backends() -> list[str]:
    try:
        native.crc32c(b"", backend="sse42")
    except UsageError:
        return ["portable", "best"]
    return ["portable", "sse42", "best"]


def _bitwise(data: bytes, crc: int = 0) -> int:
    """RFC 3720: reflected polynomial 0x1EDC6F41, one bit at a time."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


RFC_3720_B_4 = {
    "zeroes": (bytes(32), 0x8A9136AA),
    "ones": (b"\xff" * 32, 0x62A8AB43),
    "incrementing": (bytes(range(32)), 0x46DD794E),
    "decrementing": (bytes(range(31, -1, -1)), 0x113FDB5C),
    "iscsi_read": (
        bytes.fromhex(
            "01c00000 00000000 00000000 00000000 14000000 00000400"
            "00000014 00000018 28000000 00000000 02000000 00000000"
        ),
        0xD9963A56,
    ),
    "check": (b"123456789", 0xE3069283),
    "empty": (b"", 0),
}

pytestmark = pytest.mark.parametrize("backend", _backends())


@pytest.mark.parametrize("vector", RFC_3720_B_4.values(), ids=RFC_3720_B_4)
def test_published_vectors_are_reproduced(backend, vector):
    data, crc = vector
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


@given(st.integers(1, 8192), st.data())
def test_any_flipped_bit_changes_the_checksum(backend, size, data):
    block = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    before = native.crc32c(block, backend=backend)
    block[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert native.crc32c(block, backend=backend) != before


def test_bytes_that_do_not_lie_together_are_refused_instead_of_read_past(backend):
    data = np.arange(64, dtype=np.uint8)
    for scattered in (data[::2], data[::-1], data.reshape(8, 8).T):
        with pytest.raises(UsageError, match="contiguous"):
            native.crc32c(scattered, backend=backend)


def test_an_unknown_backend_is_refused_with_the_allowed_names(backend):
    with pytest.raises(UsageError, match="best, portable, sse42"):
        native.crc32c(b"", backend=backend + "?")
