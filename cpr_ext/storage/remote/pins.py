"""Pins of readers: the writer keeps the objects of a state while somebody reads it.

    readers/000000000012-0123abcd-5    a reader is at state 12, and has renewed that four times

A state's objects are removed once there are two newer states. So a reader that has pinned a state,
and then sees at most one newer, can read it to its end. No clocks are compared: a writer counts
from when it first sees a name. A reader that lives renews it.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cpr_ext.storage.remote.objects import Objects
from cpr_ext.storage.remote.remote_state import (
    RemoteState,
    newest_state,
    read_state,
    state_numbers,
)

READERS = "readers/"
RENEW_SECONDS = 60.0
PIN_SECONDS = 900.0  # so long a pin counts that is not renewed
_MOST_PINS = 1000  # of which a writer takes note
_TRIES = 10
_KEY = re.compile(re.escape(READERS) + r"(\d{12})-[0-9a-f]{32}-\d+", re.ASCII)


@contextmanager
def newest_pinned(objects: Objects) -> Iterator[RemoteState | None]:
    """Read the newest state, and keep its objects there in the block; None: there is no state.

    A reader that may not create objects there goes without: some may vanish while it reads.
    """
    state = newest_state(objects)
    if state is None:
        yield None
        return
    pin = _Pin(objects)
    try:
        for _ in range(_TRIES):
            if not pin.hold(state.number):
                break
            if state_numbers(objects)[-1:] <= [state.number + 1]:
                break
            state = newest_state(objects) or state
        yield state
    finally:
        pin.end()


class _Pin:
    """What a reader holds; a thread renews it."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._reader = uuid.uuid4().hex
        self._key = ""
        self._number = self._count = 0
        self._changing = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, number: int) -> bool:
        """Pin a state, in the place of another; False if the service does not let this reader."""
        try:
            self._create(number)
        except Exception:
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._renew, name="cpr_ext-pin", daemon=True)
            self._thread.start()
        return True

    def _create(self, number: int) -> None:
        """Create a pin of a new name, then remove the one before."""
        with self._changing:
            self._count += 1
            key = f"{READERS}{number:012d}-{self._reader}-{self._count}"
            self._objects.create(key, b"")
            before, self._key, self._number = self._key, key, number
            self._delete(before)

    def _delete(self, key: str) -> None:
        if key:
            with suppress(Exception):  # it ends by itself
                self._objects.delete(key)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            with suppress(Exception):  # the next one may succeed
                self._create(self._number)

    def end(self) -> None:
        """Remove the pin."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
        self._delete(self._key)


class PinsSeen:
    """What a writer has seen of the pins of readers."""

    def __init__(self) -> None:
        self._first_seen: dict[str, float] = {}
        self._named: dict[int, frozenset[str]] = {}

    def look(self, objects: Objects) -> tuple[set[int], set[str]]:
        """Return the states that are pinned now, and the objects that they name.

        Raises:
            Exception: a request failed; then nothing is known, and nothing may be removed.
        """
        found = {key: match for key in objects.list(READERS) if (match := _KEY.fullmatch(key))}
        now = time.monotonic()
        self._first_seen = {key: self._first_seen.get(key, now) for key in sorted(found)}
        numbers = set()
        for key, since in list(self._first_seen.items())[-_MOST_PINS:]:
            if now - since > PIN_SECONDS:
                objects.delete(key)  # its reader has died
            else:
                numbers.add(int(found[key][1]))
        self._named = {number: self._names(objects, number) for number in numbers}
        return numbers, set().union(*self._named.values())

    def _names(self, objects: Objects, number: int) -> frozenset[str]:
        if (known := self._named.get(number)) is not None:
            return known
        state = read_state(objects, number)
        return frozenset() if state is None else frozenset(state.checksums)
