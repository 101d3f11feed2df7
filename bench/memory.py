"""Memory that direct I/O and streaming stores take: at the start of a page."""

from __future__ import annotations

import mmap

import torch

ALIGNMENT = 4096


def aligned_block(num_bytes: int) -> mmap.mmap:
    """Memory for direct I/O, of large pages where the system gives them, as the slots are."""
    block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def aligned_memory(num_bytes: int) -> memoryview:
    """Memory such as a table's: torch's own, no large pages asked for; written once."""
    memory = torch.ones(num_bytes + ALIGNMENT, dtype=torch.uint8)
    begin = -memory.data_ptr() % ALIGNMENT
    return memoryview(memory.numpy())[begin : begin + num_bytes]
