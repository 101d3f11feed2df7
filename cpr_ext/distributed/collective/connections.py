"""Closes the connections of a group of gloo while others still refer to it.

Torch's ``abort()`` closes none of them. Gloo closes them once nothing refers to the group or to a
work of it. Modules, pipelines and the frames of an exception keep works. Until all are dropped, a
peer that waits for this process would wait for the whole time-out of its collective.

Gloo names no connection of a group, so they are found among the process's sockets. Members publish
their listening addresses in the group's store, and each connection leads to one of these.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import termios
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store

_REST_SECONDS = 0.02
_FEW_BYTES = 1 << 19  # of small messages in _REST_SECONDS
# A peer may not be scheduled for so long: that sends a large message, and that does not take one.
_PAUSED_SECONDS, _STALLED_SECONDS, _LONGEST_SECONDS = 0.1, 5.0, 60.0
_PATIENCE_SECONDS, _PAUSE_SECONDS = 0.2, 0.002
_BYTES_AT = 120  # in Linux's struct tcp_info
# Of a connection whose peer has not closed it: ESTABLISHED, FIN_WAIT1 and FIN_WAIT2 of Linux.
_OPEN_STATES = (1, 4, 5)
_CONNECTING = 2  # SYN_SENT
_PEER_NAME = 28  # SO_PEERNAME: also of a connection that is not made yet
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
# By how an address begins in memory, how many bytes :func:`_packed` gives of it.
_ADDRESS_BYTES = {struct.pack("=H", socket.AF_INET): 8, struct.pack("=H", socket.AF_INET6): 24}


class AddressStore(Store):
    """A store that passes all on to ``store``, and remembers the addresses that members publish.

    Args:
        seconds: in which what is asked for must be there.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        super().__init__()
        self._store = store
        self._store.set_timeout(timedelta(seconds=seconds))
        self._addresses: set[bytes] = set()

    # Torch calls these by name, some with positional arguments only.
    def set(self, key: str, value: str | bytes) -> None:
        """Set a value in place of any that is there."""
        self._note(value if isinstance(value, bytes) else value.encode())
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Return a value once it is there."""
        value = self._store.get(key)
        self._note(value)
        return value

    def has_extended_api(self) -> bool:
        """Return whether many values are to be asked for at once."""
        return bool(self._store.has_extended_api())  # type: ignore[attr-defined]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return all these values once all are there."""
        values = self._store.multi_get(list(keys))
        for value in values:
            self._note(value)
        return values

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
        return address in self._addresses

    def _note(self, value: bytes) -> None:
        """Note all that may be an address in what a member has published."""
        for family, size in _ADDRESS_BYTES.items():
            at = value.find(family)
            while at >= 0:
                self._addresses.add(value[at : at + size])
                at = value.find(family, at + 1)


def close_connections(stores: Sequence[AddressStore]) -> None:
    """Close the connections of the groups that were formed with these stores.

    Every collective that waits for one of them fails, here and in the peers. Takes about 0.05 s,
    and longer while a large message is under way: until it has arrived, for a minute at most. A
    peer may take nothing of it for 5 s, if its machine answers.

    Gloo never completes a message that is under way while its connection ends. What waits for that
    message waits for the whole time-out. So large messages may arrive first. Then reading ends:
    gloo closes the connection, which this function still holds open. Peers come to rest, as they
    wait for this process. Then writing ends, and peers close their sides.

    Raises:
        OSError: connections could not be found, for want of file descriptors for example.
    """
    if not stores:
        return
    with ExitStack() as held:
        connections = [held.enter_context(each) for each in _find(stores)]
        if not connections:
            return
        _wait_for_rest(connections)
        _shut_down(connections, socket.SHUT_RD)
        _wait_while(lambda: _are_held_here(connections))
        _wait_for_rest(connections)
        _shut_down(connections, socket.SHUT_WR)
        _wait_while(lambda: any(_info(each)[0] in _OPEN_STATES for each in connections))


def end_connecting(store: AddressStore) -> None:
    """Have the kernel end, at its next try, connections to members that do not answer.

    By default it tries for two minutes. Gloo drops a group after five times its time-out. If the
    kernel says after that that a connection failed, gloo ends the process.

    Raises:
        OSError: connections could not be found, for want of file descriptors for example.
    """
    for connection in _open_sockets():
        with connection, suppress(OSError):
            if _info(connection)[0] == _CONNECTING and store.leads_to(_wanted_end(connection)):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, 1)


