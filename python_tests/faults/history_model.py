"""What random histories are made of: stores of which all is known, and ends in the middle."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cpr_ext.errors import RemoteError, StorageError
from cpr_ext.storage.manifest import Manifest
from python_tests.storage.remote.faulty_objects import MemoryObjects


class Objects(MemoryObjects):
    """Fails after so many states were added; None: never."""

    states_left: int | None = None

    def create(self, key: str, data: bytes) -> bool:
        if key.startswith("states/") and self.states_left is not None:
            if self.states_left == 0:
                raise RemoteError("503 Slow Down")
            self.states_left -= 1
        return super().create(key, data)


@dataclass
class Clone:
    """What the model knows of a store.

    Attributes:
        events: each change of it, from its creation on; a clone has those of its origin.
        is_known: False once it was mixed: nothing is known of its events.
        tokens: one of these is that of its newest state; several after a save that was cut off.
        must_refuse: a directory was put back: it is not to be recovered without a repair.
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
    commit, number = Manifest.commit, 0

    def fail(self: Manifest, *arguments: Any, **named: Any) -> None:
        nonlocal number
        number += 1
        if number <= at or (number == at + 1 and is_after):
            commit(self, *arguments, **named)
        if number > at:
            raise StorageError(errno.EIO, "cut off", str(self.directory))

    with patch.object(Manifest, "commit", fail):
        yield
