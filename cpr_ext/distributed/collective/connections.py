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
import re
import select
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
_PAUSED_SECONDS = 0.1  # in which a peer that sends a large message may not be scheduled
_LONGEST_SECONDS = 5.0  # that messages are given, all in all
_PATIENCE_SECONDS, _PAUSE_SECONDS = 0.2, 0.002
_RECEIVED_AT = 128  # in Linux's struct tcp_info
# Of a connection whose peer has not closed it: ESTABLISHED, FIN_WAIT1 and FIN_WAIT2 of Linux.
_OPEN_STATES = (1, 4, 5)
_CONNECTING = 2  # SYN_SENT
_PEER_NAME = 28  # SO_PEERNAME: also of a connection that is not made yet
_IN_EPOLL = re.compile(r"events: *([0-9a-f]+).* ino:([0-9a-f]+)")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_duplicated: Counter[int] = Counter()  # by inode: one of each thread that closes connections
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
    and up to 6 s while a large message is under way, or a peer takes nothing.

    Gloo never completes a message that is under way while its connection ends; what waits for it
    waits until its round has ended. So messages may arrive first. Then reading ends: gloo closes
    the connection, which this function still holds open. Peers come to rest, as they wait for this
    process. Then writing ends, and peers close their sides.

    Raises:
        OSError: connections could not be found, for want of file descriptors for example.
    """
    if not stores:
        return
    with ExitStack() as held:
        connections = [held.enter_context(each) for each in _find(stores)]
        if not connections:
            return
        inodes = [os.fstat(each.fileno()).st_ino for each in connections]
        _duplicated.update(inodes)
        held.callback(_duplicated.subtract, inodes)
        deadline = time.monotonic() + _LONGEST_SECONDS
        _wait_for_rest(connections, deadline)
        _shut_down(connections, socket.SHUT_RD)
        _wait_while(lambda: _are_held_here(connections))
        _wait_for_rest(connections, deadline)
        _shut_down(connections, socket.SHUT_WR)
        _wait_while(lambda: any(_state(each) in _OPEN_STATES for each in connections))


def end_connecting(store: AddressStore) -> list[str]:
    """Have the kernel end, at its next try, connections to members that do not answer.

    By default it tries for two minutes. Gloo drops a group after five times its time-out. If the
    kernel says after that that a connection failed, gloo ends the process.

    Returns:
        The addresses of these members.

    Raises:
        OSError: connections could not be found, for want of file descriptors for example.
    """
    silent = set()
    for connection in _open_sockets():
        with connection, suppress(OSError):
            end = _wanted_end(connection)
            if _state(connection) == _CONNECTING and store.leads_to(end):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, 1)
                host = end[4:8] if connection.family == socket.AF_INET else end[8:24]
                silent.add(socket.inet_ntop(connection.family, host))
    return sorted(silent)


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


def _wait_for_rest(connections: Sequence[socket.socket], deadline: float) -> None:
    """Return once nothing is to be sent, no large message comes, and peers had a moment."""
    received, rests_from = _received(connections), 0.0
    while (now := time.monotonic()) < deadline:
        time.sleep(_REST_SECONDS)
        before, received = received, _received(connections)
        if received - before >= _FEW_BYTES or (rests_from and received > before):
            rests_from = now + _PAUSED_SECONDS
        if now >= rests_from and not _are_to_send(connections):
            return


def _are_to_send(connections: Sequence[socket.socket]) -> bool:
    """Return whether a peer whose kernel answers is to take what gloo, or the kernel, has for it.

    Gloo asks its loop for a connection to become writable as long as it has something to send.
    """
    answering = [each for each in connections if _answers(each)]
    if any(any(fcntl.ioctl(each, termios.TIOCOUTQ, bytes(4))) for each in answering):
        return True
    files = {os.fstat(each.fileno()).st_ino for each in answering}
    return not files.isdisjoint(_awaited_writable())


def _answers(connection: socket.socket) -> bool:
    """Return whether a connection is open, and its peer's kernel has not missed an answer."""
    with suppress(OSError):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)
        return info[0] in _OPEN_STATES and info[2] == 0
    return False


def _awaited_writable() -> Iterator[int]:
    """Yield the inodes of files that this process waits to become writable, by epoll."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(descriptor.readlink()) == "anon_inode:[eventpoll]":
                text = Path("/proc/self/fdinfo", descriptor.name).read_text()
                for events, inode in _IN_EPOLL.findall(text):
                    if int(events, 16) & select.EPOLLOUT:
                        yield int(inode, 16)


def _received(connections: Sequence[socket.socket]) -> int:
    """Return how many bytes have come; 0 of a Linux before 4.1."""
    found = (each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) for each in connections)
    enough = (info for info in found if len(info) >= _RECEIVED_AT + 8)
    return sum(struct.unpack_from("=Q", info, _RECEIVED_AT)[0] for info in enough)


def _are_held_here(connections: Sequence[socket.socket]) -> bool:
    """Return whether this process has a descriptor of one of them that is no duplicate: gloo's."""
    counts: Counter[int] = Counter()
    for descriptor in Path("/dev/fd").iterdir():
        with suppress(OSError):
            counts[descriptor.stat().st_ino] += 1
    inodes = (os.fstat(each.fileno()).st_ino for each in connections)
    return any(counts[inode] > _duplicated[inode] for inode in inodes)


def _state(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def _packed(address: tuple[str, int] | tuple[str, int, int, int]) -> bytes:
    """Return an address as C has it in memory: what gloo publishes contains these bytes."""
    host, port = address[0].partition("%")[0], struct.pack("!H", address[1])
    if len(address) == 2:
        family, number = socket.AF_INET, b""
    else:
        family, number = socket.AF_INET6, struct.pack("!I", address[2])
    return struct.pack("=H", family) + port + number + socket.inet_pton(family, host)
