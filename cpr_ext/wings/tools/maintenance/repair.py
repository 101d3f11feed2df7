"""Make a damaged store sound again: the newest committed state of which every file is sound.

A lost manifest is rebuilt from the one before, and from the headers of dense parts: each names all
segments of its snapshot. What is damaged is dropped with the snapshots that need it. Nothing is
invented, and no rows of several snapshots are mixed: where no snapshot is whole, nothing changes.
All that is replaced or dropped is kept in a directory inside the store.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from cpr_ext.errors import DamageError, StorageError, StoreError
from cpr_ext.recovery.verify import check_segment, refusal
from cpr_ext.state.position import MAX_SOUND
from cpr_ext.storage.file_names import (
    MANIFEST_FILE,
    PREVIOUS_FILE,
    SEGMENTS_DIRECTORY,
    is_store,
    parse_segment_name,
)
from cpr_ext.storage.filesystem import require_directory, storage_error, sync_directory
from cpr_ext.storage.locks import DirectoryLock
from cpr_ext.storage.manifest import (
    Manifest,
    Records,
    SegmentRecord,
    older_than_previous,
    read_manifest,
    write_manifest,
)
from cpr_ext.storage.retention import keep_needed
from cpr_ext.storage.retries import exists, list_directory, retrying
from cpr_ext.storage.segment_header import read_point
from cpr_ext.storage.store_reader import StoreReader

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
        lost: why nothing can be repaired; not empty: nothing was changed.
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
        DamageError: the directory of the segments is missing.
        StorageError: a file could not be read or written. What cannot be read is not damaged.
    """
    directory = Path(store)
    if not is_store(path.name for path in list_directory(directory)):
        StoreReader(directory)  # says so
    with ExitStack() as stack:
        if apply:
            stack.enter_context(_locked(directory))
        work = _Repair(directory)
        work.look()
        if apply and not work.report.is_sound and work.report.is_repairable:
            work.apply()
        return work.report


def _locked(directory: Path) -> ExitStack:
    stack = ExitStack()
    try:
        lock = DirectoryLock(directory)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise storage_error("lock", directory, error) from error
    stack.callback(lock.close)
    return stack


@dataclass(frozen=True)
class _Point:
    """A snapshot, and the segments of rows that make it."""

    dense: SegmentRecord
    rows: Records

    @classmethod
    def of(cls, manifest: Manifest, dense: SegmentRecord) -> _Point:
        return cls(dense, manifest.at(dense.snapshot))

    def records(self) -> Records:
        return (self.dense, *self.rows)

    def __str__(self) -> str:
        return f"the snapshot of step {self.dense.last_step}"


