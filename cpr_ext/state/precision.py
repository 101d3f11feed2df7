"""How many bits a snapshot keeps of each row: the precisions, their bytes, and their rounding.

Rows are rounded in FBGEMM's row-wise layout. int8: one byte an element, then scale and bias as
float32. int4: two elements a byte, the first in the low half, then scale and bias as float16. The
functions here are the specification in NumPy; ``csrc/staging/row_rounding.h`` has the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cpr_ext.errors import UsageError

EXACT = "float32"
PRECISIONS = ("float32", "float16", "bfloat16", "int8", "int4")
STATE_PRECISIONS = ("float32", "float16", "bfloat16")
# Levels above the lowest one, of those that have a scale and a bias.
LEVELS = {"int8": 255, "int4": 15}
# Half a unit in the last place of a value between 1 and 2.
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
_SMALLEST_EXTENT = np.float32(2.0**-100)  # of a row with rounded values: limits below it round
_EPSILON = np.float32(1e-8)  # FBGEMM adds it to the range of a row in int8


@dataclass(frozen=True)
class Precision:
    """The precision in which snapshots keep float32 rows.

    Values of other dtypes, and all that is not a row of a table, are kept exactly.

    Attributes:
        base: of the weights in base snapshots: "float32" (exact), "float16", "bfloat16", "int8" or
            "int4".
        partial: of the weights in partial snapshots.
        state: of the per-row optimizer state in both: "float32" (exact), "float16" or "bfloat16".

    Raises:
        UsageError: another value.
    """

    base: str = EXACT
    partial: str = EXACT
    state: str = EXACT

    def __post_init__(self) -> None:
        for name, allowed in (
            ("base", PRECISIONS),
            ("partial", PRECISIONS),
            ("state", STATE_PRECISIONS),
        ):
            if (value := getattr(self, name)) not in allowed:
                reason = ""
                if name == "state" and value in PRECISIONS:
                    reason = ": optimizers divide by state, of which it makes small values zero"
                raise UsageError(
                    f"Precision.{name} is {value!r}{reason}; allowed: {', '.join(allowed)}"
                )

    @property
    def is_exact(self) -> bool:
        """Return whether nothing is rounded."""
        return (self.base, self.partial, self.state) == (EXACT, EXACT, EXACT)

    def of_weights(self, kind: str) -> str:
        """Return the precision of weights in snapshots of a kind, ``base`` or ``partial``."""
        return self.base if kind == "base" else self.partial


def stored_row_bytes(elements: int, precision: str) -> int:
    """Return the bytes of a row of ``elements`` float32 values in a precision."""
    if precision in LEVELS:
        return elements + 8 if precision == "int8" else -(-elements // 2) + 4
    return elements * (4 if precision == EXACT else 2)


def precision_of_row(elements: int, precision: str) -> str:
    """Return the precision that a row gets: float32 if another one saves no bytes."""
    saves = stored_row_bytes(elements, precision) < stored_row_bytes(elements, EXACT)
    return precision if saves else EXACT


def round_rows(rows: torch.Tensor, precision: str) -> torch.Tensor:
    """Return rows as a recovery returns them from a snapshot of this precision.

    Args:
        rows: (n, dim) float32. One that breaks the bound of :func:`fits` stays as it is.
    """
    values = rows.detach().cpu().numpy()
    if precision_of_row(values.shape[1], precision) == EXACT:
        return rows.clone()
    stored, kept = encode_rows(values, precision)
    rounded = decode_rows(stored, values.shape[1], precision)
    return torch.from_numpy(np.where(kept[:, None], rounded, values)).to(rows.device)


def fits(values: np.ndarray, rounded: np.ndarray, precision: str) -> np.ndarray:
    """Return (n,) bool: whether every value of a row is within the bound of its precision.

    int8, int4: half a step, (largest - smallest value of the row) / (2 * levels). float16,
    bfloat16: half a unit in the last place of the largest magnitude in the row. No row with an
    infinity or NaN fits. Computed in float32, as in the kernels. What rounds there is on the safe
    side, so a few rows that exact arithmetic would accept do not fit.
    """
    with np.errstate(all="ignore"):
        if precision in LEVELS:
            extent = values.max(1) - values.min(1)
            factor = np.float32((1 - 2.0**-20) / (2 * LEVELS[precision]))
        else:
            extent, factor = np.abs(values).max(1), np.float32(UNIT_ROUNDOFF[precision])
        limit = np.where(extent < _SMALLEST_EXTENT, np.float32(0), extent * factor)
        error = np.abs(values - rounded)
        return np.asarray((error <= limit[:, None]).all(1) & (extent <= np.finfo(np.float32).max))


def encode_rows(values: np.ndarray, precision: str) -> tuple[np.ndarray, np.ndarray]:
    """Return rows as a file has them: (n, stored_row_bytes) uint8, and (n,) bool, which fit.

    Those that do not are zeros there. The bytes are FBGEMM's, with one exception: FBGEMM adds an
    epsilon to the range of int8 rows. Rows that break the bound by that are rounded without it.

    Args:
        values: (n, dim) float32.
    """
    if not len(values):
        return np.empty((0, stored_row_bytes(values.shape[1], precision)), np.uint8), np.ones(
            0, bool
        )
    stored = _encode(values, precision, _EPSILON)
    kept = fits(values, decode_rows(stored, values.shape[1], precision), precision)
    if precision == "int8" and not kept.all():
        again = _encode(values[~kept], precision, np.float32(0))
        stored[~kept] = again
        kept[~kept] = fits(values[~kept], decode_rows(again, values.shape[1], "int8"), "int8")
    stored[~kept] = 0
    return stored, kept


def decode_rows(stored: np.ndarray, elements: int, precision: str) -> np.ndarray:
    """Return (n, elements) float32: the rows that :func:`encode_rows` stored."""
    if not len(stored):
        return np.empty((0, elements), np.float32)
    stored = np.ascontiguousarray(stored)
    if precision not in LEVELS:
        halves = torch.from_numpy(stored).view(getattr(torch, precision))
        return halves.to(torch.float32).numpy()
    if precision == "int8":
        levels, ends = stored[:, :elements], stored[:, elements:].copy().view(np.float32)
    else:
        packed, ends = stored[:, :-4], stored[:, -4:].copy().view(np.float16)
        levels = np.stack((packed & 15, packed >> 4), 2).reshape(len(stored), -1)[:, :elements]
    with np.errstate(all="ignore"):
        scale, bias = ends[:, :1].astype(np.float64), ends[:, 1:].astype(np.float64)
        return _round_sum(levels * scale, bias)  # the product is exact in float64


def _round_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the exact sum of float64 numbers, rounded once, to float32.

    A sum that float64 must round is rounded to odd there: rounding it again then changes nothing.
    Source: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008.
    """
    total = a + b
    part = total - a
    lost = (a - (total - part)) + (b - part)  # exact (Knuth)
    is_even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.copysign(np.inf, lost))
    return np.asarray(np.where(is_even & (lost != 0), odd, total).astype(np.float32))


