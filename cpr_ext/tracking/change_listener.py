"""Who hears of the changes that a ``TableWatch`` sees."""

from __future__ import annotations

from typing import Protocol

import torch

from cpr_ext.state.table import Table


class ChangeListener(Protocol):
    """Hears of every change of tables, on the training thread."""

    def before_change(self, table: Table, row_ids: torch.Tensor) -> None:
        """Note that rows ``row_ids`` (n,) int64, perhaps repeated, are about to change."""

    def before_write(self, table: Table, row_ids: torch.Tensor) -> None:
        """Note that rows (n,) are about to be written past their optimizer, as is said first."""

    def changed_outside(self, table: Table) -> None:
        """Note that something else than its optimizer has changed a table, or may have."""