class _Repair:
    def __init__(self, store: Path) -> None:
        self.report = RepairReport(str(store))
        self._store = store
        self._segments = store / SEGMENTS_DIRECTORY
        try:
            retrying(self._segments, lambda: require_directory(self._segments))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DamageError(
                f"{self._segments} is missing; put it back, it cannot be repaired"
            ) from error
        self._reasons: dict[tuple[str, str], str] = {}  # of files by name and snapshot; "": sound
        self._basis: Manifest | None = None  # which model the store is of
        self._new: Manifest | None = None  # to be written

    def look(self) -> None:
        """Find what is sound, and plan what to change."""
        named, previous = self._read(MANIFEST_FILE), self._read(PREVIOUS_FILE)
        if named is not None and (older := older_than_previous(self._store, named)) is not None:
            self.report.damaged.append(older)
            named = None
        self._basis = basis = named
        points = [] if named is None else [_Point.of(named, dense) for dense in named.dense]
        sound = [point for point in points if self._is_sound(point)]
        if named is None:
            basis, points = self._from_segments(None, previous)
            sound = [point for point in points if self._is_sound(point)]
        elif points and points[-1] not in sound:
            newest = points[-1].dense.snapshot
            _, others = self._from_segments(None, named)
            if newer := [p for p in others if p.dense.snapshot > newest and self._is_sound(p)]:
                self.report.damaged.append(
                    f"{self._store / MANIFEST_FILE} is older than {newer[-1].dense.file}: it was "
                    "replaced by an older copy"
                )
                named, points = None, others
            elif not sound:
                _, others = self._from_segments(named, previous)
                points += [point for point in others if point not in points]
            sound = [point for point in points if self._is_sound(point)]
        if basis is None:
            self.report.lost.append(
                "no manifest and no dense part is sound, so nothing shows what the store held. Put "
                "the store back from a copy"
            )
        elif points and not sound:
            self.report.lost.append(
                "no snapshot is left of which every file is sound. Put the damaged files back from "
                'a copy; or recover(on_damage="fall_back"), which takes the newest undamaged state '
                "of each row"
            )
        else:
            self._plan(basis, named, points, sound)

    def _plan(
        self, basis: Manifest, named: Manifest | None, points: list[_Point], sound: list[_Point]
    ) -> None:
        kept = _together(basis, sound)
        held = {record.snapshot for record in kept.dense}
        self.report.step = sound[-1].dense.last_step if sound else 0
        for point in points:
            if point.dense.snapshot not in held or point not in sound:
                why = "it is of another history" if point in sound else "a file of it is damaged"
                self.report.older.append(f"{point} is dropped: {why}")
        if named is not None:
            for record in named.records():  # also those that serve as a fallback alone
                self._look_at(record)
        if self.report.damaged:
            self._new = kept
            files = ", ".join(record.file for record in kept.records()) or "no segment"
            self.report.actions.append(f"write {self._store / MANIFEST_FILE}: {files}")

    def _read(self, file: str) -> Manifest | None:
        """Return a manifest of the store; None, noted: it is of no use."""
        path = self._store / file
        try:
            manifest = read_manifest(self._store, file)
            if manifest is not None:
                manifest.require_room(MAX_SOUND, path)
                return manifest
        except DamageError as error:
            self.report.damaged.append(str(error))
            return None
        if file == MANIFEST_FILE:
            self.report.damaged.append(f"{path} is missing")
        return None

    def _from_segments(
        self, named: Manifest | None, previous: Manifest | None
    ) -> tuple[Manifest | None, list[_Point]]:
        """Return what the store is of, and its snapshots, whatever its manifest names.

        Where the manifest before is sound and this one is not, only one commit is lost: that of a
        snapshot that followed it.
        """
        found: list[tuple[Manifest, str]] = []
        for path in list_directory(self._segments):
            if (parse_segment_name(path.name) or (0, ""))[1] != "dense":
                continue
            try:
                found.append(read_point(path))
            except DamageError as error:
                if str(error) not in self.report.damaged:
                    self.report.damaged.append(str(error))
        ascending = sorted((m for m, _ in found), key=lambda m: m.dense[0].snapshot)
        # One that is gone was superseded by the commit that is lost, or will not be missed.
        points: list[_Point] = []
        if previous is not None:
            held = (dense for dense in previous.dense if exists(self._segments / dense.file))
            points = [_Point.of(previous, dense) for dense in held]
        if named is None and previous is not None:
            is_follower = {m.dense[0].id for m, parent in found if parent == previous.commit_id}
            ascending = [m for m in ascending if m.dense[0].id in is_follower]
        basis = named or previous or (ascending[-1] if ascending else None)
        if basis is None:
            return None, []
        known = {point.dense.id for point in points}
        for manifest in ascending:
            if manifest.store_id == basis.store_id and manifest.dense[0].id not in known:
                points.append(_Point.of(manifest, manifest.dense[0]))
        self._basis = basis
        return basis, sorted(points, key=lambda point: point.dense.snapshot)

    def _is_sound(self, point: _Point) -> bool:
        found = [self._look_at(record) for record in point.records()]  # each is named
        if any(found):
            return False
        if (reason := refusal(self._reader(), point.rows)) is not None:
            self.report.damaged.append(f"{point}: {reason}")
            return False
        return True

    def _look_at(self, record: SegmentRecord) -> str:
        """Read a file once; return what is wrong with it, noted, or nothing."""
        key = record.file, record.id
        if (known := self._reasons.get(key)) is None:
            known = ""
            try:
                check_segment(self._reader(), record)
            except StorageError:
                raise  # it may be sound
            except StoreError as error:
                known = str(error)
                self.report.damaged.append(known)
            self._reasons[key] = known
        return known

    def _reader(self) -> StoreReader:
        """Return what reads segments of the store, whichever manifest names them."""
        assert self._basis is not None
        return StoreReader(self._store, self._basis)

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
        assert self._new is not None
        backup = _make_backup(self._store)
        self.report.backup = str(backup)
        live = {record.file for record in self._new.records()}
        dropped = [path for path in list_directory(self._segments) if path.name not in live]
        for path in (self._store / MANIFEST_FILE, self._store / PREVIOUS_FILE, *dropped):
            _keep(path, backup)
        sync_directory(backup)
        # Twice, so that the one before is sound, too.
        for _ in range(2):
            write_manifest(self._store, self._new)
        for path in dropped:
            if path.is_file() and not path.is_symlink():
                path.unlink()


def _together(basis: Manifest, points: list[_Point]) -> Manifest:
    """Return a manifest with the newest of these snapshots, and those before that fit to it."""
    fitting: list[_Point] = []
    known: dict[int, SegmentRecord] = {}
    for point in reversed(points):
        if _fits(known, point.rows):
            fitting.insert(0, point)
            known.update({record.snapshot: record for record in point.rows})
    listed = [known[number] for number in sorted(known)]
    oldest = fitting[0].dense.snapshot if fitting else 0
    ids = tuple(p.dense.id for p in fitting if not basis.descends_from(p.dense.id))
    known_commits = replace(basis, ancestors=(*basis.ancestors, basis.commit_id, *ids))
    made = known_commits.next(
        tuple(point.dense for point in fitting),
        keep_needed(listed, oldest),
    )
    return Manifest.from_text(made.text, "the rebuilt manifest")  # through the gate


def _fits(known: Mapping[int, SegmentRecord], records: Records) -> bool:
    """Return whether segments of a snapshot can be in one store with those of later ones.

    That is: of the same history, in which none is between them or newer than a base.
    """
    if not known or not records:
        return True
    mine = {record.snapshot: record for record in records}
    newest = max(mine)
    older = {number: record for number, record in known.items() if number <= newest}
    return all(mine.get(number) == record for number, record in older.items())


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
