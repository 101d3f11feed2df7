"""Turns the text fields of a Criteo log into numbers, a column at a time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from cpr_ext.wings.lab.dlrm.array_types import Bool, Int64

NUM_DENSE = 13
NUM_TABLES = 26
NUM_FIELDS = 1 + NUM_DENSE + NUM_TABLES

_MAX_DIGITS = {10: 18, 16: 8}
_NOT_A_DIGIT = 255


def _digit_values(digits: bytes) -> npt.NDArray[np.uint8]:
    values = np.full(256, _NOT_A_DIGIT, dtype=np.uint8)
    for value, digit in enumerate(digits):
        values[digit] = values[bytes([digit]).upper()[0]] = value
    return values


_DIGIT_VALUES = {10: _digit_values(b"0123456789"), 16: _digit_values(b"0123456789abcdef")}


def parse_column(column: Any, base: int) -> tuple[Int64, Bool, Bool]:
    """Return numbers of a column of text.

    Args:
        column: pyarrow binary array (num_rows,) without nulls.
        base: 10 (with an optional minus sign, up to 18 digits) or 16 (up to 8 digits).

    Returns:
        The numbers, int64 (num_rows,), 0 where there is none; where the field is empty; where it
        is not empty and not a number.
    """
    _, offset_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int32)
    offsets = offsets[column.offset : column.offset + len(column) + 1].astype(np.int64)
    start, stop = offsets[:-1], offsets[1:]
    is_missing = start == stop
    values = np.zeros(len(column), dtype=np.int64)
    if is_missing.all():
        return values, is_missing, np.zeros_like(is_missing)
    data = np.frombuffer(data_buffer, dtype=np.uint8)
    last = len(data) - 1
    is_negative = np.zeros_like(is_missing)
    if base == 10:
        is_negative = (data[np.minimum(start, last)] == ord("-")) & ~is_missing
    first_digit = start + is_negative
    num_digits = stop - first_digit
    is_malformed = ~is_missing & ((num_digits < 1) | (num_digits > _MAX_DIGITS[base]))
    digit_of = _DIGIT_VALUES[base]
    for position in range(min(int(num_digits.max()), _MAX_DIGITS[base])):
        is_inside = num_digits > position
        digit = digit_of[data[np.minimum(first_digit + position, last)]]
        is_malformed |= is_inside & (digit == _NOT_A_DIGIT)
        values = np.where(is_inside, values * base + digit, values)
    values[is_malformed] = 0
    return np.where(is_negative, -values, values), is_missing, is_malformed


def parse_labels(column: Any) -> tuple[npt.NDArray[np.float32], Bool]:
    """Return labels, float32 (num_rows,), and where they are 0 or 1 as they must be."""
    values, is_missing, is_malformed = parse_column(column, 10)
    is_label = ~is_missing & ~is_malformed & (values >= 0) & (values <= 1)
    return values.astype(np.float32), is_label


def parse_dense(columns: list[Any], malformed: Counter[str]) -> npt.NDArray[np.float32]:
    """Return integer features as log(max(x, 0) + 1), float32 (num_rows, 13).

    This is the transform of the published DLRM runs of Facebook and NVIDIA. An empty field counts
    as 0, and so does a malformed one, which is counted in `malformed`.
    """
    integers = np.empty((len(columns[0]), len(columns)), dtype=np.float32)
    for feature, column in enumerate(columns):
        values, _, is_malformed = parse_column(column, 10)
        malformed["integer features that are not a whole number, taken as missing"] += int(
            is_malformed.sum()
        )
        integers[:, feature] = np.maximum(values, 0)
    return np.log1p(integers)


def parse_categories(columns: list[Any], malformed: Counter[str]) -> Int64:
    """Return categorical features as the number their hex digits write, int64 (26, num_rows).

    An empty field is category 0, as in the published DLRM runs, and so is a malformed one, which
    is counted in `malformed`.
    """
    categories = np.empty((len(columns), len(columns[0])), dtype=np.int64)
    for table, column in enumerate(columns):
        categories[table], _, is_malformed = parse_column(column, 16)
        malformed["categorical features that are not 1-8 hex digits, taken as missing"] += int(
            is_malformed.sum()
        )
    return categories
