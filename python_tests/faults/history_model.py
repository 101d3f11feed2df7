"""What random histories are made of: stores of which all is known, and ends in the middle."""

from __future__ import annotations

import errno
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from cpr_ext.errors import RemoteError, StorageError
from cpr_ext.storage import manifest, store
from cpr_ext.wings.remote.head import HEAD
from python_tests.wings.remote.faulty_objects import MemoryObjects


class Objects(MemoryObjects):
    """Fails after so many states were added; None: never."""

    states_left: int | None = None

    def replace(self, key: str, data: bytes, tag: str | None) -> str | None:
        if key == HEAD and self.states_left is not None:
            if self.states_left == 0:
                raise RemoteError("503 Slow Down")
            self.states_left -= 1
        return super().replace(key, data, tag)


@dataclass
class Clone:
    """What the model knows of a store.

    Attributes:
        events: each change of it, from its creation on; a clone has those of its origin.
        is_known: False once it was mixed: nothing is known of its events.
        tokens: one of these is that of its newest state; several after a save that was cut off.
        must_refuse: a part was put back: it is not to be recovered without a repair.
        is_exact: the last recovery claimed that no row is older; a copy of a mixed store does not.
    """

    directory: Path
    events: list[int] = field(default_factory=list)
    is_known: bool = True
    tokens: set[int] = field(default_factory=lambda: {0})
    must_refuse: bool = False
    is_exact: bool = True


@contextmanager
def cut_off(at: int, *, is_after: bool) -> Iterator[None]:
    """Fail the commit of number ``at`` and all after it; ``is_after``: it is durable."""
    write, number = manifest.write_manifest, 0

    def fail(directory: Path, committed: manifest.Manifest) -> None:
        nonlocal number
        number += 1
        if number <= at or (number == at + 1 and is_after):
            write(directory, committed)
        if number > at:
            raise StorageError(errno.EIO, "cut off", str(directory))

    repair = importlib.import_module("cpr_ext.wings.tools.maintenance.repair")
    with (
        patch.object(store, "write_manifest", fail),
        patch.object(repair, "write_manifest", fail),
    ):
        yield