def _encode(values: np.ndarray, precision: str, epsilon: np.float32) -> np.ndarray:
    with np.errstate(all="ignore"):
        if precision == "int8":
            return _encode_int8(values, epsilon)
        if precision == "int4":
            return _encode_int4(values)
    halves = torch.from_numpy(np.ascontiguousarray(values)).to(getattr(torch, precision))
    return np.array(halves.view(torch.uint8).numpy())


def _encode_int8(values: np.ndarray, epsilon: np.float32) -> np.ndarray:
    smallest, largest = _ends(values)
    extent = largest - smallest
    scale = extent / np.float32(255)
    levels = _round((values - smallest) * (np.float32(255) / (extent + epsilon)), 255)
    return _join(levels, scale, smallest)


def _encode_int4(values: np.ndarray) -> np.ndarray:
    least, largest = _ends(values)
    smallest = least.astype(np.float16)
    extent = largest - smallest.astype(np.float32)
    scale = np.where(extent == 0, np.float32(1), extent / np.float32(15)).astype(np.float16)
    inverse = np.float32(1) / scale.astype(np.float32)
    unusable = (scale == 0) | np.isinf(inverse)
    scale = np.where(unusable, np.float16(1), scale)
    inverse = np.where(unusable, np.float32(1), inverse)
    levels = _round((values - smallest.astype(np.float32)) * inverse, 15)
    if levels.shape[1] % 2:
        levels = np.pad(levels, ((0, 0), (0, 1)))
    return _join(levels[:, 0::2] | (levels[:, 1::2] << 4), scale, smallest)


def _ends(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (n, 1) each, the smallest and the largest value of a row; zeros have no sign."""
    zero = np.float32(0)
    return values.min(1, keepdims=True) + zero, values.max(1, keepdims=True) + zero


def _round(steps: np.ndarray, most: int) -> np.ndarray:
    """Round to the nearest level, ties to even, NaN to 0."""
    return np.asarray(np.nan_to_num(np.clip(np.rint(steps), 0, most)).astype(np.uint8))


def _join(levels: Any, *ends: Any) -> np.ndarray:
    parts = [np.ascontiguousarray(end).view(np.uint8) for end in ends]
    return np.asarray(np.concatenate([levels, *parts], 1))
