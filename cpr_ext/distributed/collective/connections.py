"""Closes the connections of a group of gloo while others still refer to it.

Torch's ``abort()`` closes none of them. Gloo closes them once nothing refers to the group or to a
work of it. Modules, pipelines and the frames of an exception keep works. Until all are dropped, a
peer that waits for this process would wait for the whole time-out of its collective.

Gloo names no connection of a group, so they are found among the process's sockets. Members publish
their listening addresses in the group's store, and each connection leads to one of these.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store

_REST_SECONDS, _PATIENCE_SECONDS, _PAUSE_SECONDS = 0.05, 0.2, 0.002
# Of a connection whose peer has not closed it: ESTABLISHED, FIN_WAIT1 and FIN_WAIT2 of Linux.
_OPEN_STATES = (1, 4, 5)
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

    def leads_to(self, address: bytes) -> bool:
        """Return whether a member has published this address."""
        return any(address in value for value in self._published)


def close_connections(stores: Sequence[AddressStore]) -> None:
    """Close the connections of the groups that were formed with these stores.

    Every collective that waits for one of them fails at once, here and in the peers. Takes
    ``_REST_SECONDS`` and milliseconds, or at most ``_PATIENCE_SECONDS`` more if a peer hangs.

    Gloo never completes a message that a thread hands over, or of which it writes the rest, while
    the connection ends. What waits for that message waits for the whole time-out. So reading ends
    first: gloo closes the connection, which this function still holds open. What is written still
    arrives. Peers then come to rest, as they wait for this process. Then writing ends, and peers
    close their sides.
    """
    with ExitStack() as held:
        connections = [held.enter_context(each) for each in _find(stores)]
        if not connections:
            return
        _shut_down(connections, socket.SHUT_RD, _is_held_by_gloo)
        time.sleep(_REST_SECONDS)
        _shut_down(connections, socket.SHUT_WR, _is_held_by_peer)


def _find(stores: Sequence[AddressStore]) -> Iterator[socket.socket]:
    for connection in _open_sockets():
        with suppress(OSError):  # it is not connected
            ends = _packed(connection.getpeername()), _packed(connection.getsockname())
            if any(store.leads_to(end) for store in stores for end in ends):
                yield connection
                continue
        connection.close()


def _shut_down(
    connections: Sequence[socket.socket],
    direction: int,
    is_held: Callable[[socket.socket], bool],
) -> None:
    """Shut one direction down, and wait until nobody holds the connections."""
    for connection in connections:
        with suppress(OSError):  # the peer has closed it
            connection.shutdown(direction)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while any(map(is_held, connections)) and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)


def _is_held_by_gloo(connection: socket.socket) -> bool:
    """Return whether another descriptor of this process than ``connection`` is open."""
    number, count = os.fstat(connection.fileno()).st_ino, 0
    for descriptor in Path("/dev/fd").iterdir():
        with suppress(OSError):
            count += os.fstat(int(descriptor.name)).st_ino == number
    return count > 1


def _is_held_by_peer(connection: socket.socket) -> bool:
    state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state in _OPEN_STATES


def _open_sockets() -> Iterator[socket.socket]:
    """Yield duplicates of this process's TCP sockets: no other thread can reuse their numbers."""
    seen = set()  # a number of the list may be that of a duplicate by now
    for descriptor in Path("/dev/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            duplicate = os.dup(int(descriptor.name))
            status = os.fstat(duplicate)
            if not stat.S_ISSOCK(status.st_mode) or status.st_ino in seen:
                os.close(duplicate)
                continue
            seen.add(status.st_ino)
            found = socket.socket(fileno=duplicate)
            if found.family in _FAMILIES and found.type == socket.SOCK_STREAM:
                yield found
            else:
                found.close()


def _packed(address: tuple[str, int] | tuple[str, int, int, int]) -> bytes:
    """Return an address as C has it in memory: what gloo publishes contains these bytes."""
    host, port = address[0].partition("%")[0], struct.pack("!H", address[1])
    if len(address) == 2:
        family, number = socket.AF_INET, b""
    else:
        family, number = socket.AF_INET6, struct.pack("!I", address[2])
    return struct.pack("=H", family) + port + number + socket.inet_pton(family, host)
