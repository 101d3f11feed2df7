"""Replace damaged files of a store by those of its copy in object storage, before and in recovery.

An object is known by its segment's name and header checksum, and its bytes by a checksum of their
own. So a file that is read from the copy is the one that was committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from cpr_ext.errors import CprError, DamageError
from cpr_ext.recovery.findings import Findings
from cpr_ext.recovery.restore import read_dense
from cpr_ext.recovery.verify import Expected, check_dense, check_rows
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.storage.manifest import Manifest
from cpr_ext.storage.remote.remote_copy import RemoteCopy
from cpr_ext.storage.store import Store
from cpr_ext.storage.store_reader import open_segment

logger = logger_of("recovery")

_CHECKSUMS_ONLY = Expected(None, {})


class Healing:
    """Reads damaged segments from the copy; without a copy, it does nothing."""

    def __init__(self, store: Store, remote: RemoteCopy | None) -> None:
        self._store = store
        self._remote = remote

    def heal_headers(self) -> None:
        """Heal missing files, damaged headers, and damaged dense parts.

        A recovery that met a damaged dense part would roll the store back.
        """
        if self._remote is None:
            return
        damaged = []
        for manifest in (self._store.dense, *self._store.shards):
            for record in manifest.segments:
                try:
                    open_segment(manifest, record)
                    if record.kind == "dense":
                        read_dense(manifest, record)
                except DamageError:
                    damaged.append(manifest.path_of(record))
        self._heal(damaged)

    def heal_all(self) -> bool:
        """Read every byte of the store, and heal what is damaged; True: something was."""
        if self._remote is None:
            return False
        damaged = []
        for manifest in (self._store.dense, *self._store.shards):
            for record in manifest.segments:
                try:
                    if record.kind == "dense":
                        check_dense(manifest, record)
                    else:
                        check_rows(manifest, record, _CHECKSUMS_ONLY)
                except DamageError:
                    damaged.append(manifest.path_of(record))
        return self._heal(damaged)

    def heal_rows(self, findings: Findings) -> bool:
        """Heal files in which a recovery found damaged rows; True: recover again."""
        return self._heal([damaged.path for damaged in findings.damaged_segments])

    def _heal(self, damaged: Iterable[Path]) -> bool:
        paths = set(damaged)
        if self._remote is None or not paths:
            return False
        manifests: Sequence[Manifest] = (self._store.dense, *self._store.shards)
        healed = 0
        for manifest in manifests:
            for record in manifest.segments:
                path = manifest.path_of(record)
                if path not in paths:
                    continue
                try:
                    if self._remote.fetch(manifest.directory.name, record, path):
                        healed += 1
                        logger.warning("%s was damaged; it was read from the remote store", path)
                except (CprError, OSError) as error:  # recovery falls back, as without a copy
                    logger.warning("%s could not be read from the remote store: %s", path, error)
        return healed > 0
