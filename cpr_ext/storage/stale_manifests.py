"""Manifests that are older than their neighbours know, or of another history.

A directory commits independently, so nothing in it shows that its manifest was newer once. The
others do: each records the generation that its neighbors had reached. No other manifest knows only
the last commit of a store. See docs/decisions/0014-manifests-witness-each-other.md. Which rows fit
the dense part is known by descent, see :mod:`cpr_ext.storage.lineage`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpr_ext.errors import DamageError
from cpr_ext.storage.checksummed_json import REPAIR_HINT
from cpr_ext.storage.file_names import MANIFEST_FILE
from cpr_ext.storage.lineage import shards_without
from cpr_ext.storage.manifest import Manifest


@dataclass(frozen=True)
class Outdated:
    """A manifest of which ``witness`` has seen a newer generation."""

    manifest: Manifest
    witness: Manifest
    seen: int

    def __str__(self) -> str:
        path, witness = (m.directory / MANIFEST_FILE for m in (self.manifest, self.witness))
        found = f"generation {self.manifest.generation}"
        if not path.exists():
            found = "missing"
        return (
            f"{path} is {found}, but {witness} has seen generation {self.seen} of it: it was "
            "removed, or replaced by an older copy. Put the newer one back with its segments, or "
            f"the whole store from one copy{REPAIR_HINT}"
        )

    def is_still_so(self) -> bool:
        """Read it again: False if it was read before the witness, and has been replaced since."""
        return Manifest(self.manifest.directory).generation < self.seen


def find_outdated(manifests: Sequence[Manifest]) -> list[Outdated]:
    """Return the manifests of one store that are older than another has seen.

    Each is reported once, with the manifest that has seen the newest.
    """
    found = []
    for manifest in manifests:
        name = manifest.directory.name
        witness = max(manifests, key=lambda other: other.seen.get(name, 0))
        if (seen := witness.seen.get(name, 0)) > manifest.generation:
            found.append(Outdated(manifest, witness, seen))
    return found


def refuse_outdated(manifests: Sequence[Manifest]) -> None:
    """Raise DamageError, naming all of them with their witnesses, if any is outdated."""
    if found := find_outdated(manifests):
        raise DamageError("; ".join(str(outdated) for outdated in found))


def find_other_states(dense: Manifest, shards: Sequence[Manifest]) -> list[str]:
    """Return what is wrong, one sentence each, with shards that lack the state of a snapshot."""
    found = {}
    of_shards = [manifest.segments for manifest in shards]
    for record in dense.segments:
        for shard in shards_without(record, of_shards, dense.store_id):
            path = shards[shard].directory / MANIFEST_FILE
            found[shard] = (
                f"{path} does not hold the rows of snapshot {record.snapshot} (step "
                f"{record.last_step}), which {dense.directory / MANIFEST_FILE} names: the two are "
                "of different commits. Put both back from one copy of the whole store"
                f"{REPAIR_HINT}"
            )
    return [found[shard] for shard in sorted(found)]


def refuse_other_states(dense: Manifest, shards: Sequence[Manifest]) -> None:
    """Raise DamageError if a shard does not hold the rows of every snapshot."""
    if found := find_other_states(dense, shards):
        raise DamageError("; ".join(found))


def is_torn(manifests: Sequence[Manifest]) -> bool:
    """Return whether manifests changed between the reading of the first and that of the last.

    A reader may read manifests while another process commits. A manifest that it read too early is
    there by now, as each is durable before others note its generation.

    Raises:
        DamageError: one is older than another has seen, however late one looks.
    """
    found = find_outdated(manifests)
    now = [outdated for outdated in found if outdated.is_still_so()]
    if now:
        raise DamageError("; ".join(str(outdated) for outdated in now))
    return bool(found)
