"""csrc/pipeline/ with tables on a device: captured in the order of its stream, restored on it.

On the emulated device in lazy mode nothing happens before somebody waits for it, so that a row
which is read too late, or a slot that is used too early, shows.
"""

from dataclasses import replace

import numpy as np
import pytest

from cpr_ext.errors import CudaError, NanError, UsageError
from cpr_ext.state.precision import stored_row_bytes
from python_tests.csrc import backends
from python_tests.csrc.segments import ALIGNMENT, HEADER, align_up
from python_tests.csrc.staging.test_row_rounding import table_of

SLOT_BYTES = 32 * ALIGNMENT
ALL = (0, 1 << 40)
KINDS = {
    "exact": {"weight": "float32", "sum": "float32", "step": "float32"},
    "rounded": {"weight": "int8", "sum": "float16", "step": "float32"},
}
SELECTED = {
    "range": None,
    "every third": np.arange(0, 3000, 3),
    "none": np.array([], np.int64),
    "one": np.array([7]),
}
of_every_kind = pytest.mark.parametrize("kind", KINDS)


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


class Segment:
    """A table, what a segment holds of it, and a pipeline that writes it.

    ``is_on_device``: whether the arrays lie on the backend's device, else on the CPU. ``row_ids``
    count from ``first``, the id of the arrays' first row.
    """

    def __init__(
        self, backend, arrays=None, kind="exact", row_ids=None, *, is_on_device=True,
        first=0, is_packed=False, num_slots=2, slot_bytes=SLOT_BYTES, device_slot_bytes=None,
    ):  # fmt: skip
        self.native, self.precisions, self.num_slots = backend.native, KINDS[kind], num_slots
        arrays = random_arrays() if arrays is None else arrays
        self.row_ids = None if row_ids is None else row_ids + first
        self.first, self.is_packed, self.slot_bytes = first, is_packed, slot_bytes
        self.stager = self.native.DeviceStager(
            device=backend.device, slot_bytes=device_slot_bytes or slot_bytes, num_slots=num_slots
        ) if is_on_device else None  # fmt: skip
        self.pipe = self.native.SnapshotPipeline(
            num_slots=num_slots, slot_bytes=slot_bytes,
            stagers=[self.stager] if is_on_device else [],
        )  # fmt: skip
        self.count = len(arrays["step"]) if row_ids is None else len(row_ids)
        self.ids_offset = -1 if row_ids is None else len(HEADER)
        self.file_bytes = len(HEADER) + (0 if row_ids is None else align_up(8 * self.count))
        self.offsets = []
        for name, array in arrays.items():
            self.offsets.append(self.file_bytes)
            is_exact = array.dtype != np.float32
            width = stored_row_bytes(array[:1].size, self.precisions[name])
            width = array[:1].nbytes if is_exact else width
            self.file_bytes += align_up(self.count * width)
        if is_packed:
            arrays = {name: np.ascontiguousarray(array[row_ids]) for name, array in arrays.items()}
        put = backend.put if is_on_device else np.array
        self.arrays = {name: put(array) for name, array in arrays.items()}

    def spec(self, arrays, *, capture, stagers=None):
        spec = self.native.SegmentTable(
            name="t",
            num_rows=self.count,
            row_ids_offset=-1 if self.row_ids is None else 0,
            row_ids=self.row_ids if capture else None,
            range_begin=0 if self.row_ids is not None else self.first,
            is_packed=self.is_packed and capture,
        )
        for name, array in arrays.items():
            stager = self.stager if stagers is None else stagers[name]
            precision = self.precisions[name]
            first = 0 if self.is_packed else self.first
            spec.add_rows(name, array, 0, first, stager=stager, precision=precision)
        spec.place(self.ids_offset, self.offsets)
        return spec

    def start(self, path, *, stagers=None, **options):
        return self.pipe.start(
            path=str(path),
            header_bytes=len(HEADER),
            file_bytes=self.file_bytes,
            tables=[self.spec(self.arrays, capture=True, stagers=stagers)],
            **{"refuse_nan": False, **options},
        )

    def finish(self, job):
        job.wait("written")
        job.finish(HEADER)
        return job.chunks()

    def write(self, path, **options):
        job = self.start(path, **options)
        job.capture(step=1, wait_for_slot=True)
        return self.finish(job)

    def restore(self, path, chunks, targets, wanted=ALL):
        return self.native.restore_segment(
            path=str(path),
            tables=[self.spec(targets, capture=False)],
            wanted=[wanted],
            chunks=chunks,
            slots=self.native.SlotPool(num_slots=self.num_slots, slot_bytes=self.slot_bytes),
        )


