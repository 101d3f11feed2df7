"""How many bits a snapshot keeps of each row: the precisions, and their bytes.

A rounded row has a scale of its own, so that its bound holds whatever its values are. int8 is
FBGEMM's row-wise layout: one byte an element, then scale and bias as float32. float16: two bytes an
element, then a scale as float32, a power of two. ``csrc/staging/row_rounding.h`` has the kernels,
``python_tests/rounding.py`` the specification in NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpr_ext.errors import UsageError

EXACT = "float32"
PRECISIONS = ("float32", "float16", "int8")
STATE_PRECISIONS = ("float32", "float16")


@dataclass(frozen=True)
class Precision:
    """The precision in which snapshots keep float32 rows.

    Values of other dtypes, and all that is not a row of a table, are kept exactly.

    Attributes:
        base: of the weights in base snapshots: "float32" (exact), "float16" or "int8".
        partial: of the weights in partial snapshots.
        state: of the per-row optimizer state in both: "float32" (exact) or "float16".

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
    if precision == "int8":
        return elements + 8
    return elements * 2 + 4 if precision == "float16" else elements * 4


def precision_of_row(elements: int, precision: str) -> str:
    """Return the precision that a row gets: float32 if another one saves no bytes."""
    saves = stored_row_bytes(elements, precision) < stored_row_bytes(elements, EXACT)
    return precision if saves else EXACT
