"""The round trip: a full-recovery point is read back and compared with what was captured.

Of each form that the state has, the first full-recovery point is read from its committed files, as
a recovery reads them. Each row must have the hash that it had when it was captured, the dense part
all its bits. So a store that ``recover()`` would refuse, or take wrongly, is found while training
runs. It is read in blocks, when no snapshot is to be committed, on the thread that commits them.
"""

from __future__ import annotations

import json
import math
import queue
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cpr_ext._native import native
from cpr_ext.errors import DamageError, StoreError
from cpr_ext.recovery.findings import Findings
from cpr_ext.recovery.restore import read_block, read_dense, slots_for
from cpr_ext.recovery.shard_segments import ShardSegments, open_shard
from cpr_ext.recovery.verify import expect, refusal
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.saving.scrub import Scrub
from cpr_ext.saving.selection import SnapshotKind
from cpr_ext.saving.snapshot import Snapshot
from cpr_ext.saving.table_scrub import RowForm, SavedHashes
from cpr_ext.state.dense_state import DensePart
from cpr_ext.state.precision import Precision
from cpr_ext.storage.commit_thread import CommitThread
from cpr_ext.storage.store_reader import StoreReader

logger = logger_of("saving")

#: The most of the time of one core that it takes.
SHARE = 0.2
_BLOCK_BYTES = 8 << 20


#: The form of each table's rows and their precisions in files, and the form of the dense part.
Form = tuple[tuple[dict[str, RowForm], tuple[str, ...]], Any]


class NotComparedError(Exception):
    """What was saved could not be compared; says why."""


