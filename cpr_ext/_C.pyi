# Written by tools/native_stub.py from csrc/bindings/; do not edit.
"""Native core of cpr_ext. Private: import it through cpr_ext._native only."""

import collections.abc
import os
import typing

import numpy
import numpy.typing
import torch
import typing_extensions

__all__: list[str] = [
    "ALIGNMENT",
    "AccessCounter",
    "CapturedRows",
    "ChangeMeter",
    "DeviceAccessCounter",
    "DeviceChangeMeter",
    "DeviceDirtyRows",
    "DeviceRowHashes",
    "DeviceRowSampler",
    "DeviceStager",
    "DirtyRows",
    "HostRowHashes",
    "MAX_HEADER_BYTES",
    "ParameterLists",
    "PendingComparison",
    "PendingRows",
    "RestoreSource",
    "RowCounter",
    "RowDelta",
    "RowHashes",
    "RowSampler",
    "RowTracker",
    "SEGMENT_VERSION",
    "SMALL_BLOCK",
    "SegmentJob",
    "SegmentLayout",
    "SegmentTable",
    "ShardChecksums",
    "ShardLayout",
    "SlotPool",
    "SnapshotPipeline",
    "StopFlag",
    "StreamMark",
    "TakenRows",
    "TensorVersions",
    "ThreadPool",
    "TrackedTable",
    "apply_delta",
    "are_clean",
    "compare_changing",
    "count_lookups",
    "crc32c",
    "device_top_rows",
    "find_nan",
    "gather_chosen",
    "gather_rows",
    "has_cuda",
    "instruction_set",
    "instruction_sets",
    "nonzero_rows",
    "num_devices",
    "num_dirty_of",
    "restore_segment",
    "restore_segments",
    "scatter_rows",
    "set_memory_reclaimer",
    "top_rows",
    "trim_memory",
    "trim_memory_if_short",
    "use_dlpack",
    "use_instruction_set",
    "use_stream",
]

class ThreadPool:
    """Threads shared by the native operations; the caller counts as one."""

    def __init__(self, *, num_threads: typing.SupportsIndex) -> None: ...
    @property
    def num_threads(self) -> int:
        """With the caller."""

class StopFlag:
    """Asks work on another thread to return early."""

    def __init__(self) -> None: ...
    def clear(self) -> None:
        """Withdraw the request."""

    def is_set(self) -> bool:
        """Return True from set() until clear()."""

    def set(self) -> None:
        """Ask."""

class TakenRows:
    """The state that a tracker cleared when rows were captured; for put_back."""

    def __repr__(self) -> str: ...
    @property
    def num_rows(self) -> int:
        """Number of them that were dirty."""

    @property
    def row_ids(self) -> numpy.typing.NDArray[numpy.int64]:
        """(num_rows) int64, ascending, a copy."""

class PendingRows:
    """Rows that a device is selecting; it keeps their ids."""

    def is_ready(self) -> bool:
        """Return True if read() need not wait."""

    def read(self) -> numpy.typing.NDArray[numpy.int64]:
        """Return the row ids: int64, ascending. Waits for the device."""

