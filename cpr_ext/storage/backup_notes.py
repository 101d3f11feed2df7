"""Notes in a store of the commits that its backups hold.

A manifest lists so many of its ancestors; a backup that is older could not be shown to be one. The
training process keeps commits that are noted here among them. A note is a file
``backups/COMMIT-BACKUP``; BACKUP is the CRC32 of the backup's path, which is in the file.
"""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from pathlib import Path

from cpr_ext.storage.file_names import BACKUPS_DIRECTORY
from cpr_ext.storage.filesystem import create_anew
from cpr_ext.storage.lineage import is_id
from cpr_ext.storage.retries import list_directory

MOST_NOTES = 256  # that count


def note_backup(store: Path, commit_id: str, backup: Path) -> None:
    """Keep a commit among the ancestors of later ones; where nothing may be written, go without."""
    note = _note(store, commit_id, backup)
    with suppress(OSError):
        note.parent.mkdir(exist_ok=True)
        descriptor = create_anew(note)
        try:
            os.write(descriptor, os.fsencode(backup) + b"\n")
        finally:
            os.close(descriptor)


def forget_backup(store: Path, commit_id: str, backup: Path) -> None:
    """Remove a note, if it is there."""
    with suppress(OSError):
        _note(store, commit_id, backup).unlink()


def noted_backups(store: Path) -> frozenset[str]:
    """Return the commits that are noted."""
    with suppress(OSError):
        names = [path.name.partition("-")[0] for path in list_directory(store / BACKUPS_DIRECTORY)]
        return frozenset(sorted(filter(is_id, names))[:MOST_NOTES])
    return frozenset()


def _note(store: Path, commit_id: str, backup: Path) -> Path:
    return store / BACKUPS_DIRECTORY / f"{commit_id}-{zlib.crc32(os.fsencode(backup)):08x}"
