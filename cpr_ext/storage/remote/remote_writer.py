"""Copies committed states of a store to object storage: the one writer of a remote store.

Objects first, the state that names them last. What is not known to be there counts as not there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpr_ext._native import native
from cpr_ext.errors import RemoteError, StoreError
from cpr_ext.storage.filesystem import open_regular
from cpr_ext.storage.lineage import new_id
from cpr_ext.storage.manifest import ANCESTORS_KEPT, SegmentRecord
from cpr_ext.storage.remote.fetching import fetch_segment
from cpr_ext.storage.remote.numbered import require_create_only
from cpr_ext.storage.remote.objects import Body, Objects
from cpr_ext.storage.remote.pins import PinsSeen
from cpr_ext.storage.remote.remote_state import (
    OBJECTS,
    RemoteState,
    StoreView,
    newest_state,
    state_key,
    state_numbers,
    with_time,
)

STATES_KEPT = 16  # old states: small, and a reader may be at one of the last
PARALLEL_SENDS = 3
MOST_OPEN = 64  # files at a time
_CHUNK_BYTES = 4 << 20

Spend = Callable[[int], None]


def _spend_nothing(count: int) -> None:
    pass


def _pin_nothing(commits: frozenset[str]) -> None:
    pass


class FencedError(RemoteError):
    """Another process writes to this remote store now; nothing more is copied there."""


class RemoteWriter:
    """The right to add states to a remote store, and the states that this process has added.

    Attributes:
        newest: the newest state that is known to be there; None: none is.
        spend: called with the bytes that are read and sent; it may sleep, or raise to stop.
        pin: called with the commits of which the copy is, or may be soon. The local store keeps
            them among its ancestors.

    Args:
        objects: where the remote store is.
        directory: the local store.
        writer: identifies this process.
        address: of the remote store, for messages.
    """

    def __init__(
        self, objects: Objects, directory: Path, writer: str, address: str = "ADDRESS"
    ) -> None:
        self._objects = objects
        self._directory = directory
        self._writer = writer
        self._address = address
        self.spend: Spend = _spend_nothing
        self.pin: Callable[[frozenset[str]], None] = _pin_nothing
        self.newest: RemoteState | None = None
        self._claim = new_id()
        self._listed: set[str] = set()  # objects that no later writer can have sent
        self._sent: dict[str, int] = {}  # checksums of objects that no state names yet
        self._pins = PinsSeen()
        self._tried: Set[bytes] = frozenset()  # states that may be there, whatever was answered

    def open(self, view: StoreView, claim: Callable[[str], None]) -> None:
        """Check that this store follows from the newest state that is there, and take over.

        Another process that writes there learns of it with its next state. From then on another
        store of the same state, such as a clone or the one that was read from, is refused.

        Args:
            view: the committed state of the local store.
            claim: makes an identity an ancestor of all its later commits, durably. Called before
                the copy names it, so that no crash leaves a copy that this store cannot continue.

        Raises:
            StoreError: the newest state there is no ancestor of this one, or another start has
                claimed it. Continued from here, the copy would go back, or mix two jobs.
            RemoteError: the service makes an object that exists already.
        """
        require_create_only(self._objects)
        # Before the newest state is read: whoever takes over later adds a state first.
        self._listed = set(self._objects.list(OBJECTS))
        newest = newest_state(self._objects)
        if newest is not None and not newest.may_be_continued_by(view):
            raise StoreError(self._unrelated(view, newest.view))
        known = frozenset() if newest is None else frozenset({newest.view.commit_id, newest.claim})
        self.pin(known | {self._claim})
        claim(self._claim)
        if newest is not None:
            self.newest = self._add(newest.taken_over(self._writer, self._claim))

    def _unrelated(self, here: StoreView, there: StoreView) -> str:
        """Return why a store may not be copied, and the choices."""
        beginning = f"'{self._directory}' cannot be copied to the remote store: "
        another = "choose another address for the copy"
        fetch = f"to resume from the copy, `cpr fetch {self._address} DIR` reads it into "
        if here.store_id != there.store_id:
            return (
                f"{beginning}there is the copy of another store (of step {there.step}). To keep "
                f"both, {another}; {fetch}a new directory"
            )
        if there.commit_id != here.commit_id and there.descends_from(here):
            return (
                f"{beginning}the copy has step {there.step}, and this store is an earlier state "
                f"of the same job, of step {here.step}, such as one put back from a backup. "
                f"{fetch[0].upper()}{fetch[1:]}this directory or a new one; to resume from the "
                f"earlier state, {another}"
            )
        fetch = f"{fetch[0].upper()}{fetch[1:]}a new directory"
        if here.descends_from(there):
            return (
                f"{beginning}a start that it does not know of has taken over the copy at step "
                f"{there.step}: on another machine, or here before this directory was put back. "
                f"{fetch}; to resume from this store (step {here.step}), {another}"
            )
        return (
            f"{beginning}it does not follow from the copy's state of step {there.step}. Both are "
            f"of the same store, and each was trained on its own, or more than {ANCESTORS_KEPT} "
            f"commits were made without the copy. {fetch}; to resume from this store (step "
            f"{here.step}), {another}"
        )

    def fetch(self, directory: str, record: SegmentRecord, path: Path) -> bool:
        """Replace a file of the local store by its copy; False if there is none."""
        newest = self.newest
        return newest is not None and fetch_segment(self._objects, newest, directory, record, path)

    def missing_bytes(self, view: StoreView) -> int:
        """Return how many bytes of a state are not there yet."""
        known = self._known()
        return sum(r.file_bytes for key, (_, r) in view.records().items() if key not in known)

    def _known(self) -> dict[str, int]:
        return {} if self.newest is None else dict(self.newest.checksums)

    def copy(self, view: StoreView) -> RemoteState:
        """Add a committed state of the local store; once this returns, it is the newest there.

        Raises:
            FencedError: another process has added a state.
            FileNotFoundError: the local store has moved on; take a newer view.
            Exception: a request failed, and its outcome is unknown; it may be tried again.
        """
        known_commits = {view.commit_id, self._claim}
        if self.newest is not None:
            known_commits.add(self.newest.view.commit_id)
        self.pin(frozenset(known_commits))
        # What others have removed is sent again.
        there = set(self._objects.list(OBJECTS))
        known = {key: crc for key, crc in (self._known() | self._sent).items() if key in there}
        checksums: dict[str, int] = {}
        with ExitStack() as opened:
            sources: dict[str, tuple[Any, SegmentRecord]] = {}
            for key, (directory, record) in view.records().items():
                if key in known:
                    checksums[key] = known[key]
                    continue
                source: Any = self._directory / directory / record.file
                if len(sources) < MOST_OPEN:
                    # A file that the store removes later can still be read.
                    source = opened.enter_context(os.fdopen(open_regular(source), "rb"))
                sources[key] = source, record
            with ThreadPoolExecutor(PARALLEL_SENDS, thread_name_prefix="cpr_ext-send") as pool:
                sent = {
                    key: pool.submit(self._send_opened, key, source, record.file_bytes)
                    for key, (source, record) in sources.items()
                }
                try:
                    checksums |= {key: crc.result() for key, crc in sent.items()}
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
        number = 1 if self.newest is None else self.newest.number + 1
        view = with_time(view, self._directory)
        state = RemoteState(number, self._writer, self._claim, view, checksums)
        self.spend(0)  # raises if it was stopped meanwhile
        state = self._add(state)
        before, self.newest = self.newest, state
        self._sent.clear()
        self._tidy(before, state)
        return state

    def _send_opened(self, key: str, source: Any, file_bytes: int) -> int:
        """Send a file, or what is at a path."""
        if isinstance(source, Path):
            with os.fdopen(open_regular(source), "rb") as file:
                crc = self._send(key, file, file_bytes)
        else:
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

        self._listed.add(key)
        self._objects.write(key, Body(file_bytes, chunks))
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
        """Remove old states, then objects that neither the last two states nor pinned ones name.

        Of objects only those that this writer sent, or that were there when it came: another writer
        may have taken over by now. Each step may fail: what stays costs space, and the next call
        tries again.
        """
        try:
            pinned, named = self._pins.look(self._objects)
            for number in state_numbers(self._objects)[:-STATES_KEPT]:
                if number not in pinned:
                    self._objects.delete(state_key(number))
            named |= {*state.checksums, *(before.checksums if before is not None else ())}
            for key in sorted(self._listed - named):
                self._objects.delete(key)
                self._listed.remove(key)
        except Exception:
            return