class RowTracker:
    """Which rows of one table are dirty (looked up since last taken), and how
    much each matters. Used by one thread at a time.
    """

    def __repr__(self) -> str: ...
    def begin_select(
        self,
        begin: typing.SupportsIndex,
        end: typing.SupportsIndex,
        k: typing.SupportsIndex,
        *,
        weight: torch.Tensor | numpy.typing.NDArray[typing.Any] | None = None,
    ) -> PendingRows | None:
        """Begin what select does, of a tracker on a device, without waiting for it. Returns None
        for a tracker on the CPU.
        """

    def check(self, indices: torch.Tensor | numpy.typing.NDArray[typing.Any]) -> None:
        """Raise RowIndexError for the first index outside the table."""

    def dirty_rows(
        self, begin: typing.SupportsIndex = 0, end: typing.SupportsIndex | None = None
    ) -> numpy.typing.NDArray[numpy.int64]:
        """List the dirty rows in [begin, end): int64, ascending."""

    def is_clean(
        self, begin: typing.SupportsIndex = 0, end: typing.SupportsIndex | None = None
    ) -> bool:
        """Return True if no row of [begin, end) is dirty; stops at the first that is."""

    def make_memory(self) -> None:
        """Have the system make memory now that it else makes when rows are first counted.

        No other call may run.
        """

    def memory_bytes(self) -> int:
        """Return the bytes for this table, once all its rows are used."""

    def num_dirty(
        self, begin: typing.SupportsIndex = 0, end: typing.SupportsIndex | None = None
    ) -> int:
        """Count the dirty rows in [begin, end); by default in the whole table."""

    def observe(self, indices: torch.Tensor | numpy.typing.NDArray[typing.Any]) -> None:
        """Mark the rows dirty and add to their score.

        indices: int32 or int64, any shape, contiguous; torch (CPU) or numpy. Raises
        RowIndexError, with nothing changed, for an index outside the table.
        """

    def put_back(self, taken: TakenRows) -> None:
        """Mark the rows of a failed save dirty again, and add their scores to those gathered
        since. Leaves `taken` empty.
        """

    def report_faults(self) -> None:
        """Raise RowIndexError, once, if a device has found an index outside the table since
        the last call. Does not wait for the device.
        """

    def select(
        self,
        begin: typing.SupportsIndex,
        end: typing.SupportsIndex,
        k: typing.SupportsIndex,
        *,
        weight: torch.Tensor | numpy.typing.NDArray[typing.Any] | None = None,
        pool: ThreadPool | None = None,
        stop: StopFlag | None = None,
    ) -> numpy.typing.NDArray[numpy.int64] | None:
        """Select at most k dirty rows in [begin, end), highest score first, ties by lowest row id.

        weight: (num_rows, embedding_dim), as it is now; ChangeMeter needs it, others ignore
        it. Returns int64 row ids, ascending; the same for any number of threads. None: `stop`,
        a StopFlag that another thread may set, was set before the rows were found.
        """

    def take(
        self,
        row_ids: torch.Tensor | numpy.typing.NDArray[typing.Any],
        *,
        weight: torch.Tensor | numpy.typing.NDArray[typing.Any] | None = None,
        pool: ThreadPool | None = None,
    ) -> TakenRows:
        """Clear the score and dirtiness of rows that have just been captured.

        row_ids: (n) int64, strictly ascending. Returns TakenRows for put_back.
        """

    def take_chosen(
        self,
        row_ids: torch.Tensor | numpy.typing.NDArray[typing.Any],
        *,
        chosen: PendingRows,
        first: typing.SupportsIndex,
        weight: torch.Tensor | numpy.typing.NDArray[typing.Any] | None = None,
    ) -> TakenRows:
        """Do what take does, with the ids that a device still has.

        chosen: what begin_select of this tracker returned, and read() has been called.
        first: position of row_ids[0] in what it returned; row_ids are the rows from there on.
        """

    def take_range(
        self,
        begin: typing.SupportsIndex,
        end: typing.SupportsIndex,
        *,
        weight: torch.Tensor | numpy.typing.NDArray[typing.Any] | None = None,
        pool: ThreadPool | None = None,
    ) -> TakenRows:
        """Take every row in [begin, end)."""

    @property
    def device(self) -> int | None:
        """Number of the CUDA device that its lookups must lie on; None: the CPU."""

    @property
    def name(self) -> str:
        """Name of its table."""

    @property
    def num_rows(self) -> int:
        """Rows of its table."""

class DirtyRows(RowTracker):
    """One bit per row; every dirty row scores the same."""

    def __init__(self, *, name: str, num_rows: typing.SupportsIndex) -> None: ...

class AccessCounter(RowTracker):
    """MFU: how often each row was looked up; four bytes per row, saturating at 2**32 - 1."""

    def __init__(self, *, name: str, num_rows: typing.SupportsIndex) -> None: ...
    def counts(self) -> numpy.typing.NDArray[numpy.uint32]:
        """Return a read-only view (num_rows) uint32 of the live counts, keeping the counter alive.
        Those of later batches appear in it once a call has waited for them.
        """

    def sum_counts(self, begin: typing.SupportsIndex, end: typing.SupportsIndex) -> int:
        """Return the sum of the counts of rows [begin, end)."""

class RowSampler(RowTracker):
    """SSU: a bounded sample of the lookups; two bits per row and eight bytes per sampled row."""

    def __init__(
        self,
        *,
        name: str,
        num_rows: typing.SupportsIndex,
        capacity: typing.SupportsIndex,
        period: typing.SupportsIndex = 2,
        seed: typing.SupportsIndex = 0,
    ) -> None: ...
    @property
    def capacity(self) -> int:
        """Most rows that the sample holds."""

    @property
    def num_sampled(self) -> int:
        """Rows in the sample."""

class ChangeMeter(RowTracker):
    """SCAR: L2 change of each dirty row since last taken; holds one more copy of the weight."""

    def __init__(
        self, *, name: str, weight: torch.Tensor | numpy.typing.NDArray[typing.Any]
    ) -> None: ...

class RowHashes:
    """Two bytes per row of one table: a hash of it as it was last saved.

    arrays: what is hashed of a row, each (num_rows, ...), always in one order.
    """

    def forget(self) -> None:
        """Forget all hashes: rows may have any values."""

    def make_memory(self) -> None:
        """Have the system make memory now that it else makes when rows are first recorded.

        No other call may run.
        """

    def memory_bytes(self) -> int:
        """Return the bytes for this table."""

    def range_values(
        self, begin: typing.SupportsIndex, end: typing.SupportsIndex
    ) -> numpy.typing.NDArray[numpy.uint16]:
        """Return the hashes of the rows [begin, end); 0: not known."""

    def record(
        self,
        arrays: collections.abc.Sequence[torch.Tensor | numpy.typing.NDArray[typing.Any]],
        row_ids: torch.Tensor | numpy.typing.NDArray[typing.Any],
        pool: ThreadPool | None = None,
    ) -> None:
        """Record the rows row_ids (n) int64 as they are now."""

    def record_range(
        self,
        arrays: collections.abc.Sequence[torch.Tensor | numpy.typing.NDArray[typing.Any]],
        begin: typing.SupportsIndex,
        end: typing.SupportsIndex,
        pool: ThreadPool | None = None,
    ) -> None:
        """Record the rows [begin, end) as they are now."""

