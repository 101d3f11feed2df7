"""Copies committed states of a store to object storage: the one writer of a remote store.

Objects first, then HEAD, which names them. What is not known to be there counts as not there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from cpr_ext._native import native
from cpr_ext.errors import RemoteError, StoreError
from cpr_ext.storage.file_names import SEGMENTS_DIRECTORY
from cpr_ext.storage.filesystem import open_regular
from cpr_ext.storage.ids import new_id
from cpr_ext.storage.manifest import ANCESTORS_KEPT, Manifest, SegmentRecord
from cpr_ext.wings.remote.fetching import fetch_segment
from cpr_ext.wings.remote.head import HEAD, Head, require_conditional_puts
from cpr_ext.wings.remote.objects import Body, Objects
from cpr_ext.wings.remote.remote_state import (
    OBJECTS,
    RemoteState,
    objects_of,
    saved_at,
    step_of,
)

PARALLEL_SENDS = 3
MOST_OPEN = 64  # files at a time
_CHUNK_BYTES = 4 << 20

Spend = Callable[[int], None]


def _spend_nothing(count: int) -> None:
    pass


class FencedError(RemoteError):
    """Another process writes to this remote store now; nothing more is copied there."""


class RemoteWriter:
    """The right to replace HEAD of a remote store: by its ETag, each other writer is found.

    Attributes:
        newest: the state that is known to be there; None: none is.
        spend: called with the bytes that are read and sent; it may sleep, or raise to stop.
        pinned: the commits of which the copy is, or may be soon. The local store keeps them among
            its ancestors.

    Args:
        objects: where the remote store is.
        directory: the local store.
        address: of the remote store, for messages.
        keep_seconds: how long objects stay that HEAD no longer names.
    """

    def __init__(
        self,
        objects: Objects,
        directory: Path,
        address: str = "ADDRESS",
        keep_seconds: float = 3600.0,
    ) -> None:
        self._objects = objects
        self._directory = directory
        self._writer = new_id()
        self._address = address
        self._keep_seconds = keep_seconds
        self._head = Head(objects)
        self._sent: dict[str, int] = {}  # checksums of objects that HEAD does not name yet
        self.spend: Spend = _spend_nothing
        self.pinned: frozenset[str] = frozenset()
        self.newest: RemoteState | None = None

    def open(self, manifest: Manifest) -> None:
        """Check that a store follows from the state that is there, and take over.

        Another process that writes there learns of it with its next state.

        Args:
            manifest: the committed state of the local store.

        Raises:
            StoreError: the state there is no ancestor of this one. Continued from here, the copy
                would go back, or mix two jobs.
            RemoteError: a request failed; or the service ignores conditional writes.
        """
        require_conditional_puts(self._objects)
        while (data := self._head.read()) is not None:
            there = RemoteState.from_bytes(data)
            if not manifest.descends_from(there.manifest.commit_id):
                raise StoreError(self._unrelated(manifest, there))
            self.pinned = frozenset({there.manifest.commit_id})
            state = self._state(there.manifest, there.unix_seconds, there.checksums, there)
            if self._head.replace(state.to_bytes()):
                self.newest = state
                return

    def _unrelated(self, here: Manifest, there: RemoteState) -> str:
        """Return why a store may not be copied, and the choices."""
        theirs, step = there.manifest, step_of(here)
        beginning = f"'{self._directory}' cannot be copied to the remote store: "
        another = "choose another address for the copy"
        fetch = f"to resume from the copy, `cpr fetch {self._address} DIR` reads it into "
        if here.store_id != theirs.store_id:
            return (
                f"{beginning}there is the copy of another store (of step {there.step}). To keep "
                f"both, {another}; {fetch}a new directory"
            )
        fetch = f"{fetch[0].upper()}{fetch[1:]}a new directory"
        if theirs.descends_from(here.commit_id):
            return (
                f"{beginning}the copy has step {there.step}, and this store is an earlier state "
                f"of the same job, of step {step}, such as one put back from a backup; or a start "
                f"that it does not know of has taken over the copy. {fetch}; to resume from the "
                f"earlier state, {another}"
            )
        return (
            f"{beginning}it does not follow from the copy's state of step {there.step}. Both are "
            f"of the same store, and each was trained on its own, or more than {ANCESTORS_KEPT} "
            f"commits were made without the copy. {fetch}; to resume from this store (step "
            f"{step}), {another}"
        )

    def fetch(self, record: SegmentRecord, path: Path) -> bool:
        """Replace a file of the local store by its copy; False if there is none."""
        newest = self.newest
        return newest is not None and fetch_segment(self._objects, newest, record, path)

    def missing_bytes(self, manifest: Manifest) -> int:
        """Return how many bytes of a state are not there yet."""
        known = {} if self.newest is None else self.newest.checksums
        return sum(r.file_bytes for key, r in objects_of(manifest).items() if key not in known)

    def copy(self, manifest: Manifest) -> RemoteState:
        """Copy a committed state of the local store; once this returns, HEAD names it.

        Raises:
            FencedError: another process writes there.
            FileNotFoundError: the local store has moved on; take a newer state.
            Exception: a request failed, and its outcome is unknown; it may be tried again.
        """
        before = self.newest
        self.pinned = frozenset(
            each.commit_id for each in (manifest, before and before.manifest) if each
        )
        # What others have removed is sent again.
        there = set(self._objects.list(OBJECTS))
        named = {} if before is None else before.checksums
        known = {key: crc for key, crc in {**named, **self._sent}.items() if key in there}
        wanted = objects_of(manifest)
        checksums = {key: known[key] for key in wanted if key in known}
        checksums |= self._send_all({k: r for k, r in wanted.items() if k not in known})
        state = self._state(
            manifest, saved_at(manifest, self._directory), checksums, before, sorted(there)
        )
        self.spend(0)  # raises if it was stopped meanwhile
        if not self._head.replace(state.to_bytes()):
            raise FencedError(
                f"another process writes to the remote store ({self._address}/{HEAD}): nothing "
                f"more is copied from '{self._directory}'. End that process, or this one"
            )
        self.newest = state
        self._sent.clear()
        self._remove_old(state)
        return state

    def _state(
        self,
        manifest: Manifest,
        unix_seconds: float,
        checksums: Mapping[str, int],
        before: RemoteState | None,
        there: list[str] | None = None,
    ) -> RemoteState:
        """Return a state to write: objects that it does not name are retired, if not long ago.

        Args:
            there: all objects; None: not known.
        """
        retired = {} if before is None else dict(before.retired)
        listed = list(retired) if there is None else there
        now = time.time()
        kept = {key: min(retired.get(key, now), now) for key in listed if key not in checksums}
        return RemoteState(self._writer, manifest, unix_seconds, checksums, kept)

    def _remove_old(self, state: RemoteState) -> None:
        """Remove objects that no state has named for long; what stays is tried again next time."""
        before = time.time() - self._keep_seconds
        with suppress(Exception):
            for key, since in state.retired.items():
                if since <= before:
                    self._objects.delete(key)

    def _send_all(self, wanted: Mapping[str, SegmentRecord]) -> dict[str, int]:
        """Send the files of segments, some at a time; return the checksums of their bytes."""
        with ExitStack() as opened:
            sources: dict[str, Any] = {}
            for key, record in wanted.items():
                sources[key] = self._directory / SEGMENTS_DIRECTORY / record.file
                if len(sources) <= MOST_OPEN:
                    # A file that the store removes later can still be read.
                    file = os.fdopen(open_regular(sources[key]), "rb")
                    sources[key] = opened.enter_context(file)
            with ThreadPoolExecutor(PARALLEL_SENDS, thread_name_prefix="cpr_ext-send") as pool:
                sent = {
                    key: pool.submit(self._send_opened, key, source, wanted[key].file_bytes)
                    for key, source in sources.items()
                }
                try:
                    return {key: crc.result() for key, crc in sent.items()}
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise

    def _send_opened(self, key: str, source: Any, file_bytes: int) -> int:
        """Send a file, or what is at a path."""
        if isinstance(source, Path):
            source = os.fdopen(open_regular(source), "rb")
        with source:
            crc = self._send(key, source, file_bytes)
        self._sent[key] = crc
        return crc

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

        self._objects.write(key, Body(file_bytes, chunks))
        if sent != file_bytes:
            raise RemoteError(f"{key}: {sent} of {file_bytes} bytes could be read of its file")
        return crc
