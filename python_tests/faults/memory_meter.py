"""How much memory a case took: the most that was resident while it ran, less what was before.

Of a sanitizer's build it counts what the sanitizer adds as well: red zones, shadow memory, and
blocks that are freed and kept from use.
"""

from __future__ import annotations

import gc
import re
from pathlib import Path

SPARE_BYTES = 64 << 20
# A file can be made long at no cost, and then justifies as much; no case is to take more than this.
MOST_BYTES = 512 << 20


def allowed_bytes(store_bytes: int) -> int:
    """What may be taken to read a store of that size."""
    return min(2 * store_bytes + SPARE_BYTES, MOST_BYTES)


class MemoryMeter:
    """Measures from :meth:`begin` on."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the peak until now."""
        gc.collect()  # or what others left is freed later, and hides as much as it had
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status_bytes("VmRSS")

    def grown_bytes(self) -> int:
        """The peak since :meth:`begin`, less what was resident then."""
        return _status_bytes("VmHWM") - self._before


def _status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, name
    return int(found[1]) * 1024