class HostRowHashes(RowHashes):
    """Hashes of a table in the host's memory."""

    def __init__(self, *, name: str, num_rows: typing.SupportsIndex) -> None: ...
    def compare(
        self,
        arrays: collections.abc.Sequence[torch.Tensor | numpy.typing.NDArray[typing.Any]],
        tracker: RowTracker,
        row_ids: torch.Tensor | numpy.typing.NDArray[typing.Any],
    ) -> tuple[int, int, int]:
        """Compare those rows of row_ids (n) int64 that the tracker calls clean.

        Returns (the first row that differs, or -1; rows compared; clean rows whose hash is not
        known).
        """

    def compare_range(
        self,
        arrays: collections.abc.Sequence[torch.Tensor | numpy.typing.NDArray[typing.Any]],
        tracker: RowTracker,
        begin: typing.SupportsIndex,
        end: typing.SupportsIndex,
    ) -> tuple[int, int, int]:
        """Compare those rows of [begin, end) that the tracker calls clean, as compare does."""

    def values(
        self, row_ids: torch.Tensor | numpy.typing.NDArray[typing.Any]
    ) -> numpy.typing.NDArray[numpy.uint16]:
        """Return the hashes (n,) of rows row_ids (n) int64; 0: not known."""

class PendingComparison:
    """A comparison that a device makes."""

    def is_ready(self) -> bool:
        """Return True if read() need not wait."""

    def read(self) -> tuple[int, int, int]:
        """Return what HostRowHashes.compare does; all rows were compared. Waits for the device."""

class DeviceRowHashes(RowHashes):
    """Hashes of a table on a CUDA device, which compares them there. Only range_values waits."""

    def __init__(
        self, *, name: str, num_rows: typing.SupportsIndex, device: typing.SupportsIndex
    ) -> None: ...
    def begin_compare(
        self,
        arrays: collections.abc.Sequence[torch.Tensor | numpy.typing.NDArray[typing.Any]],
        tracker: RowTracker,
        begin: typing.SupportsIndex,
        end: typing.SupportsIndex,
    ) -> PendingComparison:
        """Begin to compare the rows [begin, end) that the tracker calls clean."""

    def record_chosen(
        self,
        arrays: collections.abc.Sequence[torch.Tensor | numpy.typing.NDArray[typing.Any]],
        chosen: PendingRows,
    ) -> None:
        """Record rows that the table's tracker has chosen, and that were read."""

class RowCounter:
    """Counts rows of tables, such as those of sparse gradients, on a thread of its own. A
    tracker's calls wait for the rows that it was given.
    """

    def __init__(
        self,
        weights: collections.abc.Sequence[torch.Tensor],
        trackers: collections.abc.Sequence[collections.abc.Sequence[RowTracker]],
        pool: ThreadPool | None = None,
    ) -> None:
        """weights: the tables' tensors; trackers: of each table, those that count its rows."""

    def count_gradients(
        self,
        tables: collections.abc.Sequence[typing.SupportsIndex],
        kept: list[torch.Tensor] | None = None,
    ) -> tuple[int, list[int], list[int]]:
        """Read the gradients of the tables at these positions.

        kept: gets the tensors that GPUs will read, for the caller to keep until then. Without
        it, gradients on GPUs are not read.

        Returns the number of their row ids, the positions of tables that have a gradient, and
        the positions of those whose gradient it cannot read: dense, not contiguous.
        Raises RowIndexError, with nothing counted, and the error that ended counting.
        """

    def count_rows(
        self,
        tables: collections.abc.Sequence[typing.SupportsIndex],
        rows: collections.abc.Sequence[torch.Tensor | numpy.typing.NDArray[typing.Any]],
    ) -> None:
        """Count rows of the tables at these positions.

        rows: of each, int32 or int64 of any shape, contiguous, where the trackers are. Raises
        RowIndexError, with no row on the CPU counted, and the error that ended counting.
        """

    def wait(self) -> None:
        """Wait until all rows are counted.

        Raises the error that ended counting, each time.
        """

    @property
    def error(self) -> str | None:
        """The message of the error that ended counting, or None."""

class ParameterLists:
    """The parameters of an optimizer's groups, as they were."""

    def __init__(self, groups: list[dict[str, typing.Any]]) -> None: ...
    def are_same(self, groups: list[dict[str, typing.Any]]) -> bool:
        """Check that the groups hold the same parameters in the same order."""