def emptied(arrays):
    return {name: np.full_like(array, 5) for name, array in arrays.items()}


def written_on_cpu(backend, path, arrays=None, kind="exact", row_ids=None, **options):
    """The bytes of the file that tables on the CPU make, and its chunks."""
    options["is_on_device"] = False
    chunks = Segment(backend, arrays, kind, row_ids, **options).write(path)
    return path.read_bytes(), chunks


@of_every_kind
@pytest.mark.parametrize("first", [0, 123_456])
@pytest.mark.parametrize("device_slot_bytes", [None, 9_000])
@pytest.mark.parametrize("selected", SELECTED)
def test_the_file_is_the_one_that_the_cpu_writes(
    device, tmp_path, kind, selected, device_slot_bytes, first
):
    row_ids = SELECTED[selected]
    expected, chunks = written_on_cpu(
        device, tmp_path / "cpu", kind=kind, row_ids=row_ids, first=first
    )
    options = {"device_slot_bytes": device_slot_bytes, "first": first}
    for is_packed in (False, True)[: 1 if row_ids is None else 2]:
        on = Segment(device, None, kind, row_ids, is_packed=is_packed, **options)
        path = tmp_path / str(is_packed)
        assert on.write(path) == chunks
        assert path.read_bytes() == expected
    begin = on.offsets[0]  # behind the row ids; a shard of later rows has the same bytes
    of_first, _ = written_on_cpu(device, tmp_path / "first", kind=kind, row_ids=row_ids)
    assert of_first[begin:] == expected[begin:]


@of_every_kind
@pytest.mark.parametrize("first", [0, 500])
@pytest.mark.parametrize("wanted", [ALL, (1000, 2000), (505, 506), (507, 508)])
@pytest.mark.parametrize("selected", ["range", "every third"])
def test_rows_come_back_on_the_device_as_on_the_cpu_and_no_other_is_touched(
    device, tmp_path, kind, selected, wanted, first
):
    row_ids, arrays = SELECTED[selected], random_arrays()
    options = {"first": first, "device_slot_bytes": 9_000}
    on_cpu = Segment(device, arrays, kind, row_ids, is_on_device=False, **options)
    chunks = on_cpu.write(tmp_path / "s")
    on_device = Segment(device, arrays, kind, row_ids, **options)
    targets = {name: device.put(array) for name, array in emptied(arrays).items()}
    expected = emptied(arrays)
    for on, where in ((on_cpu, expected), (on_device, targets)):
        assert on.restore(tmp_path / "s", chunks, where, wanted)["damaged"] == []
    ids = np.arange(3000) if row_ids is None else row_ids
    ids = ids[(ids + first >= wanted[0]) & (ids + first < wanted[1])]
    for name, array in arrays.items():
        found = device.get(targets[name])
        np.testing.assert_array_equal(found, expected[name])
        assert (found[np.setdiff1d(np.arange(3000), ids)] == 5).all()
        if KINDS[kind][name] == "float32":
            np.testing.assert_array_equal(found[ids], array[ids])
        else:
            assert len(ids) == 0 or (found[ids] != 5).any()


