"""The copy of a store in object storage, read back onto this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cpr_ext.wings.remote import RemoteOptions, fetch_store, open_objects


@dataclass(frozen=True)
class FetchReport:
    """What was read of a copy, and the store that it now is.

    Attributes:
        directory: of the store.
        step: of its newest snapshot; -1: it has none.
        segments: files of rows and of dense parts that were read.
        bytes_read: their size.
    """

    directory: str
    step: int
    segments: int
    bytes_read: int


def fetch(remote: str | RemoteOptions, directory: str | os.PathLike[str]) -> FetchReport:
    """Read the newest state of a copy in object storage into a directory.

    Args:
        remote: its address.
        directory: empty or missing.

    Raises:
        StoreError: there is no state, or ``directory`` holds something, or is in use.
        DamageError: an object is not as written, or missing.
        RemoteError: a request failed.
        StorageError: a file could not be written.
    """
    options = RemoteOptions(remote) if isinstance(remote, str) else remote
    state = fetch_store(open_objects(options), Path(directory), address=options.address)
    segments = len(list(state.manifest.records()))
    return FetchReport(str(directory), state.step, segments, state.manifest.file_bytes)