class TensorVersions:
    """The weights of tables and their optimizers' state by row, and PyTorch's version counters
    of both. Tables are given by their positions.
    """

    def __init__(
        self, num_tables: typing.SupportsIndex, is_row_state: collections.abc.Callable[..., bool]
    ) -> None:
        """is_row_state: called with a value of a state and the number of rows. Nothing is read
        yet. all, below: a cpr_ext.Table each, always the same ones.
        """

    def accept(
        self, all: list[typing.Any], tables: collections.abc.Sequence[typing.SupportsIndex]
    ) -> None:
        """Read the versions of the tensors that tables had. One that another has replaced still
        differs. Tables with more or fewer of them are read.
        """

    def are_same(self, all: list[typing.Any]) -> bool:
        """Check that all consist of the same tensors, in the same versions."""

    def differences(
        self, all: list[typing.Any], tables: collections.abc.Sequence[typing.SupportsIndex]
    ) -> list[tuple[int, int]]:
        """Return the tables that differ, each with 1: weight written, 2: it has other memory,
        3: state replaced, 4: state written.
        """

    def has_other_state(self, all: list[typing.Any], table: typing.SupportsIndex) -> bool:
        """Check whether one was in this table's state."""

    def have_same_tensors(self, all: list[typing.Any]) -> bool:
        """Check that no tensor of a state was made, dropped or replaced."""

    def read(
        self, all: list[typing.Any], tables: collections.abc.Sequence[typing.SupportsIndex]
    ) -> None:
        """Take tables as they are now, whatever tensors they consist of."""

class StreamMark:
    """A place in the stream that this thread trains on: behind all that it has
    submitted to the device.
    """

    def __init__(self, *, device: typing.SupportsIndex) -> None: ...
    def is_passed(self) -> bool:
        """Return whether the stream has got there."""

    def wait(self) -> None:
        """Wait until it has."""

class DeviceStager:
    """Rows of tables on a CUDA device into staging slots and back, in the order of its stream."""

    def __init__(
        self,
        *,
        device: typing.SupportsIndex,
        slot_bytes: typing.SupportsIndex,
        num_slots: typing.SupportsIndex,
    ) -> None: ...
    def settle(self) -> None:
        """Have packed tables captured beside the stream: once it has got here, where their rows
        are, which nothing changes any more.
        """

    @property
    def device(self) -> int:
        """Number of its CUDA device."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a buffer: the requested number, or fewer if the device was short of memory."""

class DeviceAccessCounter(RowTracker):
    """MFU of a table on a CUDA device: AccessCounter with its counts there. A call that asks for
    a result waits for the device's stream, the others do not.
    """

    def __init__(
        self, *, name: str, num_rows: typing.SupportsIndex, device: typing.SupportsIndex
    ) -> None: ...
    def counts(self) -> numpy.typing.NDArray[numpy.uint32]:
        """Return a copy of the counts: (num_rows) uint32."""

    def sum_counts(self, begin: typing.SupportsIndex, end: typing.SupportsIndex) -> int:
        """Return the sum of the counts of rows [begin, end)."""

class DeviceDirtyRows(RowTracker):
    """DirtyRows of a table on a CUDA device. Calls wait as those of DeviceAccessCounter."""

    def __init__(
        self, *, name: str, num_rows: typing.SupportsIndex, device: typing.SupportsIndex
    ) -> None: ...

class DeviceRowSampler(RowTracker):
    """SSU of a table on a CUDA device: RowSampler with its sample there; two bits per row and
    twelve bytes per sampled row. Calls wait as those of DeviceAccessCounter.
    """

    def __init__(
        self,
        *,
        name: str,
        num_rows: typing.SupportsIndex,
        capacity: typing.SupportsIndex,
        period: typing.SupportsIndex = 2,
        seed: typing.SupportsIndex = 0,
        device: typing.SupportsIndex,
    ) -> None: ...
    @property
    def capacity(self) -> int:
        """Most rows that the sample holds."""

    @property
    def num_sampled(self) -> int:
        """Rows in the sample."""

class DeviceChangeMeter(RowTracker):
    """SCAR of a table on a CUDA device: ChangeMeter with its copy of the weight there. Calls wait
    as those of DeviceAccessCounter; a selection raises NanError when it is read.
    """

    def __init__(
        self,
        *,
        name: str,
        weight: torch.Tensor | numpy.typing.NDArray[typing.Any],
        device: typing.SupportsIndex,
    ) -> None: ...

