"""Open the remote copy of a store: before the store itself, and after it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cpr_ext.errors import DamageError
from cpr_ext.storage.checksummed_json import read_checksummed, write_checksummed
from cpr_ext.storage.file_names import REMOTE_FILE
from cpr_ext.storage.reading import list_directory
from cpr_ext.storage.remote.fetching import fetch_store
from cpr_ext.storage.remote.objects import RemoteOptions, open_objects
from cpr_ext.storage.remote.remote_copy import RemoteCopy
from cpr_ext.storage.remote.remote_state import RemoteDirectory, StoreView, newest_state
from cpr_ext.storage.remote.remote_writer import RemoteWriter
from cpr_ext.storage.store import Store

FORMAT_NAME = "cpr_ext.storage.remote_identity"


class RemoteStore:
    """The remote copy of the store in ``directory``.

    Args:
        directory: of the local store. If it is empty or missing, and the remote store holds a
            state, that is read into it.

    Raises:
        UsageError: there is no obstore, or the address is of no service.
        RemoteError: a request failed.
        DamageError: what is to be read is damaged.
    """

    def __init__(self, options: RemoteOptions, directory: str | os.PathLike[str]) -> None:
        self._options = options
        self._directory = Path(directory).absolute()
        self._objects = open_objects(options)
        if not list_directory(self._directory) and newest_state(self._objects) is not None:
            fetch_store(self._objects, self._directory, finish=_identify)

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