def _wanted_end(connection: socket.socket) -> bytes:
    """Return the address to which a connection is being made, as in :func:`_packed`."""
    size = _ADDRESS_BYTES[struct.pack("=H", connection.family)]
    return connection.getsockopt(socket.SOL_SOCKET, _PEER_NAME, size)


def _find(stores: Sequence[AddressStore]) -> Iterator[socket.socket]:
    for connection in _open_sockets():
        if any(store.leads_to(end) for store in stores for end in _ends_of(connection)):
            yield connection
        else:
            connection.close()


def _ends_of(connection: socket.socket) -> list[bytes]:
    try:
        return [_packed(connection.getpeername()), _packed(connection.getsockname())]
    except OSError:  # it is not connected
        return []


def _open_sockets() -> Iterator[socket.socket]:
    """Yield duplicates of this process's TCP sockets: no other thread can reuse their numbers.

    Files are left alone: to close a duplicate of one would end the process's POSIX locks of it.
    """
    seen = set()  # a number of the list may be that of a duplicate by now
    for descriptor in Path("/dev/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            status = descriptor.stat()
            if not stat.S_ISSOCK(status.st_mode) or status.st_ino in seen:
                continue
            seen.add(status.st_ino)
            duplicate = os.dup(int(descriptor.name))
            # The flag leaves the socket as it is: a default time-out would make it non-blocking.
            found = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=duplicate)
            kind = found.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
            if found.family in _FAMILIES and kind == socket.SOCK_STREAM:
                yield found
            else:
                found.close()


def _shut_down(connections: Sequence[socket.socket], direction: int) -> None:
    for connection in connections:
        with suppress(OSError):  # the peer has closed it
            connection.shutdown(direction)


def _wait_while(is_waiting: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while is_waiting() and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)


def _wait_for_rest(connections: Sequence[socket.socket]) -> None:
    """Return once no large message is under way, and peers had time to wait for this process.

    A peer that is merely not scheduled takes and sends nothing for a while.
    """
    begun = moved = time.monotonic()
    passed, pause = _num_bytes(connections), 0.0
    while (now := time.monotonic()) < min(begun + _LONGEST_SECONDS, moved + _STALLED_SECONDS):
        time.sleep(_REST_SECONDS)
        before, passed = passed, _num_bytes(connections)
        if passed - before >= _FEW_BYTES:
            pause = _PAUSED_SECONDS
        if passed > before and pause:
            moved = now
        elif now >= moved + pause and not any(map(_is_awaited, connections)):
            return


def _is_awaited(connection: socket.socket) -> bool:
    """Return whether the peer's kernel answers, and the peer has not taken all that was sent."""
    with suppress(OSError):
        answers = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[2] == 0
        unsent = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
        return answers and any(unsent) and _info(connection)[0] in _OPEN_STATES
    return False


def _num_bytes(connections: Sequence[socket.socket]) -> int:
    return sum(sum(_info(each)[1:]) for each in connections)


def _are_held_here(connections: Sequence[socket.socket]) -> bool:
    """Return whether this process has another descriptor of one of them: gloo's."""
    counts: Counter[int] = Counter()
    for descriptor in Path("/dev/fd").iterdir():
        with suppress(OSError):
            counts[descriptor.stat().st_ino] += 1
    return any(counts[os.fstat(each.fileno()).st_ino] > 1 for each in connections)


def _info(connection: socket.socket) -> tuple[int, int, int]:
    """Return the state, and the bytes that the peer has acknowledged and sent."""
    found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_AT + 16)
    if len(found) < _BYTES_AT + 16:  # of Linux before 4.1
        return found[0], 0, 0
    acknowledged, received = struct.unpack_from("=QQ", found, _BYTES_AT)
    return found[0], acknowledged, received


def _packed(address: tuple[str, int] | tuple[str, int, int, int]) -> bytes:
    """Return an address as C has it in memory: what gloo publishes contains these bytes."""
    host, port = address[0].partition("%")[0], struct.pack("!H", address[1])
    if len(address) == 2:
        family, number = socket.AF_INET, b""
    else:
        family, number = socket.AF_INET6, struct.pack("!I", address[2])
    return struct.pack("=H", family) + port + number + socket.inet_pton(family, host)