class SlotPool:
    """A fixed number of page-aligned buffers."""

    def __init__(
        self, *, num_slots: typing.SupportsIndex, slot_bytes: typing.SupportsIndex
    ) -> None: ...
    @property
    def num_free(self) -> int:
        """Slots that are not leased."""

    @property
    def num_slots(self) -> int:
        """All slots."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""

class SegmentTable:
    """The rows of one table in a segment file."""

    def __init__(
        self,
        *,
        name: str,
        num_rows: typing.SupportsIndex,
        row_ids_offset: typing.SupportsIndex = -1,
        range_begin: typing.SupportsIndex = 0,
        row_ids: torch.Tensor | numpy.typing.NDArray[typing.Any] | None = None,
        is_packed: bool = False,
        block_bytes: typing.SupportsIndex = 4096,
    ) -> None:
        """row_ids: (num_rows,) int64, ascending, not changed from now on. is_packed: the tensors
        are copies of these rows alone, in this order; those on a device were settled, see
        DeviceStager.settle. block_bytes: of the segment.
        """

    def add_rows(
        self,
        name: str,
        tensor: torch.Tensor | numpy.typing.NDArray[typing.Any],
        file_offset: typing.SupportsIndex,
        first_row_id: typing.SupportsIndex = 0,
        stager: DeviceStager | None = None,
        precision: str = "float32",
    ) -> None:
        """Add an array of rows.

        first_row_id: of the tensor's first row. stager: of the tensor's CUDA device; None: the
        tensor is on the CPU. precision: of the float32 rows in the file.
        """

    def chunk_bytes(self, count: typing.SupportsIndex) -> int:
        """Return the bytes that a chunk of `count` rows takes in a slot."""

    def describe(
        self,
        name: str,
        arrays: str,
        stored: collections.abc.Sequence[tuple[str, str, str]],
        shape: str | None = None,
    ) -> None:
        """Set what the header of a new segment says of the table.

        name: a JSON text. arrays: one that describes the rows. stored: of row_ids and each
        array the name (a JSON text), the dtype in safetensors, and the shape of a row
        (',2,3'). shape: of a tensor that is no table ('2,3').
        """

    def in_file(
        self,
        num_rows: typing.SupportsIndex,
        range_begin: typing.SupportsIndex | None,
        block_bytes: typing.SupportsIndex,
    ) -> SegmentTable:
        """Return the table with the rows of a file, for place(). range_begin: None: its row ids
        are in the file.
        """

    def place(
        self,
        row_ids_offset: typing.SupportsIndex,
        array_offsets: collections.abc.Sequence[typing.SupportsIndex],
    ) -> None:
        """Set where in the file the row ids (-1: a range) and the arrays begin."""

    def rows_per_chunk(
        self, slot_bytes: typing.SupportsIndex, max_chunk_bytes: typing.SupportsIndex = 0
    ) -> int:
        """Return the most rows of a chunk that keep every chunk aligned in the file."""

    def with_range(
        self, begin: typing.SupportsIndex, num_rows: typing.SupportsIndex
    ) -> SegmentTable:
        """Return the table with other rows: so many from `begin` on."""

    def with_row_ids(
        self, row_ids: torch.Tensor | numpy.typing.NDArray[typing.Any]
    ) -> SegmentTable:
        """Return the table with other rows: (n,) int64, ascending, not changed from now on."""

class TrackedTable:
    """What forgets captured rows of a table."""

    def __init__(
        self,
        trackers: collections.abc.Sequence[RowTracker],
        weight: torch.Tensor | numpy.typing.NDArray[typing.Any] | None = None,
    ) -> None:
        """weight: the table's, or None if no tracker needs it."""

class CapturedRows:
    """The rows of a segment. Their trackers forget those that are captured, the moment they are,
    and get them back if the segment fails. Used by one thread at a time.
    """

    def __init__(self) -> None: ...
    def add_tables(
        self,
        tracked: collections.abc.Sequence[TrackedTable],
        tables: collections.abc.Sequence[SegmentTable],
        chosen: collections.abc.Sequence[PendingRows] = [],
    ) -> None:
        """Add the rows of a segment's tables, and who is to forget them.

        chosen: of each table what has its row ids on a device, or None; empty: of none.
        """

    def forget(self) -> None:
        """Free the memory: no rows will be put back."""

    def put_back(self) -> None:
        """Give the trackers back what they forgot."""

    def take_all(self) -> None:
        """Have the trackers forget all rows."""

class SegmentLayout:
    """Where the tables of a new segment lie in its file."""

    def __init__(
        self,
        *,
        tables: collections.abc.Sequence[SegmentTable],
        metadata: str,
        slot_bytes: typing.SupportsIndex,
        max_chunk_bytes: typing.SupportsIndex = 0,
        block_bytes: typing.SupportsIndex = 0,
    ) -> None:
        """Set where each table lies, whose chunks go through slots of so many bytes.

        metadata: a JSON object. block_bytes: 0: the small one where padding would count.
        """

    @property
    def file_bytes(self) -> int:
        """Size of the file."""

    @property
    def header_bytes(self) -> int:
        """Size of the header."""

