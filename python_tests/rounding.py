"""The rounding of rows in snapshots, specified in NumPy; see ``cpr_ext/state/precision.py``."""

import numpy as np
import torch

from cpr_ext.state.precision import EXACT, precision_of_row

_LARGEST = np.finfo(np.float32).max
_SMALLEST_RANGE = np.float32(2.0**-100)  # values closer together are stored as one
_ROUNDING = np.float32(1.5 * 2**23)  # float32 has no bits after the point beyond 2^23


def round_rows(rows: torch.Tensor, precision: str) -> torch.Tensor:
    """Return rows (n, dim) float32 as a recovery returns them from a snapshot of this precision."""
    values = rows.detach().cpu().numpy()
    if precision_of_row(values.shape[1], precision) == EXACT:
        return rows.clone()
    rounded = decode_rows(encode_rows(values, precision), values.shape[1], precision)
    return torch.from_numpy(rounded).to(rows.device)


def bound(values: np.ndarray, precision: str) -> np.ndarray:
    """Return (n,) float64, by how much a value of each row (n, dim) float32 is off at most.

    int8: half a step, a step being the row's largest value less its smallest, over 255; and what
    float32 rounds, 2^-20 of the largest magnitude. float16: 2^-11 of the largest magnitude. To
    either 2^-100, which is more only in rows of no larger values or range. NaN: the row has no
    range, as it has an infinity or NaN, or its values are further apart than the largest float32
    (in int8). All of such a row becomes NaN.
    """
    with np.errstate(all="ignore"):
        exact = values.astype(np.float64)
        largest, tiny = np.abs(exact).max(1), 2.0**-100
        extent = exact.max(1) - exact.min(1) if precision == "int8" else largest
        limit = (
            extent / 510 + largest * 2.0**-20 if precision == "int8" else largest * 2.0**-11
        ) + tiny
        has_range = extent.astype(np.float32) <= _LARGEST
    return np.asarray(np.where(has_range, limit, np.nan))


def encode_rows(values: np.ndarray, precision: str) -> np.ndarray:
    """Return rows (n, dim) float32 as a file has them: (n, stored_row_bytes) uint8."""
    with np.errstate(all="ignore"):
        return _encode_int8(values) if precision == "int8" else _encode_float16(values)


def decode_rows(stored: np.ndarray, elements: int, precision: str) -> np.ndarray:
    """Return (n, elements) float32: the rows that :func:`encode_rows` stored."""
    if precision == "int8":
        ends = stored[:, elements:].copy().view(np.float32)
        scaled = stored[:, :elements].astype(np.float32) * ends[:, :1]
        return np.asarray(scaled + ends[:, 1:])
    halves = stored[:, : 2 * elements].copy().view(np.float16)
    return np.asarray(halves.astype(np.float32) * stored[:, 2 * elements :].copy().view(np.float32))


def _encode_int8(values: np.ndarray) -> np.ndarray:
    zero = np.float32(0)
    smallest = values.min(1, keepdims=True) + zero  # zeros have no sign
    extent = values.max(1, keepdims=True) + zero - smallest
    is_wide = extent >= _SMALLEST_RANGE
    scale = np.where(is_wide, extent / np.float32(255), zero)
    inverse = np.where(is_wide, np.float32(255) / extent, zero)
    levels = ((values - smallest) * inverse + _ROUNDING).view(np.int32).astype(np.uint8)
    return _join(levels, extent <= _LARGEST, scale, smallest)


def _encode_float16(values: np.ndarray) -> np.ndarray:
    magnitude = np.abs(values).max(1, keepdims=True)
    # The largest magnitude comes to lie in [2^14, 2^15): so float16 has the most bits for others.
    exponent = np.maximum(magnitude.view(np.int32) >> 23, 27)  # of float32, which has 127 for 1
    scale = ((exponent - 14) << 23).view(np.float32)
    halves = (values * ((268 - exponent) << 23).view(np.float32)).astype(np.float16)
    return _join(halves.view(np.uint8), magnitude <= _LARGEST, scale)


def _join(codes: np.ndarray, has_range: np.ndarray, *ends: np.ndarray) -> np.ndarray:
    """Return the bytes of rows; those of a row without a range are zeros, and NaN at the end."""
    nan = np.float32(np.nan)
    kept = [np.where(has_range, end, nan).astype(np.float32).view(np.uint8) for end in ends]
    return np.concatenate([np.where(has_range, codes, np.uint8(0)), *kept], 1)
