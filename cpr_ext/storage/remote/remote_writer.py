"""Copies committed states of a store to object storage: the one writer of a remote store.

Objects first, the state that names them last. What is not known to be there counts as not there.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpr_ext._native import native
from cpr_ext.errors import StoreError
from cpr_ext.storage.filesystem import open_regular
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.remote.fetching import fetch_segment
from cpr_ext.storage.remote.objects import Objects, RemoteError
from cpr_ext.storage.remote.remote_state import (
    OBJECTS,
    RemoteState,
    StoreView,
    newest_state,
    state_key,
    state_numbers,
)

PROBES = "probes/"
STATES_KEPT = 16  # old states: small, and a reader may be at one of the last
_CHUNK_BYTES = 1 << 20

Spend = Callable[[int], None]


def _spend_nothing(count: int) -> None:
    pass


class FencedError(RemoteError):
    """Another process writes to this remote store now; nothing more is copied there."""


class RemoteWriter:
    """The right to add states to a remote store, and the states that this process has added.

    Attributes:
        newest: the newest state that is known to be there; None: none is.
        spend: called with the bytes that are read and sent; it may sleep, or raise to stop.

    Args:
        objects: where the remote store is.
        directory: the local store.
        writer: identifies it.
    """

    def __init__(self, objects: Objects, directory: Path, writer: str) -> None:
        self._objects = objects
        self._directory = directory
        self._writer = writer
        self.spend: Spend = _spend_nothing
        self.newest: RemoteState | None = None
        self._tried: Set[bytes] = frozenset()  # states that may be there, whatever was answered

    def open(self, model: Mapping[str, Any], fetched: tuple[int, str] | None = None) -> None:
        """Check that this local store may be copied here, and that the service refuses overwriting.

        Args:
            model: content of STORE.json.
            fetched: number and writer of the state from which the local store was read: if it is
                still the newest, this writer takes over.

        Raises:
            StoreError: there is the copy of another store.
            RemoteError: the service makes an object that exists already.
        """
        self._require_create_only()
        newest = newest_state(self._objects)
        if newest is not None and (newest.number, newest.writer) == fetched:
            newest = replace(newest, number=newest.number + 1, writer=self._writer)
            newest = self._add(newest)
        if newest is not None and newest.writer != self._writer:
            what = "another model" if newest.view.model != model else f"step {newest.view.step}"
            raise StoreError(
                f"the remote store holds the copy of another store than '{self._directory}' "
                f"({what}). Choose another address; or, to resume from it, an empty directory"
            )
        self.newest = newest

    def _require_create_only(self) -> None:
        probe = f"{PROBES}{uuid.uuid4().hex}"
        try:
            self._objects.create(probe, b"1")  # False if the request was sent twice
            overwrites = self._objects.create(probe, b"2")
        finally:
            self._objects.delete(probe)
        if overwrites:
            raise RemoteError(
                "the remote service ignores conditional writes (If-None-Match), so two writers "
                "could overwrite each other. Use a service that has them"
            )

    def fetch(self, directory: str, record: SegmentRecord, path: Path) -> bool:
        """Replace a file of the local store by its copy; False if there is none."""
        newest = self.newest
        return newest is not None and fetch_segment(self._objects, newest, directory, record, path)

    def missing_bytes(self, view: StoreView) -> int:
        """Return how many bytes of a state are not there yet."""
        known = self._known()
        return sum(r.file_bytes for key, (_, r) in view.records().items() if key not in known)

    def _known(self) -> Mapping[str, int]:
        return {} if self.newest is None else self.newest.checksums

    def copy(self, view: StoreView) -> RemoteState:
        """Add a committed state of the local store; once this returns, it is the newest there.

        Raises:
            FencedError: another process has added a state.
            FileNotFoundError: the local store has moved on; take a newer view.
            Exception: a request failed, and its outcome is unknown; it may be tried again.
        """
        known = self._known()
        checksums: dict[str, int] = {}
        with ExitStack() as opened:
            sources = {}
            for key, (directory, record) in view.records().items():
                if key in known:
                    checksums[key] = known[key]
                    continue
                # Opened now: a file that the store removes later can still be read.
                path = self._directory / directory / record.file
                sources[key] = opened.enter_context(os.fdopen(open_regular(path), "rb")), record
            for key, (file, record) in sources.items():
                checksums[key] = self._send(key, file, record.file_bytes)
        number = 1 if self.newest is None else self.newest.number + 1
        state = RemoteState(number, self._writer, view, checksums)
        self.spend(0)  # raises if it was stopped meanwhile
        state = self._add(state)
        before, self.newest = self.newest, state
        self._tidy(before, state)
        return state

    def _send(self, key: str, file: Any, file_bytes: int) -> int:
        sent = crc = 0

        def chunks() -> Iterator[bytes]:
            nonlocal sent, crc
            sent = crc = 0
            file.seek(0)
            while chunk := file.read(min(_CHUNK_BYTES, file_bytes - sent)):
                self.spend(len(chunk))
                sent += len(chunk)
                crc = native.crc32c(chunk, crc)
                yield chunk

        self._objects.write(key, chunks())
        if sent != file_bytes:
            raise RemoteError(f"{key}: {sent} of {file_bytes} bytes could be read of its file")
        return crc

    def _add(self, state: RemoteState) -> RemoteState:
        """Create a state, and make sure that it is the newest; its number may be a later one."""
        data, key = state.to_bytes(), state_key(state.number)
        earlier, self._tried = self._tried, {*self._tried, data}
        # One of this name may be ours: an answer can be lost, and a request can arrive twice.
        if not self._objects.create(key, data) and (held := self._objects.read(key)) != data:
            if held not in earlier:
                raise self._fenced(key)
            return self._add(replace(state, number=state.number + 1))
        if state_numbers(self._objects)[-1:] > [state.number]:
            raise self._fenced(key)
        self._tried = frozenset()
        return state

    def _fenced(self, key: str) -> FencedError:
        return FencedError(
            f"another process has added states to the remote store ({key}): nothing more is "
            f"copied from '{self._directory}'. End that process, or this one"
        )

    def _tidy(self, before: RemoteState | None, state: RemoteState) -> None:
        """Remove old states, then objects that neither of the last two states names.

        Each step may fail: what stays costs space, and the next call tries again.
        """
        try:
            for number in state_numbers(self._objects)[:-STATES_KEPT]:
                self._objects.delete(state_key(number))
            named = {*state.checksums, *(before.checksums if before is not None else ())}
            for key in self._objects.list(OBJECTS):
                if key not in named:
                    self._objects.delete(key)
        except Exception:
            return
