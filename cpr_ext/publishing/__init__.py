"""Rows that changed since a position, for systems that serve a model while it trains."""

from cpr_ext.publishing.changed_rows import ChangedRows, changed_rows
from cpr_ext.publishing.places import read_publication
from cpr_ext.publishing.publication import Publication
from cpr_ext.publishing.publisher import PublishReport, publish
from cpr_ext.publishing.row_batch import RowBatch
from cpr_ext.publishing.store_position import PositionError, StorePosition
from cpr_ext.publishing.subscriber import Applied, Subscriber

__all__ = [
    "Applied",
    "ChangedRows",
    "PositionError",
    "Publication",
    "PublishReport",
    "RowBatch",
    "StorePosition",
    "Subscriber",
    "changed_rows",
    "publish",
    "read_publication",
]
