"""A position in the history of a store: which commits a consumer of its rows has seen."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from cpr_ext.errors import DamageError, StoreError
from cpr_ext.state.dtypes import DTYPE_NAMES
from cpr_ext.state.position import is_count
from cpr_ext.storage.store_reader import StoreReader


class PositionError(StoreError):
    """The changes since a position are not known: a full copy is needed."""


@dataclass(frozen=True)
class StorePosition:
    """One committed state of a store.

    Attributes:
        model: digest of the store's tables.
        snapshot, step, num_samples: of the newest snapshot that was committed as a whole.
        rows: the id of the snapshot that wrote the newest segment of rows; empty: none.
    """

    model: str
    snapshot: int
    step: int
    num_samples: int
    rows: str

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> StorePosition:
        """Invert :meth:`to_json`.

        Raises:
            DamageError: it is no position.
        """
        try:
            position = cls(**value)
        except TypeError as error:
            raise DamageError(f"not a position in a store: {error!r:.200}") from error
        counts = (position.snapshot, position.step, position.num_samples)
        digests = (position.model, position.rows)
        if not all(map(is_count, counts)) or not all(isinstance(text, str) for text in digests):
            raise DamageError(f"not a position in a store: {value!r:.200}")
        return position


def model_digest(reader: StoreReader) -> str:
    """Return a digest of what a store holds rows of."""
    tables = [
        (name, table.num_embeddings, table.embedding_dim, DTYPE_NAMES[table.dtype])
        for name, table in sorted(reader.tables.items())
    ]
    text = json.dumps(tables)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
