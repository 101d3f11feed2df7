"""Open the remote copy of a store: before the store itself, and after it."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cpr_ext.errors import DamageError
from cpr_ext.storage.checksummed_json import read_checksummed, write_checksummed
from cpr_ext.storage.file_names import (
    DENSE_DIRECTORY,
    REMOTE_FILE,
    STORE_FILE,
    parse_shard_name,
)
from cpr_ext.storage.reading import list_directory
from cpr_ext.storage.remote.fetching import fetch_directory, fetch_store
from cpr_ext.storage.remote.objects import RemoteOptions, open_objects
from cpr_ext.storage.remote.remote_copy import RemoteCopy
from cpr_ext.storage.remote.remote_state import RemoteDirectory, StoreView, newest_state
from cpr_ext.storage.remote.remote_writer import RemoteWriter
from cpr_ext.storage.store import Store
from cpr_ext.storage.store_reader import read_identity

logger = logging.getLogger("cpr_ext")

FORMAT_NAME = "cpr_ext.remote_identity"


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
        if not list_directory(self._directory) and newest_state(self._objects) is not None:
            self.was_read = True
            fetch_store(self._objects, self._directory, finish=_identify)
        elif (identity := read_checksummed(self._directory / REMOTE_FILE, FORMAT_NAME)) is not None:
            self._restore_directories(str(identity.get("writer")))

    def _restore_directories(self, writer: str) -> None:
        """Read shards whose directories are gone, if the newest state is of this store."""
        held = {path.name for path in list_directory(self._directory)}
        if STORE_FILE not in held:
            return
        try:
            num_shards, _ = read_identity(self._directory)
        except DamageError:
            return  # opening the store names it
        num_held = sum(parse_shard_name(name) is not None for name in held)
        if num_held >= num_shards and DENSE_DIRECTORY in held:
            return
        state = newest_state(self._objects)
        if state is None or state.writer != writer:
            return
        for name in state.view.directories:
            if name not in held:
                fetch_directory(self._objects, state, name, self._directory)
                logger.warning(
                    "'%s' was missing; it was read from the remote store", self._directory / name
                )

    def start(self, store: Store, model: Mapping[str, Any]) -> RemoteCopy:
        """Begin to copy a store that was opened for writing.

        Raises:
            StoreError: the remote store is the copy of another store.
            RemoteError: a request failed, or the service ignores conditional writes.
        """
        path = store.directory / REMOTE_FILE
        identity = read_checksummed(path, FORMAT_NAME)
        if identity is None:
            identity = {"writer": uuid.uuid4().hex, "fetched": None}
            write_checksummed(path, FORMAT_NAME, identity)
        try:
            fetched = identity["fetched"]
            before = None if fetched is None else (int(fetched[0]), str(fetched[1]))
            writer = RemoteWriter(self._objects, store.directory, str(identity["writer"]))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DamageError(f"{path}: {error!r:.100}") from error
        writer.open(model, before)
        copy = RemoteCopy(
            writer,
            bytes_per_second=self._options.bytes_per_second,
            wait_at_close_seconds=self._options.wait_at_close_seconds,
        )
        copy.submit(view_of(store, model))
        return copy


def view_of(store: Store, model: Mapping[str, Any]) -> StoreView:
    """Return the committed state of a store; where no manifest changes meanwhile."""
    newest = store.dense.segments[-1:]
    return StoreView(
        model,
        {
            manifest.directory.name: RemoteDirectory(
                manifest.generation, dict(manifest.seen), manifest.segments
            )
            for manifest in (store.dense, *store.shards)
        },
        newest[0].last_step if newest else -1,
    )


def _identify(directory: Path, number: int, writer: str) -> None:
    content = {"writer": uuid.uuid4().hex, "fetched": [number, writer]}
    write_checksummed(directory / REMOTE_FILE, FORMAT_NAME, content)
