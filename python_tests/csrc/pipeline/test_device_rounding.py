"""csrc/pipeline/ with tables on a device whose rows are rounded: files as of the CPU, byte by byte.

Both are of the emulated module, which has the CPU's form, too.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest

from cpr_ext.errors import NanError
from cpr_ext.state.precision import stored_row_bytes
from python_tests.csrc.pipeline.test_device_tables import change_later
from python_tests.csrc.segments import ALIGNMENT, HEADER, align_up
from python_tests.csrc.staging.test_row_rounding import table_of

SLOT_BYTES = 64 * ALIGNMENT
PRECISIONS = {"weight": "int8", "sum": "float16", "step": "float32"}
SELECTED = [None, np.arange(0, 3000, 3)]


def random_arrays(num_rows=3000):
    """Weights of which every seventh row has an infinity, states of which a few are huge."""
    arrays = {
        "weight": table_of("training", num_rows, 16, 1),
        "sum": table_of("training", num_rows, 4, 2),
        "step": np.arange(num_rows),
    }
    arrays["weight"][::7, 3] = np.inf
    arrays["sum"][5::31, 1] = 1e30
    return arrays


@dataclass
class Written:
    """A table of a segment, and what is known of its file.

    Attributes:
        stager: None: the arrays are on the CPU.
        first_row_id: of the arrays' first row.
    """

    native: object
    arrays: dict
    row_ids: np.ndarray | None = None
    stager: object = None
    precisions: dict = field(default_factory=lambda: PRECISIONS)
    is_packed: bool = False
    slot_bytes: int = SLOT_BYTES
    first_row_id: int = 0

    def __post_init__(self):
        self.num_rows = len(next(iter(self.arrays.values())))
        self.count = self.num_rows if self.row_ids is None else len(self.row_ids)
        self.offsets, offset = [], len(HEADER)
        self.ids_offset = -1
        if self.row_ids is not None:
            self.ids_offset = offset
            offset += align_up(self.row_ids.nbytes)
        for name, array in self.arrays.items():
            self.offsets.append(offset)
            elements = array[:1].size
            exact = array.dtype != np.float32
            row_bytes = (
                array[:1].nbytes if exact else stored_row_bytes(elements, self.precisions[name])
            )
            offset += align_up(self.count * row_bytes)
        self.file_bytes = offset

    def _spec(self, arrays, row_ids, is_packed=False, stager=None):
        spec = self.native.SegmentTable(
            name="t",
            num_rows=self.count,
            row_ids_offset=-1 if self.row_ids is None else 0,
            row_ids=row_ids,
            range_begin=0 if row_ids is not None else self.first_row_id,
            is_packed=is_packed,
        )
        for name, array in arrays.items():
            precision = self.precisions[name]
            spec.add_rows(name, array, 0, self.first_row_id, stager=stager, precision=precision)
        return spec

    def _placed(self, spec):
        spec.place(self.ids_offset, self.offsets)
        return spec

    def pipeline(self):
        return self.native.SnapshotPipeline(
            num_slots=3,
            slot_bytes=self.slot_bytes,
            stagers=[] if self.stager is None else [self.stager],
        )

    def start(self, path, pipe=None, **options):
        spec = self._spec(self.arrays, self.row_ids, self.is_packed, self.stager)
        return (pipe or self.pipeline()).start(
            path=str(path),
            header_bytes=len(HEADER),
            file_bytes=self.file_bytes,
            tables=[self._placed(spec)],
            **{"refuse_nan": False, **options},
        )

    def finish(self, job):
        job.wait("written")
        job.finish(HEADER)
        return job.chunks()

    def write(self, path):
        job = self.start(path)
        job.capture(step=1, wait_for_slot=True)
        return self.finish(job)

    def restore(self, path, chunks, targets, stager=None, wanted=(0, 1 << 40)):
        spec = self._placed(self._spec(targets, None, stager=stager))
        return self.native.restore_segment(
            path=str(path),
            tables=[spec],
            wanted=[wanted],
            chunks=chunks,
            slots=self.native.SlotPool(num_slots=2, slot_bytes=self.slot_bytes),
        )


def stager_of(emulated, slot_bytes=SLOT_BYTES):
    return emulated.native.DeviceStager(device=0, slot_bytes=slot_bytes, num_slots=2)


@pytest.mark.parametrize("device_slot_bytes", [SLOT_BYTES, 9_000])
@pytest.mark.parametrize("row_ids", SELECTED, ids=["range", "every third"])
def test_the_file_is_the_one_that_the_cpu_writes(emulated, tmp_path, row_ids, device_slot_bytes):
    arrays = random_arrays()
    on_host = Written(emulated.native, arrays, row_ids).write(tmp_path / "host")
    stager = stager_of(emulated, device_slot_bytes)
    on_device = Written(emulated.native, arrays, row_ids, stager).write(tmp_path / "device")
    assert on_device == on_host
    assert (tmp_path / "device").read_bytes() == (tmp_path / "host").read_bytes()


def test_rows_that_were_packed_before_make_the_same_file(emulated, tmp_path):
    arrays, row_ids = random_arrays(), SELECTED[1]
    on_host = Written(emulated.native, arrays, row_ids).write(tmp_path / "host")
    packed = {name: np.ascontiguousarray(array[row_ids]) for name, array in arrays.items()}
    table = Written(emulated.native, packed, row_ids, stager_of(emulated), is_packed=True)
    assert table.write(tmp_path / "device") == on_host
    assert (tmp_path / "device").read_bytes() == (tmp_path / "host").read_bytes()


@pytest.mark.parametrize("precision", ["rounded", "float32"])
def test_packed_rows_go_to_the_host_while_training_captures_a_graph(emulated, tmp_path, precision):
    """Whoever commits them does not know what training does: its stream gets nothing of it."""
    arrays, row_ids = random_arrays(), SELECTED[1]
    precisions = PRECISIONS if precision == "rounded" else dict.fromkeys(arrays, "float32")
    Written(emulated.native, arrays, row_ids, None, precisions).write(tmp_path / "host")
    packed = {name: np.ascontiguousarray(array[row_ids]) for name, array in arrays.items()}
    stager = stager_of(emulated)
    stager.settle()
    emulator = emulated.native.emulator
    table = Written(emulated.native, packed, row_ids, stager, precisions, is_packed=True)
    pipe = table.pipeline()
    emulator.set_lazy(True)
    assert emulator.set_capturing(True)
    job = table.start(tmp_path / "device", pipe)
    job.capture(step=1, wait_for_slot=True)
    table.finish(job)
    assert emulator.set_capturing(False), "a call has ended the capture"
    assert (tmp_path / "device").read_bytes() == (tmp_path / "host").read_bytes()


@pytest.mark.parametrize("where", [None, "a device"])
@pytest.mark.parametrize("row_ids", SELECTED, ids=["range", "every third"])
def test_a_shard_of_later_rows_makes_the_bytes_of_one_of_the_first(
    emulated, tmp_path, row_ids, where
):
    arrays, first = random_arrays(), 123_456
    stager = where and stager_of(emulated, 9_000)
    Written(emulated.native, arrays, row_ids).write(tmp_path / "first")
    later = None if row_ids is None else row_ids + first
    table = Written(emulated.native, arrays, later, stager, first_row_id=first)
    noted = table.write(tmp_path / "later")
    files = [(tmp_path / name).read_bytes() for name in ("first", "later")]
    begin = table.offsets[0]  # behind the row ids, if there are any
    assert files[0][begin:] == files[1][begin:]
    targets = {name: np.full_like(array, 5) for name, array in arrays.items()}
    assert table.restore(tmp_path / "later", noted, targets, stager)["damaged"] == []
    emulated.native.emulator.synchronize()
    rows = slice(None) if row_ids is None else row_ids
    np.testing.assert_array_equal(targets["step"][rows], arrays["step"][rows])
    assert (targets["weight"][rows] != 5).any(axis=1).all()


@pytest.mark.parametrize("wanted", [(0, 1 << 40), (1000, 2000), (7, 8), (8, 9)])
@pytest.mark.parametrize("row_ids", SELECTED, ids=["range", "every third"])
def test_rows_come_back_on_the_device_as_on_the_cpu(emulated, tmp_path, row_ids, wanted):
    arrays = random_arrays()
    table = Written(emulated.native, arrays, row_ids)
    noted = table.write(tmp_path / "s")
    emulated.native.emulator.set_lazy(True)
    found = []
    for stager in (None, stager_of(emulated, 9_000)):
        targets = {name: np.full_like(array, 5) for name, array in arrays.items()}
        assert table.restore(tmp_path / "s", noted, targets, stager, wanted)["damaged"] == []
        found.append(targets)
    ids = np.arange(3000) if row_ids is None else row_ids
    ids = ids[(ids >= wanted[0]) & (ids < wanted[1])]
    assert (found[1]["weight"][ids] != 5).all()
    for name in arrays:
        np.testing.assert_array_equal(found[1][name], found[0][name])
        untouched = np.setdiff1d(np.arange(3000), ids)
        assert (found[1][name][untouched] == 5).all()


def test_rows_are_as_they_were_when_their_capture_was_submitted(emulated, tmp_path):
    arrays = random_arrays()
    noted = Written(emulated.native, arrays, SELECTED[1]).write(tmp_path / "host")
    table = Written(emulated.native, arrays, SELECTED[1], stager_of(emulated))
    emulated.native.emulator.set_lazy(True)
    job = table.start(tmp_path / "device")
    job.capture(step=1)
    assert job.state != "capturing"
    change_later(emulated, arrays)
    assert table.finish(job) == noted
    emulated.native.emulator.allocations()  # runs what waits, as long as the arrays are there
    assert (tmp_path / "device").read_bytes() == (tmp_path / "host").read_bytes()


def test_nan_on_a_device_is_refused_by_the_name_of_its_row(emulated, tmp_path):
    arrays = random_arrays()
    arrays["weight"][::7, 3] = 0
    arrays["weight"][411, 5] = np.nan
    table = Written(emulated.native, arrays, None, stager_of(emulated))
    job = table.start(tmp_path / "s", refuse_nan=True)
    job.capture(step=1)
    with pytest.raises(NanError, match="table 't', row 411: weight is NaN or infinite"):
        job.wait("written")
