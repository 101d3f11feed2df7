"""Open the remote copy of a store: before the store itself, and after it."""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cpr_ext.errors import DamageError
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.storage.file_names import (
    DENSE_DIRECTORY,
    STORE_FILE,
    names_in_the_way,
    parse_shard_name,
    shard_name,
)
from cpr_ext.storage.lineage import shards_without
from cpr_ext.storage.locks import DirectoryLock
from cpr_ext.storage.manifest import Manifest
from cpr_ext.storage.remote.fetching import fetch_directory, fetch_store
from cpr_ext.storage.remote.objects import RemoteOptions, open_objects
from cpr_ext.storage.remote.pins import newest_pinned
from cpr_ext.storage.remote.remote_copy import RemoteCopy
from cpr_ext.storage.remote.remote_state import (
    RemoteDirectory,
    RemoteState,
    StoreView,
    committed_view,
    newest_state,
)
from cpr_ext.storage.remote.remote_writer import RemoteWriter
from cpr_ext.storage.retries import list_directory
from cpr_ext.storage.store import Store
from cpr_ext.storage.store_reader import StoreIdentity, read_identity

logger = logger_of("remote")


class RemoteStore:
    """The remote copy of the store in ``directory``.

    Args:
        directory: of the local store. If it is empty or missing, and the remote store holds a
            state, that is read into it. So are shards whose directories are missing.

    Attributes:
        was_read: the local store was read from the remote one.

    Raises:
        UsageError: there is no obstore, or the address is of no service.
        RemoteError: a request failed.
        DamageError: what is to be read is damaged.
    """

    def __init__(self, options: RemoteOptions, directory: str | os.PathLike[str]) -> None:
        self._options = options
        self._directory = Path(directory).absolute()
        self._objects = open_objects(options)
        self.was_read = False
        names = [path.name for path in list_directory(self._directory)]
        if not names_in_the_way(names) and newest_state(self._objects) is not None:
            self.was_read = True
            fetch_store(self._objects, self._directory)
        else:
            self._restore_directories()

    def _restore_directories(self) -> None:
        """Read directories that are gone, if the copy's are of one state with those that are not.

        Else opening the store names what is missing.
        """
        held = {path.name for path in list_directory(self._directory)}
        if STORE_FILE not in held:
            return
        with suppress(DamageError):  # opening the store names it
            identity = read_identity(self._directory)
            num_held = sum(parse_shard_name(name) is not None for name in held)
            if num_held >= identity.num_shards and DENSE_DIRECTORY in held:
                return
            lock = DirectoryLock(self._directory)
            try:
                with newest_pinned(self._objects) as state:
                    self._restore_from(state, identity)
            finally:
                lock.close()

    def _restore_from(self, state: RemoteState | None, identity: StoreIdentity) -> None:
        if state is None or len(state.view.directories) != identity.num_shards + 1:
            return
        held = {path.name for path in list_directory(self._directory)}
        missing = [name for name in state.view.directories if name not in held]
        if not self._fits(identity, state.view, missing):
            return
        for name in missing:
            fetch_directory(self._objects, state, name, self._directory)
            logger.warning(
                "'%s' was missing; it was read from the remote store", self._directory / name
            )

    def _fits(self, identity: StoreIdentity, view: StoreView, missing: list[str]) -> bool:
        """Return whether the copy's directories hold the state of this store's newest snapshot."""
        if identity.store_id != view.store_id:
            return False
        names = [DENSE_DIRECTORY, *map(shard_name, range(identity.num_shards))]
        found: list[RemoteDirectory] = []
        for name in names:
            if name in missing:
                found.append(view.directories[name])
            else:
                found.append(
                    RemoteDirectory.of(Manifest(self._directory / name, None, identity.store_id))
                )
        dense, *shards = (directory.segments for directory in found)
        seen = [max(d.seen.get(name, 0) for d in found) for name in names]
        is_newest = all(d.generation >= least for d, least in zip(found, seen, strict=True))
        return is_newest and not any(
            shards_without(record, shards, identity.store_id) for record in dense
        )

    def start(self, store: Store, model: Mapping[str, Any]) -> RemoteCopy:
        """Begin to copy a store that was opened for writing.

        Raises:
            StoreError: the store does not follow from the newest state that is there.
            RemoteError: a request failed, or the service ignores conditional writes.
        """
        writer = RemoteWriter(
            self._objects, store.directory, uuid.uuid4().hex, self._options.address
        )
        dense = weakref.ref(store.dense)  # the copying thread keeps no store open

        def pin(commits: frozenset[str]) -> None:
            if (manifest := dense()) is not None:
                manifest.pinned = commits

        writer.pin = pin
        writer.open(view_of(store, model), store.claim)
        copy = RemoteCopy(
            writer,
            bytes_per_second=self._options.bytes_per_second,
            wait_at_close_seconds=self._options.wait_at_close_seconds,
        )
        if self.was_read:
            copy.read_from = self._options.address
        copy.submit(view_of(store, model))
        return copy


def view_of(store: Store, model: Mapping[str, Any]) -> StoreView:
    """Return the committed state of a store; where no manifest changes meanwhile."""
    return committed_view(model, [store.dense, *store.shards])