class SegmentJob:
    """One segment on its way to disk."""

    def cancel(self, reason: str) -> None:
        """Abort the job, from any thread; wait() returns when nothing of it is left."""

    def capture(
        self,
        *,
        step: typing.SupportsIndex,
        max_bytes: typing.SupportsIndex = 0,
        wait_for_slot: bool = False,
        stop: StopFlag | None = None,
    ) -> list[tuple[int, int, int, int, list[int]]]:
        """Copy whole chunks into slots, about max_bytes of them (0: all), while slots are free.

        At least one chunk; then `stop` ends the call. Returns the captured chunks (table, first,
        count, step, checksums), their checksums not yet known.
        """

    def chunks(self) -> list[tuple[int, int, int, int, list[int]]]:
        """Return the captured chunks with their checksums; UsageError before all are written."""

    def finish(self, header: bytes) -> None:
        """Write the header and sync the file."""

    def header(self, layout: SegmentLayout) -> bytes:
        """Return the header for finish(); UsageError before all rows are written."""

    def mark_committed(self) -> None:
        """Record that a manifest names the segment; UsageError before finish()."""

    def wait(self, state: str, timeout_seconds: float | None = None) -> bool:
        """Return True once `state` is reached, False at the time-out. Raises the job's first
        error.
        """

    @property
    def captured_bytes(self) -> int:
        """Bytes that all captured chunks took in slots."""

    @property
    def state(self) -> str:
        """capturing, captured, written, committed or failed."""

class SnapshotPipeline:
    """Double-buffered writing of segments on a thread of its own."""

    def __init__(
        self,
        *,
        num_slots: typing.SupportsIndex,
        slot_bytes: typing.SupportsIndex,
        pool: ThreadPool | None = None,
        stagers: collections.abc.Sequence[DeviceStager] = [],
    ) -> None: ...
    def start(
        self,
        *,
        path: os.PathLike[str] | str | bytes,
        header_bytes: typing.SupportsIndex,
        file_bytes: typing.SupportsIndex,
        tables: collections.abc.Sequence[SegmentTable],
        direct_io: bool = True,
        refuse_nan: bool = True,
        max_chunk_bytes: typing.SupportsIndex = 0,
        hashes: collections.abc.Sequence[tuple[RowHashes, typing.SupportsIndex]] = [],
        captured: CapturedRows | None = None,
    ) -> SegmentJob:
        """Start a segment. Raises UsageError if the tables do not fit the slots or the file.

        hashes: of each table (hashes, n). Captured rows are recorded in `hashes`, of their
        first n arrays; it may be None.
        captured: whose trackers forget rows as they are captured; None: no tracker does.
        """

    def start_log(self) -> None:
        """Start to record when the checker and the writer work on a slot."""

    def stop_log(self) -> list[tuple[str, int, int]]:
        """Return the record: ("check" or "write", begin, end) in nanoseconds of
        time.perf_counter_ns(), in the order of their ends.
        """

    @property
    def num_free_slots(self) -> int:
        """Slots that hold no rows."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""

class RestoreSource:
    """Chunks of a segment file, and their tables."""

    def __init__(
        self,
        *,
        path: os.PathLike[str] | str | bytes,
        tables: collections.abc.Sequence[SegmentTable],
        wanted: collections.abc.Sequence[tuple[typing.SupportsIndex, typing.SupportsIndex]],
        chunks: collections.abc.Sequence[
            tuple[
                typing.SupportsIndex,
                typing.SupportsIndex,
                typing.SupportsIndex,
                typing.SupportsIndex,
                collections.abc.Sequence[typing.SupportsIndex],
            ]
        ],
    ) -> None: ...
    @property
    def path(self) -> str:
        """Path of the file."""

    @property
    def slot_bytes(self) -> int:
        """Bytes that the largest of the chunks takes in a slot."""

class ShardLayout:
    """The rows of a worker as 64-bit words, weight and state side by side.

    tables: for each the weight and its per-row states, (num_rows, ...).
    """

    def __init__(
        self, tables: collections.abc.Sequence[collections.abc.Sequence[torch.Tensor]]
    ) -> None: ...
    def read(self, begin: typing.SupportsIndex, words: torch.Tensor) -> None:
        """Copy the shard's words from begin to words (n,)."""

    def scatter(self, places: torch.Tensor, words: torch.Tensor) -> None:
        """Overwrite the shard's words from each of places (n,) int64 on; words are those of all
        places, one after the other, as many for each.
        """

    def write(self, begin: typing.SupportsIndex, words: torch.Tensor) -> None:
        """Overwrite the shard's words from begin on."""

    @property
    def num_words(self) -> int: ...
    @property
    def records(self) -> list[tuple[int, int]]: ...

class ShardChecksums:
    """Checksums of a shard's rows by blocks of rows, of which there are at most max_blocks
    and one more for each table. All zero at first.
    """

    def __init__(
        self, layout: ShardLayout, *, max_blocks: typing.SupportsIndex, pool: ThreadPool
    ) -> None: ...
    def find_wrong_rows(
        self, begin: typing.SupportsIndex = 0, end: typing.SupportsIndex | None = None
    ) -> list[tuple[int, int, int]]:
        """Return (table, begin, end) of blocks with a row that no finish() and no read() saw; of
        those that end after the word begin of the shard, and not after end.
        """

    def read(self) -> None:
        """Take the rows as they are."""

    def restore(self, values: torch.Tensor) -> None:
        """Take values() of an earlier moment."""

    def values(self) -> numpy.ndarray:
        """Return a copy (n,) int64, for restore()."""