@of_every_kind
def test_packed_rows_go_to_the_host_while_training_captures_a_graph(emulated, tmp_path, kind):
    """Whoever commits them does not know what training does: its stream gets nothing of it."""
    row_ids, emulator = SELECTED["every third"], emulated.native.emulator
    expected, _ = written_on_cpu(emulated, tmp_path / "cpu", kind=kind, row_ids=row_ids)
    on = Segment(emulated, None, kind, row_ids, is_packed=True)
    on.stager.settle()
    emulator.set_lazy(True)
    assert emulator.set_capturing(True)
    on.write(tmp_path / "s")
    assert emulator.set_capturing(False), "a call has ended the capture"
    assert (tmp_path / "s").read_bytes() == expected


@of_every_kind
@pytest.mark.parametrize("selected", ["range", "every third"])
def test_rows_are_as_they_were_when_their_capture_was_submitted(emulated, tmp_path, kind, selected):
    row_ids, emulator = SELECTED[selected], emulated.native.emulator
    expected, chunks = written_on_cpu(emulated, tmp_path / "cpu", kind=kind, row_ids=row_ids)
    on = Segment(emulated, None, kind, row_ids, num_slots=4, slot_bytes=4 * SLOT_BYTES)
    emulator.set_lazy(True)
    job = on.start(tmp_path / "s")
    job.capture(step=1)
    assert job.state != "capturing"
    for array in on.arrays.values():  # as the optimizer's next step does
        emulator.submit_fill(array.ctypes.data, 0xEE, array.nbytes)
    assert [chunk[:2] for chunk in on.finish(job)][:1] == [chunk[:2] for chunk in chunks][:1]
    emulator.allocations()  # runs what waits
    assert (tmp_path / "s").read_bytes() == expected
    assert set(on.arrays["weight"].tobytes()) == {0xEE}


