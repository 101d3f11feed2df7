"""Rows that changed since a position, for systems that serve a model while it trains."""

from cpr_ext.wings.publishing.changed_rows import (
    ChangedRows,
    PositionError,
    RowBatch,
    StorePosition,
    changed_rows,
)
from cpr_ext.wings.publishing.keyed_rows import KeyBatch, KeyedRows, by_key
from cpr_ext.wings.publishing.places import read_publication
from cpr_ext.wings.publishing.publication import Publication
from cpr_ext.wings.publishing.publisher import PublishReport, publish
from cpr_ext.wings.publishing.subscriber import Applied, Subscriber

__all__ = [
    "Applied",
    "ChangedRows",
    "KeyBatch",
    "KeyedRows",
    "PositionError",
    "Publication",
    "PublishReport",
    "RowBatch",
    "StorePosition",
    "Subscriber",
    "by_key",
    "changed_rows",
    "publish",
    "read_publication",
]