class RowDelta:
    """The rows that one step changes, before XOR after it."""

    def __init__(self, layout: ShardLayout, *, max_bytes: typing.SupportsIndex) -> None: ...
    def clear(self) -> None:
        """Forget all; begin a step."""

    def finish(self, checksums: ShardChecksums | None = None) -> None:
        """The step is done: keep what it changed, also in the checksums of the same layout."""

    def gather_before(
        self, places: torch.Tensor, width: typing.SupportsIndex, end: typing.SupportsIndex
    ) -> numpy.typing.NDArray[numpy.int64]:
        """Return the width words from each of places (n,) int64 on, as they were before the
        step, one after the other; zeros from the word end on. The places are ascending, and
        at least width apart. Rows that were noted may be changing meanwhile.
        """

    def note(self, table: typing.SupportsIndex, row_ids: torch.Tensor) -> None:
        """Keep rows (n,) int64, some perhaps repeated, that are about to change."""

    def pack(
        self, begin: typing.SupportsIndex, end: typing.SupportsIndex
    ) -> numpy.typing.NDArray[numpy.int64]:
        """The rows in the words [begin, end), as an int64 message for apply_delta()."""

    def toggle(self) -> None:
        """Lead the rows back to before the step, and by the next call to after it."""

    def undo(self) -> None:
        """Put the rows back to before the step, and clear()."""

    @property
    def is_finished(self) -> bool: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_rows(self) -> int: ...

def apply_delta(
    message: torch.Tensor | numpy.typing.NDArray[typing.Any],
    parity: torch.Tensor | numpy.typing.NDArray[typing.Any],
) -> int:
    """XOR a message of RowDelta.pack() into parity (n,) int64; returns its rows. Applied
    again it takes itself back. Raises UsageError for a malformed one.
    """

def are_clean(
    trackers: collections.abc.Sequence[RowTracker],
    begins: collections.abc.Sequence[typing.SupportsIndex],
    ends: collections.abc.Sequence[typing.SupportsIndex],
) -> bool:
    """Check that no row [begins[i], ends[i]) of trackers[i] is dirty; waits once for each
    device.
    """

def compare_changing(
    hashes: collections.abc.Sequence[HostRowHashes],
    arrays: collections.abc.Sequence[
        collections.abc.Sequence[torch.Tensor | numpy.typing.NDArray[typing.Any]]
    ],
    trackers: collections.abc.Sequence[RowTracker],
    row_ids: collections.abc.Sequence[torch.Tensor | numpy.typing.NDArray[typing.Any]],
    pool: ThreadPool | None = None,
) -> list[tuple[int, int, int]]:
    """Compare the clean ones of rows (n) int64 of several tables, perhaps repeated, that
    are about to change, as HostRowHashes.compare does, and forget their hashes.

    Returns what compare does, of each table.
    """

def count_lookups(
    trackers: collections.abc.Sequence[RowTracker],
    indices: collections.abc.Sequence[torch.Tensor | numpy.typing.NDArray[typing.Any]],
    pool: ThreadPool | None = None,
) -> None:
    """Count a whole batch in one call: trackers[i] observes indices[i]; a tracker may occur
    more than once. All is checked before anything changes (RowIndexError, UsageError).

    indices: int32 or int64 each, any shape, contiguous; torch (CPU) or numpy.
    """

def crc32c(
    data: typing_extensions.Buffer | numpy.typing.NDArray[typing.Any],
    crc: typing.SupportsIndex = 0,
    backend: str = "best",
) -> int:
    """Compute the CRC32C of a bytes-like object, continuing from crc."""

def device_top_rows(
    scores: torch.Tensor | numpy.typing.NDArray[typing.Any],
    k: typing.SupportsIndex,
    *,
    device: typing.SupportsIndex,
) -> numpy.typing.NDArray[numpy.int64]:
    """Select as top_rows, of scores (num_rows) uint32 on a CUDA device."""

def find_nan(array: torch.Tensor | numpy.typing.NDArray[typing.Any]) -> int:
    """Find the flat position of the first NaN of a contiguous float array, or -1."""

def gather_chosen(
    *,
    tables: collections.abc.Sequence[torch.Tensor | numpy.typing.NDArray[typing.Any]],
    chosen: PendingRows,
    outs: collections.abc.Sequence[torch.Tensor | numpy.typing.NDArray[typing.Any]],
) -> None:
    """Pack the chosen rows of arrays of a table, as they are now in training's stream, into
    outs[i] (n, ...) on the same device. Does not wait; all arguments stay until it is
    done.

    chosen: what begin_select of the table's tracker returned, and read() has been
    called.
    """

