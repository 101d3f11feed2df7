"""The rows of a snapshot, copied on their own GPU at one step.

A GPU copies rows within its memory many times as fast as to the host. So all rows of a partial
snapshot are copied there in one step, and go to the host while training continues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cpr_ext._native import native
from cpr_ext.runtime.cuda import device_of, stager_of
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.saving.segment_capture import Source, TableSource, table_source
from cpr_ext.saving.selection import Selection
from cpr_ext.state.table import Table

logger = logger_of("saving")


def bytes_of(selections: Sequence[Selection]) -> int:
    """Return the bytes of all rows, with every per-row state, and of their ids on the device."""
    return sum(
        selection.num_rows * (8 + array.element_size() * array[:1].numel())
        for selection in selections
        for array in selection.table.arrays().values()
    )


def gather(
    selections: Sequence[Selection],
    max_bytes: int,
    source_of: Callable[[Table], TableSource],
    precision_of: Callable[[str], str],
) -> list[Source] | None:
    """Copy the rows as they are when training's streams get here.

    Args:
        source_of: what the rows of a table are captured from.
        precision_of: of an array of a table, by its name. The copies are exact; they are rounded
            on their way to the host.

    Returns:
        What to capture each selection from; None if the copies take more than ``max_bytes``, or
        more than a device has.
    """
    needed = bytes_of(selections)
    if needed > max_bytes:
        logger.info(
            "a snapshot's rows of %d bytes are not gathered at one step: gather_bytes is %d",
            needed,
            max_bytes,
        )
        return None
    try:
        sources = [_gathered(each, source_of(each.table), precision_of) for each in selections]
    except torch.cuda.OutOfMemoryError as error:
        logger.info("a snapshot's rows are not gathered at one step: %s", error)
        return None
    weights = (each.table.weight for each in selections)
    for weight in {device_of(weight): weight for weight in weights}.values():
        stager_of(weight).settle()
    return sources


def _gathered(
    selection: Selection, source: TableSource, precision_of: Callable[[str], str]
) -> Source:
    hashes, num_arrays = source.hashes
    _record(selection, list(source.arrays.values())[:num_arrays], hashes)
    arrays = {name: array.detach() for name, array in source.arrays.items()}
    if selection.row_ids is None:
        copies = {name: array.clone() for name, array in arrays.items()}
    elif selection.chosen is not None:
        copies = _copies_of_chosen(arrays, selection)
    else:
        device = selection.table.weight.device
        row_ids = torch.from_numpy(selection.row_ids).to(device, non_blocking=True)
        copies = {name: array.index_select(0, row_ids) for name, array in arrays.items()}
    of_copies = table_source(selection.table.name, copies, precision_of, is_packed=True)
    if selection.row_ids is None:
        return of_copies.range(0, selection.num_rows)
    return of_copies.rows(selection.row_ids)


def _record(selection: Selection, arrays: list[torch.Tensor], hashes: Any) -> None:
    if selection.row_ids is None:
        hashes.record_range(arrays, 0, selection.num_rows)
    elif selection.chosen is not None:
        hashes.record_chosen(arrays, selection.chosen)
    else:
        hashes.record(arrays, selection.row_ids)


def _copies_of_chosen(
    arrays: Mapping[str, torch.Tensor], selection: Selection
) -> dict[str, torch.Tensor]:
    """Copy rows whose ids the GPU still has: nothing is uploaded, in one launch per table."""
    copies = {
        name: array.new_empty((selection.num_rows, *array.shape[1:]))
        for name, array in arrays.items()
    }
    assert selection.chosen is not None
    native.gather_chosen(
        tables=list(arrays.values()), chosen=selection.chosen, outs=list(copies.values())
    )
    return copies