class DifferenceError(Exception):
    """A recovery would not restore what was captured; says what.

    Attributes:
        table, row_id: of a row; else None and -1.
        arrays: the row as read: {array: (...)}.
    """

    def __init__(
        self,
        what: str,
        table: str | None = None,
        row_id: int = -1,
        arrays: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(what)
        self.table = table
        self.row_id = row_id
        self.arrays = arrays or {}


Outcome = DifferenceError | NotComparedError | None


@dataclass(frozen=True)
class Captured:
    """What is compared with the files of a snapshot.

    Attributes:
        number: of the snapshot.
        dense: the dense part.
        hashes: of all rows; None: rows of this form were compared before.
        form: of rows and dense part.
    """

    number: int
    dense: DensePart
    hashes: Sequence[SavedHashes] | None
    form: Form


class RoundTrip:
    """Reads one committed snapshot back; while it works, it keeps nothing alive but copies.

    Args:
        on_end: called once with what came of it; not kept alive.

    Attributes:
        number: of the snapshot.
        bytes_read: so far.
        has_ended: it does nothing more.
    """

    def __init__(
        self,
        directory: Path,
        captured: Captured,
        *,
        direct_io: bool,
        on_end: Callable[[Outcome], None],
    ) -> None:
        self.number = captured.number
        self.form = captured.form
        self.bytes_read = 0
        self.has_ended = False
        self._pieces = _compare(directory, captured, direct_io)
        self._on_end = weakref.WeakMethod(on_end)

    def advance(self) -> float | None:
        """Compare the next block; return for how long to leave the core to others, None: ended."""
        if self.has_ended:
            return None
        started = time.perf_counter()
        outcome: Outcome = None
        try:
            self.bytes_read += next(self._pieces)
            return (time.perf_counter() - started) * (1 / SHARE - 1)
        except StopIteration:
            pass
        except (DifferenceError, NotComparedError) as error:
            outcome = error.with_traceback(None)  # whose frames would keep this alive
        except Exception as error:  # no memory, no thread, an error of the system
            outcome = NotComparedError(f"{type(error).__name__}: {error}")
        self.has_ended = True
        if (note := self._on_end()) is not None:
            note(outcome)
        return None


def _compare(directory: Path, captured: Captured, direct_io: bool) -> Iterator[int]:
    """Compare block after block; yield the bytes of each.

    Raises:
        DifferenceError: a recovery would refuse it, or restore something else.
        NotComparedError: it is not there any more, or hashes are missing.
    """
    reader = StoreReader(directory)
    try:
        record = next((r for r in reader.dense.segments if r.snapshot == captured.number), None)
        if record is None:
            raise NotComparedError("newer snapshots took its place before it was read")
        _compare_dense(captured.dense, read_dense(reader.dense, record, direct_io=direct_io))
        yield record.file_bytes
        if captured.hashes is not None:
            yield from _compare_shards(reader, captured.number, captured.hashes, direct_io)
    except StoreError as error:
        if reader.is_gone():
            text = "newer snapshots took its place while it was read"
            raise NotComparedError(text) from error
        raise DifferenceError(str(error)) from error


def _compare_shards(
    reader: StoreReader, number: int, of_tables: Sequence[SavedHashes], direct_io: bool
) -> Iterator[int]:
    for shard, manifest in enumerate(reader.shards):
        expected = expect(reader.tables, shard, reader.num_shards)
        if (reason := refusal(manifest, number, expected)) is not None:
            raise DifferenceError(f"{manifest.directory}: {reason}")
        findings = Findings()
        # Files older than the newest base are no part of this point's state.
        records = reader.live(shard, number)
        opened = open_shard(manifest, records, expected.ranges, findings, direct_io)
        if findings.damaged_segments:
            raise DamageError(findings.damaged_segments[0].reason)
        slots = slots_for([usable.rows.segment for usable in opened.usable])
        for hashes in of_tables:
            yield from _compare_rows(opened, hashes, slots, direct_io)


def _compare_rows(
    shard: ShardSegments, hashes: SavedHashes, slots: Any, direct_io: bool
) -> Iterator[int]:
    first, last = shard.ranges[hashes.table]
    if not hashes.values[first:last].all():
        num_rows = int((hashes.values[first:last] == 0).sum())
        raise NotComparedError(f"{num_rows} rows of '{hashes.table}' left no hash")
    names = [name for name, _, _ in hashes.form]
    row_bytes = sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in hashes.form)
    block_rows = max(1, _BLOCK_BYTES // max(1, row_bytes))
    for begin in range(first, last, block_rows):
        end = min(begin + block_rows, last)
        arrays = read_block(shard, hashes.table, begin, end, slots, direct_io=direct_io)
        if sorted(arrays) != sorted(names):
            raise DifferenceError(
                f"table '{hashes.table}' has {sorted(arrays)} in the store, {sorted(names)} in "
                "training",
                hashes.table,
            )
        found = native.HostRowHashes(name=hashes.table, num_rows=end - begin)
        found.record_range([arrays[name] for name in names], 0, end - begin)
        same = found.range_values(0, end - begin) == hashes.values[begin:end]
        if not same.all():
            at = int(np.argmin(same))
            row = {name: arrays[name][at].clone() for name in names}
            raise DifferenceError(
                f"row {begin + at} of table '{hashes.table}' is another one in its file",
                *(hashes.table, begin + at, row),
            )
        yield (end - begin) * row_bytes


def _compare_dense(captured: DensePart, read: DensePart) -> None:
    """Raise DifferenceError unless a dense part has every bit that was captured."""
    if json.loads(json.dumps(captured.skeleton)) != read.skeleton:
        raise DifferenceError("values of the dense part that are no tensors")
    if captured.tensors.keys() != read.tensors.keys():
        names = sorted(captured.tensors.keys() ^ read.tensors.keys())
        raise DifferenceError(f"tensors of the dense part: {names[:4]}")
    for name, tensor in captured.tensors.items():
        found = read.tensors[name]
        is_like = (tensor.dtype, tensor.shape) == (found.dtype, found.shape)
        if not is_like or not torch.equal(bytes_of(tensor), bytes_of(found)):
            raise DifferenceError(f"the tensor '{name}' of the dense part")
    read.tree()  # as recover() does; raises DamageError


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return (n,) uint8, all bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


#: A difference, and the points of the form in which it was found.
FoundIn = tuple[DifferenceError, list[Snapshot]]


class RoundTrips:
    """Which full-recovery points are read back, and what came of it.

    Points of a form that was read back without a difference count as read back, too. All but
    :meth:`take_found` happens on the committer's thread.

    Args:
        precision: of rows in files; those of another one are another form.

    Attributes:
        num_done: points that were read back as captured.
    """

    def __init__(
        self,
        directory: Path,
        scrub: Scrub,
        committer: CommitThread,
        *,
        direct_io: bool,
        precision: Precision,
    ) -> None:
        self.num_done = 0
        self._directory = directory
        self._scrub = scrub
        self._committer = committer
        self._direct_io = direct_io
        self._precision = precision
        self._trip: RoundTrip | None = None
        self._compared: Form | None = None
        self._waiting: list[Snapshot] = []  # for the trip
        self._found: queue.SimpleQueue[FoundIn] = queue.SimpleQueue()

    def note_committed(self, snapshot: Snapshot, dense: DensePart) -> None:
        """Note that a snapshot is committed; read it back if none of its form was."""
        if not snapshot.is_complete:
            return
        rows = (self._scrub.form(), self._precisions(snapshot.kind))
        form, trip = (rows, _form_of(dense)), self._trip
        if form == self._compared:
            snapshot.is_read_back = True
            return
        # A base takes the place of all files before it.
        if trip is not None and trip.bytes_read and trip.form[0] == rows and not _is_base(snapshot):
            # Its rows are read first: a dense part may change its form at any snapshot.
            self._waiting += [snapshot] if trip.form == form else []
            return
        are_compared = self._compared is not None and self._compared[0] == rows
        hashes = None if are_compared else self._scrub.saved()
        if trip is not None:
            trip.has_ended = True
        self._waiting = [snapshot]
        self._trip = RoundTrip(
            self._directory,
            Captured(snapshot.number, dense, hashes, form),
            direct_io=self._direct_io,
            on_end=self._note_end,
        )
        self._committer.do_when_idle(self._trip)

    def _note_end(self, outcome: Outcome) -> None:
        waiting, trip = self._waiting, self._trip
        assert trip is not None
        self._waiting, self._trip = [], None
        if isinstance(outcome, NotComparedError):
            logger.info("snapshot %d was not compared with its files: %s", trip.number, outcome)
        elif outcome is not None:
            self._compared = None
            self._found.put((outcome, waiting))
        else:
            self._compared = trip.form
            self.num_done += 1
            for snapshot in waiting:
                snapshot.is_read_back = True
            size = trip.bytes_read / 1e6
            logger.info("snapshot %d was read back as captured: %.1f MB", trip.number, size)

    def _precisions(self, kind: SnapshotKind) -> tuple[str, ...]:
        """Return the precisions of rows in a snapshot and those before it that recovery reads."""
        kinds: tuple[SnapshotKind, ...] = ("base",) if kind == "base" else ("base", "partial")
        weights = {self._precision.of_weights(each) for each in kinds}
        return (*sorted(weights), self._precision.state)

    def finish(self) -> None:
        """Read all of the snapshot that is being read back."""
        while (trip := self._trip) is not None:
            trip.advance()

    def drop(self) -> None:
        """Forget the snapshot that is being read back, and what was found."""
        if self._trip is not None:
            self._trip.has_ended = True
        self._trip, self._waiting, self._compared = None, [], None
        while not self._found.empty():
            self._found.get()

    def take_found(self) -> list[FoundIn]:
        """Return each difference that was found, once, and the points that it revokes."""
        found = []
        while not self._found.empty():
            found.append(self._found.get())
        return found


def _is_base(snapshot: Snapshot) -> bool:
    return snapshot.kind == "base"


def _form_of(part: DensePart) -> Any:
    """Return the form of a dense part: names, types and shapes, without values."""
    return (
        {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in part.tensors.items()},
        _types_in(part.skeleton),
    )


def _types_in(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _types_in(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_types_in(each) for each in value]
    return type(value)