def gather_rows(
    table: torch.Tensor | numpy.typing.NDArray[typing.Any],
    row_ids: torch.Tensor | numpy.typing.NDArray[typing.Any],
    out: torch.Tensor | numpy.typing.NDArray[typing.Any],
    pool: ThreadPool | None = None,
    *,
    precision: str = "float32",
    stager: DeviceStager | None = None,
) -> None:
    """Pack the rows row_ids (n,) int64 of table (num_rows, ...) into out, n rows in the host's
    memory; waits until they are there.

    precision: of the packed rows, if the table is of float32. stager: of its CUDA device.
    """

def instruction_set() -> str:
    """Return the one in use."""

def instruction_sets() -> list[str]:
    """List the instruction sets that this CPU has kernels for, the best one last."""

def nonzero_rows(
    rows: torch.Tensor | numpy.typing.NDArray[typing.Any], pool: ThreadPool | None = None
) -> numpy.typing.NDArray[numpy.int64]:
    """Return the rows of (num_rows, dim) in which any bit is set, such as those that a dense
    gradient changes.

    rows: any dtype, contiguous; torch (CPU) or numpy. Returns int64 row ids, ascending.
    """

def num_devices() -> int:
    """Count the usable CUDA devices; 0 without a driver."""

def num_dirty_of(trackers: collections.abc.Sequence[RowTracker]) -> list[int]:
    """Count the dirty rows of each tracker; waits once for each device."""

def restore_segment(
    *,
    path: os.PathLike[str] | str | bytes,
    tables: collections.abc.Sequence[SegmentTable],
    wanted: collections.abc.Sequence[tuple[typing.SupportsIndex, typing.SupportsIndex]],
    chunks: collections.abc.Sequence[
        tuple[
            typing.SupportsIndex,
            typing.SupportsIndex,
            typing.SupportsIndex,
            typing.SupportsIndex,
            collections.abc.Sequence[typing.SupportsIndex],
        ]
    ],
    slots: SlotPool,
    pool: ThreadPool | None = None,
    direct_io: bool = True,
    pauses_seconds: collections.abc.Sequence[float] = [],
) -> dict[str, typing.Any]:
    """Restore one source; see restore_segments."""

def restore_segments(
    sources: collections.abc.Sequence[RestoreSource],
    *,
    slots: SlotPool,
    pool: ThreadPool | None = None,
    direct_io: bool = True,
    pauses_seconds: collections.abc.Sequence[float] = [],
    on_progress: collections.abc.Callable[[int], None] | None = None,
) -> list[dict[str, typing.Any]]:
    """Read, verify and scatter chunks, of a row the last.

    Returns per source rows_restored, damaged and bytes_read. Raises
    StorageError for chunks that could not be read, after the pauses. on_progress gets
    the bytes read so far, at most five times a second.
    """

def scatter_rows(
    packed: torch.Tensor | numpy.typing.NDArray[typing.Any],
    row_ids: torch.Tensor | numpy.typing.NDArray[typing.Any],
    table: torch.Tensor | numpy.typing.NDArray[typing.Any],
    pool: ThreadPool | None = None,
    *,
    precision: str = "float32",
    stager: DeviceStager | None = None,
) -> None:
    """Write packed rows to the rows row_ids (n,) int64 of table, ascending, or on a device
    distinct; waits. Options as of gather_rows.
    """

def set_memory_reclaimer(reclaim: collections.abc.Callable[[int], bool]) -> None:
    """Have reclaim(device) called when a device is out of memory, on any thread. It frees
    what others only keep for later, and returns whether it did.
    """

def top_rows(
    scores: torch.Tensor | numpy.typing.NDArray[typing.Any],
    k: typing.SupportsIndex,
    pool: ThreadPool | None = None,
) -> numpy.typing.NDArray[numpy.int64]:
    """Return the k rows with the highest non-zero scores, ties by lowest row id; fewer if fewer
    are non-zero.

    scores: (num_rows) uint32 or float32, contiguous; torch (CPU) or numpy.
    Returns (<= k) int64 row ids, ascending. Linear in num_rows. Raises UsageError for
    a score that is NaN or negative.
    """

def trim_memory(device: typing.SupportsIndex) -> None:
    """Give memory of the device that is kept for later back to other allocators."""

def trim_memory_if_short(device: typing.SupportsIndex) -> None:
    """Do so if little of the device's memory is free."""

def use_dlpack(use: bool) -> bool:
    """Let torch's DLPack exchange API read tensors, or not; for tests and measurements.

    Returns whether it does: torch 2.10 and later have it.
    """

def use_instruction_set(name: str) -> None:
    """Choose one, for tests and measurements. Raises UsageError where this CPU lacks it."""

def use_stream(device: typing.SupportsIndex, stream: typing.SupportsIndex) -> None:
    """Submit this thread's later work on the device to this stream (a cudaStream_t as a
    number), the one that it trains on. It comes after all that was submitted to the
    stream before, which must still exist.
    """

ALIGNMENT: int = 4096
MAX_HEADER_BYTES: int = 67108864
SEGMENT_VERSION: int = 1
SMALL_BLOCK: int = 8
has_cuda: bool = True
