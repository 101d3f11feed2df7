"""Closes the connections of a group of gloo while others still refer to it.

Torch's ``abort()`` closes none of them. Gloo closes them once nothing refers to the group or to a
work of it. Modules, pipelines and the frames of an exception keep works. Until all are dropped, a
peer that waits for this process would wait for the whole time-out of its collective.

Gloo names no connection of a group, so they are found among the process's sockets: members publish
their listening addresses in the group's store, and each connection leads to one of these.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class AddressStore(Store):
    """A store that passes all on to ``store``, and remembers the addresses that members publish."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._published: list[bytes] = []

    # Torch calls these by name, some with positional arguments only.
    def set(self, key: str, value: str | bytes) -> None:
        """Set a value in place of any that is there."""
        self._published.append(value if isinstance(value, bytes) else value.encode())
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Return a value once it is there."""
        value = self._store.get(key)
        self._published.append(value)
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all these values are there."""
        return self._store.check(list(keys))

    def wait(self, keys: Sequence[str], time_out: timedelta | None = None) -> None:
        """Return once all these values are there."""
        if time_out is None:
            self._store.wait(list(keys))
        else:
            self._store.wait(list(keys), time_out)

    def set_timeout(self, time_out: timedelta) -> None:
        """Wait for so long where a call does not say."""
        self._store.set_timeout(time_out)

    def close_connections(self) -> int:
        """Close the connections of the group that was formed with this store; returns how many.

        Every collective that waits for one of them fails at once, here and in the peers.
        """
        num_closed = 0
        for connection in _open_sockets():
            with connection, suppress(OSError):  # not connected, or closed meanwhile
                ends = _packed(connection.getpeername()), _packed(connection.getsockname())
                if any(end in value for end in ends for value in self._published):
                    connection.shutdown(socket.SHUT_RDWR)
                    num_closed += 1
        return num_closed


def _open_sockets() -> Iterator[socket.socket]:
    """Yield duplicates of this process's TCP sockets: no other thread can reuse their numbers."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # closed meanwhile, or no socket
            duplicate = os.dup(int(name))
            try:
                found = socket.socket(fileno=duplicate)
            except OSError:
                os.close(duplicate)
                raise
            if found.family in _FAMILIES and found.type == socket.SOCK_STREAM:
                yield found
            else:
                found.close()


def _packed(address: tuple[str, int] | tuple[str, int, int, int]) -> bytes:
    """Return the bytes of an address as they lie in memory: what gloo publishes contains them."""
    host, port = address[0].partition("%")[0], struct.pack("!H", address[1])
    if len(address) == 2:
        family, number = socket.AF_INET, b""
    else:
        family, number = socket.AF_INET6, struct.pack("!I", address[2])
    return struct.pack("=H", family) + port + number + socket.inet_pton(family, host)
