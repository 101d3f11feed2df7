"""What one examination found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CheckStatus = Literal["ok", "note", "wrong"]


@dataclass(frozen=True)
class Check:
    """One thing that was examined.

    Attributes:
        name: what it is.
        status: ``ok``; ``note``: something optional is missing or slow; ``wrong``: the library
            cannot do its work.
        found: versions, speeds, names.
        remedy: what to do about it; empty if there is nothing to do.
    """

    name: str
    status: CheckStatus
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All that was examined."""

    checks: Sequence[Check]

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong; notes may remain."""
        return all(check.status != "wrong" for check in self.checks)
