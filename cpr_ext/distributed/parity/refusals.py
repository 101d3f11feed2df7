"""What parity cannot protect, refused before training starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cpr_ext.distributed.parity.options import Parity
from cpr_ext.errors import UsageError
from cpr_ext.runtime.cuda import device_of
from cpr_ext.state.table import Table

_MEMORY = Path("/proc/meminfo")
# Deltas in memory at once, in steps: two kept and one being made here, two kept of peers.
_DELTAS = 5


def refuse_unprotected(tables: Sequence[Table], parity: Parity) -> None:
    """Refuse tables whose changes no delta would have.

    Raises:
        UsageError: names the table, why, and the remedy.
    """
    for table in tables:
        if (reason := _why_refused(table, parity)) is not None:
            raise UsageError(f"table '{table.name}' cannot be protected by parity: {reason}")


def require_memory(tables: Sequence[Table], parity: Parity) -> None:
    """Refuse a job whose parity would not fit into this machine's memory.

    Raises:
        UsageError: names what is needed and what is free.
    """
    rows = sum(row_bytes(table) * table.num_embeddings for table in tables)
    copies = sum(a.nbytes for table in tables for a in table.key_arrays().values())
    copies += sum(
        row_bytes(table) * table.num_embeddings
        for table in tables
        if device_of(table.weight) is not None
    )
    needed = rows // (parity.group_size - 1) + _DELTAS * min(parity.delta_bytes, rows) + copies
    free = free_bytes()
    if free is not None and needed > free:
        raise UsageError(
            f"parity needs up to {needed} bytes on this worker, {free} are free: use larger groups "
            "(group_size), or a smaller delta_bytes, or more memory"
        )


def free_bytes() -> int | None:
    """Memory that this machine can give; None: it does not say."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None


def row_bytes(table: Table) -> int:
    """Bytes of a row with its per-row state."""
    return sum(values[0].numel() * values.element_size() for values in table.arrays().values())


def _why_refused(table: Table, parity: Parity) -> str | None:
    if device_of(table.weight) is not None:
        if parity.rebuild_bytes_per_second is not None:
            return "its rows are on a GPU, so leave out rebuild_bytes_per_second"
        if table.lookups is not None or table.slots is not None:
            return (
                "its rows are on a GPU, and a fused kernel or a map of keys changes them, of which "
                "nothing was tested; keep them in CPU memory"
            )
    if table.optimizer is None and table.lookups is None and table.weight.requires_grad:
        return "no torch optimizer updates it; give its optimizer to the Checkpointer"
    if any(getattr(module, "max_norm", None) is not None for module in table.modules):
        return (
            "its module has a max_norm, by which the forward pass changes rows outside the "
            "optimizer; leave it out, or limit the norms of rows in the optimizer's step"
        )
    whole = row_bytes(table) * table.num_embeddings
    if not table.updates_only_looked_up_rows() and whole > parity.delta_bytes // 4:
        kind = "its fused optimizer" if table.lookups else type(table.optimizer).__name__
        return (
            f"{kind}, as it is set, changes every row at each step, {whole} bytes. Use SGD without "
            "momentum, Adagrad, SparseAdam or row-wise Adagrad, without weight decay; or raise "
            "Parity(delta_bytes=...) to four times that"
        )
    return None