def test_capture_waits_for_nothing_and_given_up_frees_slots_only_when_nothing_writes_to_them(
    emulated, tmp_path
):
    expected, _ = written_on_cpu(emulated, tmp_path / "cpu")
    on = Segment(emulated)
    emulated.native.emulator.set_lazy(True)
    job = on.start(tmp_path / "s")
    emulated.native.emulator.calls()
    # While the capture runs, so does the thread that waits for arrivals; it does so by event.
    job.capture(step=1, max_bytes=1)
    assert "cudaStreamSynchronize" not in emulated.native.emulator.calls()
    job.capture(step=1)
    job.cancel("no more")
    with pytest.raises(RuntimeError, match="no more"):
        job.wait("written")
    assert on.pipe.num_free_slots == 2
    on.write(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == expected


@pytest.mark.parametrize("nth", range(1, 6))
@pytest.mark.parametrize(
    "call", ["cudaLaunchKernelEx", "cudaMemcpyAsync", "cudaEventRecord", "cudaEventSynchronize"]
)
def test_a_device_that_fails_fails_the_segment_and_the_next_one_is_right(
    emulated, tmp_path, call, nth
):
    row_ids = np.arange(0, 3000, 2)
    expected, _ = written_on_cpu(emulated, tmp_path / "cpu", row_ids=row_ids)
    on = Segment(emulated, row_ids=row_ids)
    job = on.start(tmp_path / "s")
    emulated.native.emulator.fail_call(call, nth, 719)
    try:
        job.capture(step=1, wait_for_slot=True)
        on.finish(job)
    except CudaError:
        with pytest.raises(CudaError):
            job.wait("written")  # until no other chunk has a slot
        assert not (tmp_path / "s").exists()
    else:  # it was not called so often, or where no one can be told: the row is as it was
        assert (tmp_path / "s").read_bytes() == expected
    emulated.native.emulator.fail_call("", 0)
    assert on.pipe.num_free_slots == 2
    on.write(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == expected


@pytest.mark.parametrize("call", ["cudaLaunchKernelEx", "cudaMemcpyAsync", "cudaStreamSynchronize"])
def test_a_device_that_fails_during_a_restore_is_told(emulated, tmp_path, call):
    on = Segment(emulated)
    chunks = on.write(tmp_path / "s")
    emulated.native.emulator.fail_call(call, 1, 719)
    with pytest.raises(CudaError, match="error 719"):
        on.restore(tmp_path / "s", chunks, on.arrays)


@pytest.mark.parametrize("num_slots", [1, 2, 5])
@pytest.mark.parametrize("row_ids", [None, np.arange(0, 30_000, 2)], ids=["range", "every other"])
@pytest.mark.parametrize("can_pin", [True, False])
def test_a_slot_that_a_device_reads_is_not_read_into(
    emulated, tmp_path, row_ids, num_slots, can_pin
):
    """With every copy as late as it can be; also where no memory can be pinned."""
    arrays, emulator = random_arrays(30_000), emulated.native.emulator
    _, chunks = written_on_cpu(emulated, tmp_path / "s", arrays, row_ids=row_ids)
    assert len(chunks) > 8
    on = Segment(emulated, arrays, row_ids=row_ids, num_slots=max(2, num_slots))
    on.num_slots = num_slots
    targets, expected = emptied(arrays), emptied(arrays)
    emulator.set_lazy(can_pin)
    emulator.calls()
    if not can_pin:
        emulator.fail_call("cudaHostRegister", 1, 2)
    assert on.restore(tmp_path / "s", chunks, targets)["damaged"] == []
    calls = emulator.calls()
    for name, array in arrays.items():
        rows = slice(None) if row_ids is None else row_ids
        expected[name][rows] = array[rows]
        np.testing.assert_array_equal(targets[name], expected[name])
    if can_pin:
        assert calls["cudaHostRegister"] == calls["cudaHostUnregister"] == num_slots


def test_a_table_on_two_devices_is_refused(emulated, tmp_path):
    on = Segment(emulated)
    stagers = {"weight": on.stager, "sum": None, "step": on.stager}
    with pytest.raises(UsageError, match=r"'t': sum and weight lie on different devices"):
        on.start(tmp_path / "s", stagers=stagers)


@pytest.mark.parametrize(("kind", "word"), [("exact", "NaN"), ("rounded", "NaN or infinite")])
def test_nan_on_a_device_is_refused_by_the_name_of_its_row(device, tmp_path, kind, word):
    arrays = random_arrays()
    arrays["weight"][::7, 3] = 0
    arrays["weight"][411, 5] = np.nan
    on = Segment(device, arrays, kind)
    with pytest.raises(NanError, match=f"table 't', row 411: weight is {word}"):
        on.write(tmp_path / "s", refuse_nan=True)


def test_slots_are_pinned_while_the_pipeline_lives_or_there_is_none(emulated):
    before, emulator = backends.live_bytes(emulated), emulated.native.emulator
    emulator.calls()
    on = Segment(emulated, num_slots=3)
    assert emulator.calls()["cudaHostRegister"] == 3
    del on
    assert emulator.calls()["cudaHostUnregister"] == 3
    emulator.fail_call("cudaHostRegister", 2)
    with pytest.raises(CudaError, match="cudaHostRegister"):
        Segment(emulated)
    assert emulator.calls()["cudaHostUnregister"] == 1
    assert backends.live_bytes(emulated) == before


def test_threads_that_wait_for_copies_use_the_tables_device_alone_and_break_no_capture(
    emulated, tmp_path
):
    expected, _ = written_on_cpu(emulated, tmp_path / "cpu", random_arrays(300))
    emulator = emulated.native.emulator
    emulator.set_num_devices(2)
    emulator.set_device(1)  # this thread's, as torch would have it
    on = Segment(replace(emulated, device=1), random_arrays(300))
    emulator.set_lazy(True)
    job = on.start(tmp_path / "s")
    job.capture(step=1)
    emulator.set_capturing(True)
    job.wait("written")
    assert emulator.set_capturing(False)
    job.finish(HEADER)
    assert (tmp_path / "s").read_bytes() == expected
    del on, job
    assert emulator.used_devices() == {1}
