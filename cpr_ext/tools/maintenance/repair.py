"""Make a damaged store sound again, from what of it is: the newest state that is provable.

Manifests are rebuilt from segments, whose headers show what was committed; STORE.json from its
copy. What is damaged is dropped, its rows falling back to their older state, as recovery does.
Nothing is invented: rows of which no sound state is left cannot be repaired, and nothing is then
changed. All that is replaced or dropped is kept in a directory inside the store.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from cpr_ext.errors import DamageError, StoreError
from cpr_ext.recovery.verify import expect
from cpr_ext.state.table import shard_row_range
from cpr_ext.storage.file_names import (
    DENSE_DIRECTORY,
    LOCK_FILE,
    MANIFEST_FILE,
    STORE_COPY_FILE,
    STORE_FILE,
    TEMPORARY_SUFFIX,
    shard_name,
)
from cpr_ext.storage.filesystem import require_directory, storage_error, sync_directory
from cpr_ext.storage.lineage import position_of, shards_without
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.retries import exists, retrying
from cpr_ext.storage.segment_reader import RowRanges
from cpr_ext.storage.store_reader import StoreIdentity, read_identity
from cpr_ext.tools.maintenance.locking import locked
from cpr_ext.tools.maintenance.salvage import Rewrite, ShardPlan, plan_shard, write_salvaged
from cpr_ext.tools.maintenance.survey import (
    Directory,
    Held,
    keep_descent,
    read_manifests,
    survey,
    with_chain_after,
)

BACKUP_PREFIX = "repaired-"


@dataclass
class RepairReport:
    """What a repair found, and did or would do.

    Attributes:
        store: the directory.
        step: training resumes from this step afterwards; 0: the store holds no snapshot.
        damaged: what is wrong, one sentence each; empty: the store is sound.
        actions: what was done, or would be.
        older: what falls back to an older state, or is no longer there.
        lost: what no sound file holds; not empty: nothing can be repaired, nothing was changed.
        backup: directory of everything that was replaced or dropped; empty: nothing was.
        is_applied: False: a dry run.
    """

    store: str
    step: int = 0
    damaged: list[str] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    older: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    backup: str = ""
    is_applied: bool = False

    @property
    def is_sound(self) -> bool:
        """True if there was nothing to repair."""
        return not (self.damaged or self.actions)

    @property
    def is_repairable(self) -> bool:
        """True if the store is sound, or can be made so."""
        return not self.lost


def repair(store: str | os.PathLike[str], *, apply: bool = False) -> RepairReport:
    """Find what is damaged, and what of the store can be proven; with ``apply``, make it so.

    Args:
        store: the directory; no process may be training on it.
        apply: False reads only.

    Raises:
        StoreError: not a store, a version not known here, or a process is training on it.
        DamageError: STORE.json and its copy are both of no use, or a directory is missing.
        StorageError: a file could not be read or written. What cannot be read is not damaged.
    """
    directory = Path(store)
    with ExitStack() as stack:
        work = _Repair(directory)
        if apply:
            stack.enter_context(locked(work.directories))
        work.look()
        if apply and not work.report.is_sound and work.report.is_repairable:
            work.apply()
        return work.report


@dataclass
class _Change:
    """What a manifest is to name: records as they are, or segments still to be written."""

    directory: Directory
    kept: list[Held | Rewrite]
    has_new_chains: bool = False

    @property
    def as_they_are(self) -> list[SegmentRecord]:
        """The records whose files stay as they are."""
        return [item.record for item in self.kept if isinstance(item, Held)]

    @property
    def is_needed(self) -> bool:
        """True if the manifest does not say just that."""
        has_new = len(self.as_they_are) < len(self.kept)
        named = list(self.directory.manifest.segments)
        is_as_named = self.as_they_are == named and not (has_new or self.has_new_chains)
        return bool(self.directory.wrong) or not is_as_named


class _Repair:
    def __init__(self, store: Path) -> None:
        self.report = RepairReport(str(store))
        self._store = store
        self._identity, self._good_identity = self._identify()
        self._num_shards, self._tables = self._identity.num_shards, self._identity.tables
        self.directories = [
            store / DENSE_DIRECTORY,
            *(store / shard_name(shard) for shard in range(self._num_shards)),
        ]
        for directory in self.directories:
            _require_real(directory)
        self._mixed: frozenset[int] = frozenset()  # shards without any committed state
        self._held: list[Directory] = []  # of each shard
        self._goes_back = False  # to an older snapshot than the store names
        self._changes: list[_Change] = []

    def _identify(self) -> tuple[StoreIdentity, str]:
        """Return the identity, and which of its two files holds it."""
        wrong: list[DamageError | StoreError] = []
        for name in (STORE_FILE, STORE_COPY_FILE):
            try:
                identity = read_identity(self._store, name)
            except DamageError as error:
                wrong.append(error)
            except StoreError as error:
                if exists(self._store / name):
                    raise  # a version that is not known here
                wrong.append(error)
            else:
                self.report.damaged += [str(error) for error in wrong]
                return identity, name
        raise wrong[0]

    def look(self) -> None:
        """Survey the store and plan what to change."""
        self._compare_identities()
        found = read_manifests(self.directories, self._identity.store_id)
        self.report.damaged += [directory.wrong for directory in found if directory.wrong]
        dense, *shards = found
        self._held = shards
        survey(dense, None)
        plans = []
        for shard, directory in enumerate(shards):
            survey(directory, expect(self._tables, shard, self._num_shards))
        for directory in found:
            self.report.damaged += [held.reason for held in directory.held if held.reason]
            self.report.damaged += directory.useless.values()
            self.report.damaged += [
                f"{directory.path / held.record.file}: a repair that was interrupted has replaced "
                "it; its manifest does not name that yet"
                for held in directory.held
                if held.is_replaced
            ]
        kept_dense = self._plan_dense(dense, shards)
        for shard, directory in enumerate(shards):
            plans.append(self._plan_shard(shard, directory, kept_dense))
        self._plan_changes(dense, kept_dense, shards, plans)

    def _compare_identities(self) -> None:
        copy = self._store / STORE_COPY_FILE
        if self._good_identity == STORE_COPY_FILE:
            self.report.actions.append(f"write {STORE_FILE} from {STORE_COPY_FILE}")
            return
        if not exists(copy):
            return  # the next training run writes it
        try:
            if read_identity(self._store, STORE_COPY_FILE) == self._identity:
                return
            self.report.damaged.append(f"{copy}: differs from {STORE_FILE}")
        except StoreError as error:
            self.report.damaged.append(str(error))
        self.report.actions.append(f"write {STORE_COPY_FILE} from {STORE_FILE}")

    def _plan_dense(self, dense: Directory, shards: list[Directory]) -> list[Held]:
        """Return the dense parts to keep, oldest first: those whose state every shard holds."""
        sound = [held for held in dense.held if held.is_sound]
        has_rows = any(shard.held for shard in shards)
        if not sound and (dense.held or (dense.wrong and has_rows)):
            self.report.lost.append(f"{dense.path}: no sound dense part is left")
            return []
        for held in dense.held:
            if not held.is_sound:
                self.report.older.append(
                    f"the snapshot of step {held.record.last_step} is dropped: its dense part is "
                    "damaged"
                )
        for directory in shards:
            if directory.wrong:
                shard = shards.index(directory)
                chains = [held.record.shards[shard] for held in sound if held.record.shards]
                keep_descent(directory, chains[::-1])
        reached = self._reached(sound, shards)
        self.report.step = reached[-1].record.last_step if reached else 0
        is_newest = bool(reached) and reached[-1] is dense.held[-1]
        self._goes_back = bool(dense.wrong) or not is_newest
        return reached

    def _reached(self, sound: list[Held], shards: list[Directory]) -> list[Held]:
        """Return the dense parts whose rows are there; if of none, the newest, which is mixed."""
        of_shards = [[held.record for held in shard.held] for shard in shards]
        start = self._identity.store_id
        lacking = {
            held.record.snapshot: shards_without(held.record, of_shards, start) for held in sound
        }
        reached = [held for held in sound if not lacking[held.record.snapshot]]
        others = {shards[n].path for without in lacking.values() for n in without}
        for path in sorted(others):
            self.report.damaged.append(
                f"{path} does not hold the rows of every snapshot: it is of another commit"
            )
        if reached or not sound:
            for held in sound:
                if held not in reached:
                    self.report.older.append(
                        f"the snapshot of step {held.record.last_step} is dropped: not every "
                        "shard holds its rows"
                    )
            return reached
        newest = sound[-1]
        self._mixed = frozenset(lacking[newest.record.snapshot])
        return [replace(newest, record=replace(newest.record, is_mixed=True, is_complete=False))]

    def _plan_shard(self, shard: int, directory: Directory, dense: list[Held]) -> ShardPlan:
        ranges = self._ranges(shard)
        if shard in self._mixed:
            assert dense
            self._tell_mixed(directory, ranges, dense[-1].record)
            return self._note_lost(
                directory, plan_shard(directory.held, ranges, dense[-1].record.snapshot)
            )
        held = directory.held
        if dense:
            chain = dense[-1].record.shards[shard]
            records = [segment.record for segment in held]
            size = position_of(chain, records, self._identity.store_id)
            assert size is not None
            held = held[:size]
        goes_back = self._goes_back or directory.has_replaced
        if len(held) < len(directory.held) and goes_back:
            self.report.older.append(
                f"{directory.path}: {len(directory.held) - len(held)} segment(s) newer than the "
                "newest snapshot that is left are dropped"
            )
        elif len(held) < len(directory.held):
            held = directory.held  # of a snapshot that was being committed
        plan = plan_shard(held, ranges)
        for segment in held:
            if segment.is_sound:
                continue
            chunks = f"{len(segment.damaged)} chunk(s)" if segment.rows else "all rows"
            self.report.older.append(
                f"{directory.path / segment.record.file}: {chunks} of step "
                f"{segment.record.last_step} fall back to an older state"
            )
        if not self.report.step and not held:
            return plan
        return self._note_lost(directory, plan)

    def _ranges(self, shard: int) -> dict[str, tuple[int, int]]:
        return {
            name: shard_row_range(table.num_embeddings, shard, self._num_shards)
            for name, table in self._tables.items()
        }

    def _tell_mixed(self, directory: Directory, ranges: RowRanges, dense: SegmentRecord) -> None:
        """Report the rows of a shard that has not the state of the dense part, and never will."""
        steps = [held.record.last_step for held in directory.held]
        of_steps = f"of step {max(steps)} or before" if steps else "gone"
        for name, (begin, end) in ranges.items():
            if begin < end:
                self.report.older.append(
                    f"{directory.path}: rows [{begin}, {end}) of '{name}' are {of_steps}, not of "
                    f"step {dense.last_step}: those are gone"
                )

    def _note_lost(self, directory: Directory, plan: ShardPlan) -> ShardPlan:
        for name, count in plan.rows_lost.items():
            self.report.lost.append(
                f"{directory.path}: no sound file holds {count} rows or more of '{name}'"
            )
        return plan

    def _plan_changes(
        self,
        dense: Directory,
        kept_dense: list[Held],
        shards: list[Directory],
        plans: list[ShardPlan],
    ) -> None:
        first = max((plan.first_snapshot for plan in plans), default=0)
        spans = [span for plan in plans for span in plan.incomplete]
        kept: list[Held | Rewrite] = []
        for held in kept_dense:
            record = held.record
            if record.snapshot < first and held is not kept_dense[-1]:
                self.report.older.append(
                    f"the recovery point of step {record.last_step} is dropped: its rows are "
                    "damaged"
                )
                continue
            if any(a <= record.snapshot < b for a, b in spans):
                if record.is_complete:
                    self.report.older.append(
                        f"the snapshot of step {record.last_step} is no full-recovery point any "
                        "more"
                    )
                held = replace(held, record=replace(record, is_complete=False, is_mixed=True))
            kept.append(held)
        has_new = any(isinstance(item, Rewrite) for plan in plans for item in plan.kept)
        changes = [_Change(dense, kept, has_new or bool(self._mixed))]
        changes += [_Change(d, plan.kept) for d, plan in zip(shards, plans, strict=True)]
        self._changes = [change for change in changes if change.is_needed]
        for change in self._changes:
            names = [i.file if isinstance(i, Rewrite) else i.record.file for i in change.kept]
            listed = ", ".join(names) or "no segment"
            path = change.directory.path / MANIFEST_FILE
            self.report.actions.append(f"write {path}: {listed}")
            for item in change.kept:
                if isinstance(item, Rewrite):
                    sources = ", ".join(held.record.file for held in item.sources)
                    text = f"write {change.directory.path / item.file} from what is sound of "
                    self.report.actions.append(text + sources)

    def apply(self) -> None:
        """Do what was planned; after a crash at any moment another repair can finish."""
        try:
            self._apply()
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise storage_error("repair", self._store, error) from error
        self.report.is_applied = True

    def _apply(self) -> None:
        backup = _make_backup(self._store)
        self.report.backup = str(backup)
        for name in (STORE_FILE, STORE_COPY_FILE):
            _keep(self._store / name, backup)
        for change in self._changes:
            place = backup / change.directory.path.name
            place.mkdir()
            stay = {LOCK_FILE, *(record.file for record in change.as_they_are)}
            for path in sorted(change.directory.path.iterdir()):
                if path.name not in stay:
                    _keep(path, place)
            sync_directory(place)
        sync_directory(backup)
        self._write_identity()
        written = [self._write_segments(change, backup) for change in self._changes]
        self._record_chains(written)
        generations = {
            directory.name: generation for directory, generation in self._generations().items()
        }
        for change, records in zip(self._changes, written, strict=True):
            manifest = change.directory.manifest
            others = {n: g for n, g in generations.items() if n != manifest.directory.name}
            manifest.commit(tuple(records), others)
            generations[manifest.directory.name] = manifest.generation
        for change in self._changes:
            # What was dropped, and what nothing names: it is in the backup.
            change.directory.manifest.remove_unlisted()

    def _write_identity(self) -> None:
        other = STORE_COPY_FILE if self._good_identity == STORE_FILE else STORE_FILE
        if not any(other in action for action in self.report.actions):
            return
        new = self._store / (other + TEMPORARY_SUFFIX)
        shutil.copyfile(self._store / self._good_identity, new)
        with new.open("rb") as file:
            os.fsync(file.fileno())
        new.replace(self._store / other)
        sync_directory(self._store)

    def _write_segments(self, change: _Change, backup: Path) -> list[SegmentRecord]:
        directory = change.directory.path
        records: list[SegmentRecord] = []
        has_new = False
        for item in change.kept:
            chain = records[-1].chain if records else self._identity.store_id
            if isinstance(item, Held):
                record = item.record
                if has_new:  # what came before it is another state now
                    record = with_chain_after(chain, record)
                records.append(record)
                continue
            has_new = True
            shard = self.directories.index(directory) - 1
            place = backup / f"new-{directory.name}"
            place.mkdir(exist_ok=True)
            records.append(write_salvaged(place, shard, self._ranges(shard), item, chain))
        for record in records:
            new = backup / f"new-{directory.name}" / record.file
            if new.exists():
                new.replace(directory / record.file)
        return records

    def _record_chains(self, written: list[list[SegmentRecord]]) -> None:
        """Let the dense parts name the chains that shards of new or other segments have now."""
        places = {change.directory.path: n for n, change in enumerate(self._changes)}
        if (dense := places.get(self.directories[0])) is None:
            return
        for shard, path in enumerate(self.directories[1:]):
            if path in places:
                held = written[places[path]]
            elif shard in self._mixed:
                held = [*self._held[shard].manifest.segments]
            else:
                continue
            for n, record in enumerate(written[dense]):
                before = [r.chain for r in held if r.snapshot <= record.snapshot]
                chains = list(record.shards)
                chains[shard] = before[-1] if before else self._identity.store_id
                written[dense][n] = replace(record, shards=tuple(chains))

    def _generations(self) -> dict[Path, int]:
        known = {change.directory.path: change.directory.manifest for change in self._changes}
        found = {}
        for directory in read_manifests(self.directories, self._identity.store_id):
            manifest = known.get(directory.path, directory.manifest)
            found[directory.path] = manifest.generation
        return found


def _require_real(directory: Path) -> None:
    try:
        retrying(directory, lambda: require_directory(directory))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamageError(f"{directory} is missing; put it back, it cannot be repaired") from error


def _make_backup(store: Path) -> Path:
    for number in range(1, 10**6):
        backup = store / f"{BACKUP_PREFIX}{number}"
        try:
            backup.mkdir()
        except FileExistsError:
            continue
        return backup
    raise AssertionError("a million repairs")


def _keep(path: Path, place: Path) -> None:
    """Keep a file as it is: no repair writes into a file that exists."""
    if not path.is_file() or path.is_symlink():
        return
    try:
        os.link(path, place / path.name, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(path, place / path.name, follow_symlinks=False)
        with (place / path.name).open("rb") as file:
            os.fsync(file.fileno())
