from collections import Counter

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr_ext.wings.lab.dlrm.criteo import (
    parse_categories,
    parse_column,
    parse_dense,
)

FIELDS = st.one_of(
    st.just(b""),
    st.binary(max_size=12),
    st.integers(-(10**19), 10**19).map(lambda value: str(value).encode()),
    st.integers(0, 2**34).map(lambda value: f"{value:08x}".encode()),
    st.sampled_from([b"-", b"--1", b"+1", b"1_0", b" 1", b"FFFFFFFF", b"-ff", "٣".encode()]),
)


def plain_number(text: bytes, base: int) -> int | None:
    digits = b"0123456789" if base == 10 else b"0123456789abcdefABCDEF"
    body = text[1:] if base == 10 and text.startswith(b"-") else text
    limit = 18 if base == 10 else 8
    if not 1 <= len(body) <= limit or any(byte not in digits for byte in body):
        return None
    return int(text, base)


@settings(max_examples=200, deadline=None)
@given(
    before=st.lists(FIELDS, max_size=3),
    fields=st.lists(FIELDS, min_size=1, max_size=8),
    base=st.sampled_from([10, 16]),
)
def test_columns_are_parsed_like_one_field_at_a_time(
    before: list[bytes], fields: list[bytes], base: int
) -> None:
    # A slice, so that neither the offsets nor the data begin where their buffers do.
    column = pyarrow.array([*before, *fields], type=pyarrow.binary())[len(before) :]
    values, is_missing, is_malformed = parse_column(column, base)
    expected = [plain_number(field, base) for field in fields]
    assert is_missing.tolist() == [field == b"" for field in fields]
    assert is_malformed.tolist() == [
        field != b"" and number is None for field, number in zip(fields, expected, strict=True)
    ]
    assert values.tolist() == [number or 0 for number in expected]


def binary(*fields: bytes) -> pyarrow.Array:
    return pyarrow.array(fields, type=pyarrow.binary())


def test_dense_features_are_log_of_one_plus_what_is_positive() -> None:
    malformed: Counter[str] = Counter()
    dense = parse_dense([binary(b"0", b"1", b"-3", b"", b"x"), binary(*[b"99"] * 5)], malformed)
    assert dense.dtype == np.float32
    assert dense[:, 0] == pytest.approx([0.0, np.log(2.0), 0.0, 0.0, 0.0])
    assert dense[:, 1] == pytest.approx([np.log(100.0)] * 5)
    assert list(malformed.values()) == [1]


def test_missing_and_malformed_categories_are_zero_and_only_the_latter_counted() -> None:
    malformed: Counter[str] = Counter()
    categories = parse_categories(
        [binary(b"68fd1e64", b"", b"xyz"), binary(b"123456789", b"f", b"0F")], malformed
    )
    assert categories.tolist() == [[0x68FD1E64, 0, 0], [0, 15, 15]]
    assert list(malformed.values()) == [2]
