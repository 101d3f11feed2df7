"""Random identities: of stores, of snapshots and of commits."""

from __future__ import annotations

import re
import uuid
from typing import Any

_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_SIZE = 32


def new_id() -> str:
    """Return an identity that nothing else has."""
    return uuid.uuid4().hex


def is_id(value: Any) -> bool:
    """Return whether it is an identity."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def split_ids(listed: str) -> tuple[str, ...]:
    """Return the identities of a text that holds nothing else."""
    return tuple(listed[at : at + _SIZE] for at in range(0, len(listed), _SIZE))
