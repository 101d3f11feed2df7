"""Object storage in which one request meets a fault, and which is looked at after each request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from cpr_ext._native import native
from cpr_ext.errors import RemoteError
from cpr_ext.storage.manifest import Manifest
from cpr_ext.wings.remote.objects import Objects
from cpr_ext.wings.remote.remote_state import RemoteState, newest_state, objects_of

# What happens at a request: "fails": nothing; "times out": nothing, after the body was sent;
# "answer lost": it takes effect; "twice": it takes effect two times, and the second answer counts;
# "late": it takes effect after the next request; "killed before", "killed after": the process ends.
FAULTS = ("fails", "times out", "answer lost", "twice", "late", "killed before", "killed after")
KILLS = ("killed before", "killed after")
_READING = ("read", "read_tagged", "list")  # requests that change nothing


class Killed(BaseException):
    """The process ended in a request."""


class WatchedObjects:
    """Passes requests on, until request number ``at``, counted from 0, meets ``fault``.

    ``held`` is what the service holds, if there is a faster way to it than requests.

    Attributes:
        count: requests so far.
        is_dead: the process has ended; it makes no more requests until :meth:`restart`.
        acknowledged: the commit of the state that was promised last; and its step.
        states: all committed states of the local store, as they were handed over to be copied;
            None: not known.
        violations: what was found wrong.
    """

    def __init__(
        self, objects: Objects, fault: str = "", at: int = -1, held: Objects | None = None
    ) -> None:
        self.objects = objects
        self.held = held or objects
        self.count = 0
        self.is_dead = False
        self.acknowledged = ""
        self.acknowledged_step = -1
        self.states: list[Manifest] | None = []
        self.violations: list[str] = []
        self._fault = fault
        self._at = at
        self._lock = threading.RLock()
        self._late: Callable[[], object] | None = None
        self._sound: dict[str, int] = {}  # checksums of objects that were not touched since
        self._is_looked_at = False  # nothing has changed since

    def acknowledge(self, commit: str, step: int) -> None:
        """Take note of what the job was promised."""
        self.acknowledged, self.acknowledged_step = commit, step
        self._is_looked_at = False

    def _end(self) -> None:
        self.is_dead = True
        raise Killed

    def restart(self) -> None:
        """A new process begins."""
        self.is_dead = False

    @property
    def was_met(self) -> bool:
        """Whether the fault has happened."""
        return self.count > self._at >= 0

    def write(self, key: str, chunks: Iterable[bytes]) -> None:
        self._request("write", key, chunks)

    def read(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        return bytes(self._request("read", key, begin, end))

    def read_tagged(self, key: str) -> tuple[bytes, str]:
        return self._request("read_tagged", key)

    def replace(self, key: str, data: bytes, tag: str | None) -> str | None:
        return self._request("replace", key, data, tag)

    def list(self, prefix: str) -> list[str]:
        return list(self._request("list", prefix))

    def delete(self, key: str) -> None:
        self._request("delete", key)

    def _request(self, name: str, key: str, *arguments: Any) -> Any:
        with self._lock:
            if self.is_dead:
                raise Killed
            number, self.count = self.count, self.count + 1
            late, self._late = self._late, None
            is_reading = name in _READING and late is None
            try:
                return self._do(number == self._at, name, key, *arguments)
            finally:
                if late is not None:
                    late()
                    self._sound.clear()
                if name not in _READING:
                    self._sound.pop(key, None)
                if not (is_reading and self._is_looked_at):
                    self._look()
                    self._is_looked_at = True

    def _do(self, is_met: bool, name: str, key: str, *arguments: Any) -> Any:
        call = getattr(self.objects, name)
        fault = self._fault if is_met else ""
        if fault == "fails":
            raise RemoteError("503 Slow Down")
        if fault == "killed before":
            self._end()
        if fault and name == "write":
            arguments = (list(arguments[0]),)
        if fault == "times out":
            raise RemoteError("timed out")
        if fault == "late":
            if name in ("replace", "write"):
                self._late = lambda: call(key, *arguments)
            raise RemoteError("timed out")
        answer = call(key, *arguments)
        if fault == "answer lost":
            raise RemoteError("timed out")
        if fault == "twice":
            return call(key, *arguments)
        if fault == "killed after":
            self._end()
        return answer

    def _look(self) -> None:
        """Look whether the newest state is a committed one, whole, and not older than promised."""
        try:
            state = newest_state(self.held)
        except Exception as error:
            self._blame(f"{type(error).__name__}: {error}")
            return
        if state is None:
            if self.acknowledged:
                self._blame("no state is left")
            return
        if self.acknowledged and not state.manifest.descends_from(self.acknowledged):
            self._blame(f"the state of step {state.step} is older than what was promised")
        if self.states is not None and state.manifest not in self.states:
            self._blame(f"the state of step {state.step} was never committed")
        self._look_at_objects(state)

    def _look_at_objects(self, state: RemoteState) -> None:
        for key, record in objects_of(state.manifest).items():
            if key not in self._sound:
                try:
                    data = self.held.read(key)
                except FileNotFoundError:
                    self._blame(f"the state of step {state.step} lacks {key}")
                    continue
                if len(data) != record.file_bytes:
                    self._blame(f"{key} has {len(data)} bytes of {record.file_bytes}")
                self._sound[key] = native.crc32c(data)
            if self._sound[key] != state.checksums[key]:
                self._blame(f"{key} is not as written")

    def _blame(self, text: str) -> None:
        self.violations.append(f"after request {self.count - 1}: {text}")
