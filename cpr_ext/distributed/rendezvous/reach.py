"""Which workers reach each other, and who steps aside if two do not.

Each worker keeps a port on which it does not listen. Its machine refuses a connection there,
whatever its processes do, and that is an answer. After a round that came to nothing, each worker
tries the ports of the others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

PROBE_SECONDS = 2.0
_PAUSE_SECONDS = 1.0
# Of a machine that answers: nobody listens there.
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)
_AT_ONCE = 256  # so many connections


class Beacon:
    """The port of this worker.

    Args:
        address: under which peers reach it.

    Raises:
        OSError: it is no address of this machine.
    """

    def __init__(self, address: str) -> None:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._kept = socket.socket(family, kind, protocol)
        try:
            self._kept.bind(place)
        except OSError:
            self._kept.close()
            raise
        host, port = self._kept.getsockname()[:2]
        self.place = f"{host} {port}"

    def close(self) -> None:
        """Give the port back."""
        self._kept.close()


class Probing:
    """Tries the ports of peers again and again, until it is stopped.

    Args:
        places: of the peers, by who they are.
        note: is given who does not answer, after each time.
    """

    def __init__(self, places: Mapping[str, str], note: Callable[[tuple[str, ...]], None]) -> None:
        self._places = places
        self._note = note
        self._over, self._tried = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="cpr_ext-probing", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return once all were tried."""
        self._tried.wait(2 * PROBE_SECONDS)

    def stop(self) -> None:
        """Note nothing any more."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            silent = unreachable(self._places)
            if not self._over.is_set():
                self._note(silent)
            self._tried.set()
            self._over.wait(_PAUSE_SECONDS)


def unreachable(places: Mapping[str, str], seconds: float = PROBE_SECONDS) -> tuple[str, ...]:
    """Return whose machine does not answer, sorted; many are tried at once, by one thread."""
    members = sorted(places)
    silent: list[str] = []
    for begin in range(0, len(members), _AT_ONCE):
        some = members[begin : begin + _AT_ONCE]
        silent += _silent_of({member: places[member] for member in some}, seconds)
    return tuple(silent)


def _silent_of(places: Mapping[str, str], seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    silent, asked = [], {}
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as waiting:
        for member, place in places.items():
            try:
                connecting = opened.enter_context(_begin_to_connect(place))
            except OSError:
                silent.append(member)
                continue
            waiting.register(connecting, selectors.EVENT_WRITE)
            asked[connecting] = member
        while asked and (left := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                tried = key.fileobj
                assert isinstance(tried, socket.socket)
                waiting.unregister(tried)
                error = tried.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error in _ANSWERS:
                    del asked[tried]
                else:
                    silent.append(asked.pop(tried))
    return sorted([*silent, *asked.values()])


def _begin_to_connect(place: str) -> socket.socket:
    host, port = place.split(" ")
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )[0]
    connecting = socket.socket(family, kind, protocol)
    connecting.setblocking(False)
    error = connecting.connect_ex(address)
    if error not in (*_ANSWERS, errno.EINPROGRESS):
        connecting.close()
        raise OSError(error, os.strerror(error))
    return connecting


def who_steps_aside(
    ranks: Mapping[str, int], unreachable: Mapping[str, Collection[str]]
) -> frozenset[str]:
    """Return the fewest, about, without whom all reach each other.

    Who reaches the fewest others steps aside; of several, the one of the highest rank. So all
    workers of a machine that is cut off do, and no other.

    Args:
        ranks: of the processes that wait.
        unreachable: for each whom it does not reach; others than those that wait do not count.
    """
    pairs = set(_pairs(ranks, unreachable))
    aside: set[str] = set()
    while pairs:
        counts = Counter(member for pair in pairs for member in pair)
        worst = max(counts, key=lambda member: (counts[member], ranks[member], member))
        aside.add(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return frozenset(aside)


def _pairs(
    ranks: Mapping[str, int], unreachable: Mapping[str, Collection[str]]
) -> Iterable[frozenset[str]]:
    for member, others in unreachable.items():
        for other in others:
            if member in ranks and other in ranks and member != other:
                yield frozenset((member, other))
