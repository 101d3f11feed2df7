"""csrc/pipeline/ with tables on a device: captured in the order of its stream, restored on it.

On the emulated device in lazy mode nothing happens before somebody waits for it, so that a row
which is read too late, or a slot that is used too early, shows.
"""

from dataclasses import replace

import numpy as np
import pytest

from cpr_ext.errors import CudaError, UsageError
from python_tests.csrc import backends, segments
from python_tests.csrc.segments import ALIGNMENT, HEADER, Layout, Table

SLOT_BYTES = 32 * ALIGNMENT


def random_table(num_rows, row_ids=None, dim=16, seed=0, first=0):
    """Rows from ``first`` on; ``row_ids`` are told from there."""
    random = np.random.default_rng(seed)
    arrays = {
        "weight": random.standard_normal((num_rows, dim), dtype=np.float32),
        "sum": random.random(num_rows, dtype=np.float32),
        "scale": random.integers(0, 100, (num_rows, 4), dtype=np.int8),
    }
    if row_ids is not None:
        return Table("t", arrays, row_ids + first, first_row_id=first)
    return Table("t", arrays, range_begin=first, range_rows=num_rows, first_row_id=first)


class OnDevice:
    """A pipeline of a backend, and a table whose arrays lie there."""

    def __init__(self, backend, table, num_slots=2, slot_bytes=SLOT_BYTES, device_slot_bytes=None):
        self.native, self.backend, self.table = backend.native, backend, table
        self.stager = self.native.DeviceStager(
            device=backend.device, slot_bytes=device_slot_bytes or slot_bytes, num_slots=num_slots
        )
        self.pipe = self.native.SnapshotPipeline(
            num_slots=num_slots, slot_bytes=slot_bytes, stagers=[self.stager]
        )
        self.arrays = {name: backend.put(array) for name, array in table.arrays.items()}
        self.layout = Layout([table])

    def spec(self, arrays, *, capture, stagers=None):
        where = self.layout.offsets[0]
        spec = self.native.SegmentTable(
            name="t",
            num_rows=len(self.table.saved_ids),
            row_ids_offset=where.get("", -1),
            range_begin=self.table.range_begin,
            row_ids=self.table.row_ids if capture else None,
        )
        for name, array in arrays.items():
            stager = self.stager if stagers is None else stagers[name]
            first = self.table.first_row_id
            spec.add_rows(name, array, where[name], first_row_id=first, stager=stager)
        return spec

    def start(self, path, **options):
        return self.pipe.start(
            path=str(path),
            header_bytes=len(HEADER),
            file_bytes=self.layout.file_bytes,
            tables=[self.spec(self.arrays, capture=True)],
            **options,
        )

    def write(self, path):
        job = self.start(path)
        job.capture(step=1, wait_for_slot=True)
        job.wait("written")
        chunks = job.chunks()
        job.finish(HEADER)
        return chunks

    def restore(self, path, chunks, arrays, wanted=(0, 1 << 40), num_slots=2):
        return self.native.restore_segment(
            path=str(path),
            tables=[self.spec(arrays, capture=False)],
            wanted=[wanted],
            chunks=chunks,
            slots=self.native.SlotPool(num_slots=num_slots, slot_bytes=SLOT_BYTES),
        )


SELECTED = [None, np.arange(0, 3000, 3), np.array([], np.int64), np.array([7])]


@pytest.mark.parametrize("first", [0, 500])
@pytest.mark.parametrize("device_slot_bytes", [None, 40_000])
@pytest.mark.parametrize("row_ids", SELECTED, ids=["range", "every third", "none", "one"])
def test_the_file_is_the_one_that_the_cpu_writes(
    device, tmp_path, row_ids, device_slot_bytes, first
):
    table = random_table(3000, row_ids, first=first)
    on = OnDevice(device, table, device_slot_bytes=device_slot_bytes)
    on.write(tmp_path / "s")
    assert (tmp_path / "s").read_bytes() == on.layout.expected_file()


@pytest.mark.parametrize("device_slot_bytes", [None, 40_000])
def test_rows_that_were_packed_before_make_the_same_file(device, tmp_path, device_slot_bytes):
    table = random_table(3000, np.arange(0, 3000, 3))
    on = OnDevice(device, table, device_slot_bytes=device_slot_bytes)
    where = on.layout.offsets[0]
    spec = on.native.SegmentTable(
        name="t", num_rows=1000, row_ids_offset=where[""], row_ids=table.row_ids, is_packed=True
    )
    for name, array in table.arrays.items():
        packed = device.put(np.ascontiguousarray(array[table.row_ids]))
        spec.add_rows(name, packed, where[name], stager=on.stager)
    job = on.pipe.start(
        path=str(tmp_path / "s"),
        header_bytes=len(HEADER),
        file_bytes=on.layout.file_bytes,
        tables=[spec],
    )
    job.capture(step=1, wait_for_slot=True)
    job.wait("written")
    job.finish(HEADER)
    assert (tmp_path / "s").read_bytes() == on.layout.expected_file()


@pytest.mark.parametrize("first", [0, 500])
@pytest.mark.parametrize("wanted", [(0, 1 << 40), (1000, 2000), (505, 506)])
@pytest.mark.parametrize("row_ids", SELECTED[:2], ids=["range", "every third"])
def test_rows_come_back_on_the_device_and_no_other_is_touched(
    device, tmp_path, row_ids, wanted, first
):
    table = random_table(3000, row_ids, first=first)
    on = OnDevice(device, table)
    chunks = on.write(tmp_path / "s")
    strange = table.emptied().arrays
    targets = {name: device.put(array.copy()) for name, array in strange.items()}
    result = on.restore(tmp_path / "s", chunks, targets, wanted)
    assert result["damaged"] == []
    ids = table.saved_ids
    ids = ids[(ids >= wanted[0]) & (ids < wanted[1])]
    for name, array in table.arrays.items():
        strange[name][ids - first] = array[ids - first]
        np.testing.assert_array_equal(device.get(targets[name]), strange[name])


def test_a_segment_written_on_a_device_restores_on_the_cpu_and_the_other_way_round(
    emulated, tmp_path
):
    table = random_table(2000)
    on = OnDevice(emulated, table)
    chunks = on.write(tmp_path / "device")
    target = table.emptied()
    segment = segments.Segment(tmp_path / "device", on.layout, chunks)
    assert segments.restore(segment, [target])["damaged"] == []
    written = segments.write_segment(tmp_path / "cpu", [table])
    on_device = table.emptied().arrays
    assert on.restore(tmp_path / "cpu", written.chunks, on_device)["damaged"] == []
    for name, array in table.arrays.items():
        np.testing.assert_array_equal(target.arrays[name], array)
        np.testing.assert_array_equal(on_device[name], array)


def change_later(emulated, arrays):
    """As the optimizer's next step does: submits to the stream that rows become something else."""
    for array in arrays.values():
        emulated.native.emulator.submit_fill(array.ctypes.data, 0xEE, array.nbytes)


@pytest.mark.parametrize("row_ids", SELECTED[:2], ids=["range", "every third"])
def test_rows_are_as_they_were_when_their_capture_was_submitted(emulated, tmp_path, row_ids):
    on = OnDevice(emulated, random_table(3000, row_ids), num_slots=4, slot_bytes=2 * SLOT_BYTES)
    expected = on.layout.expected_file()
    emulated.native.emulator.set_lazy(True)
    job = on.start(tmp_path / "s", refuse_nan=False)
    job.capture(step=1)
    change_later(emulated, on.arrays)
    job.wait("written")
    job.finish(HEADER)
    assert (tmp_path / "s").read_bytes() == expected
    emulated.native.emulator.allocations()  # runs what waits
    assert set(on.arrays["weight"].tobytes()) == {0xEE}


def test_capture_waits_for_nothing(emulated, tmp_path):
    on = OnDevice(emulated, random_table(3000))
    emulated.native.emulator.set_lazy(True)
    job = on.start(tmp_path / "s")
    emulated.native.emulator.calls()
    # While the capture runs, so does the thread that waits for arrivals; it does so by event.
    job.capture(step=1, max_bytes=1)
    assert "cudaStreamSynchronize" not in emulated.native.emulator.calls()
    while job.state == "capturing":
        job.capture(step=1, wait_for_slot=True)
    job.wait("written")
    job.cancel("the test is over")


def test_a_job_given_up_frees_its_slots_only_when_nothing_writes_to_them(emulated, tmp_path):
    on = OnDevice(emulated, random_table(3000))
    emulated.native.emulator.set_lazy(True)
    job = on.start(tmp_path / "s")
    job.capture(step=1)
    job.cancel("no more")
    with pytest.raises(RuntimeError, match="no more"):
        job.wait("written")
    assert on.pipe.num_free_slots == 2
    on.write(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == on.layout.expected_file()


@pytest.mark.parametrize("nth", range(1, 6))
@pytest.mark.parametrize(
    "call",
    ["cudaLaunchKernelEx", "cudaMemcpyAsync", "cudaEventRecord", "cudaEventSynchronize"],
)
def test_a_device_that_fails_fails_the_segment_and_the_next_one_is_right(
    emulated, tmp_path, call, nth
):
    on = OnDevice(emulated, random_table(3000, np.arange(0, 3000, 2)))
    emulated.native.emulator.fail_call(call, nth, 719)
    try:
        on.write(tmp_path / "s")
    except CudaError:
        assert not (tmp_path / "s").exists()
    else:  # it was not called so often, or where no one can be told: the row is as it was
        assert (tmp_path / "s").read_bytes() == on.layout.expected_file()
    emulated.native.emulator.fail_call("", 0)
    assert on.pipe.num_free_slots == 2
    on.write(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == on.layout.expected_file()


@pytest.mark.parametrize("call", ["cudaLaunchKernelEx", "cudaMemcpyAsync", "cudaStreamSynchronize"])
def test_a_device_that_fails_during_a_restore_is_told(emulated, tmp_path, call):
    on = OnDevice(emulated, random_table(3000))
    chunks = on.write(tmp_path / "s")
    emulated.native.emulator.fail_call(call, 1, 719)
    with pytest.raises(CudaError, match="error 719"):
        on.restore(tmp_path / "s", chunks, on.arrays)


@pytest.mark.parametrize("num_slots", [1, 2, 5])
@pytest.mark.parametrize("row_ids", [None, np.arange(0, 30_000, 2)], ids=["range", "every other"])
def test_a_slot_that_a_device_reads_is_not_read_into(emulated, tmp_path, row_ids, num_slots):
    """With every copy as late as it can be."""
    table = random_table(30_000, row_ids)
    on = OnDevice(emulated, table)
    chunks = on.write(tmp_path / "s")
    assert len(chunks) > 8
    targets = table.emptied().arrays
    expected = {name: array.copy() for name, array in targets.items()}
    emulated.native.emulator.set_lazy(True)
    emulated.native.emulator.calls()
    assert on.restore(tmp_path / "s", chunks, targets, num_slots=num_slots)["damaged"] == []
    calls = emulated.native.emulator.calls()
    for name, array in table.arrays.items():
        expected[name][table.saved_ids] = array[table.saved_ids]
        np.testing.assert_array_equal(targets[name], expected[name])
    assert calls["cudaHostRegister"] == calls["cudaHostUnregister"] == num_slots


def test_rows_are_restored_where_no_memory_can_be_pinned(emulated, tmp_path):
    table = random_table(3000)
    on = OnDevice(emulated, table)
    chunks = on.write(tmp_path / "s")
    targets = table.emptied().arrays
    emulated.native.emulator.fail_call("cudaHostRegister", 1, 2)
    assert on.restore(tmp_path / "s", chunks, targets)["damaged"] == []
    for name, array in table.arrays.items():
        np.testing.assert_array_equal(targets[name], array)


def test_a_table_on_two_devices_is_refused(emulated, tmp_path):
    on = OnDevice(emulated, random_table(100))
    stagers = {"weight": on.stager, "sum": None, "scale": on.stager}
    with pytest.raises(UsageError, match=r"'t': sum and weight lie on different devices"):
        on.pipe.start(
            path=str(tmp_path / "s"),
            header_bytes=len(HEADER),
            file_bytes=on.layout.file_bytes,
            tables=[on.spec(on.arrays, capture=True, stagers=stagers)],
        )


def test_nan_on_a_device_fails_the_segment(device, tmp_path):
    table = random_table(100)
    table.arrays["weight"][50, 3] = np.nan
    on = OnDevice(device, table)
    with pytest.raises(ArithmeticError, match="row 50"):
        on.write(tmp_path / "s")


def test_slots_are_pinned_while_the_pipeline_lives(emulated):
    emulated.native.emulator.calls()
    on = OnDevice(emulated, random_table(10), num_slots=3)
    assert emulated.native.emulator.calls()["cudaHostRegister"] == 3
    del on
    assert emulated.native.emulator.calls()["cudaHostUnregister"] == 3


def test_a_slot_that_cannot_be_pinned_makes_no_pipeline(emulated):
    before = backends.live_bytes(emulated)
    emulated.native.emulator.fail_call("cudaHostRegister", 2)
    emulated.native.emulator.calls()
    with pytest.raises(CudaError, match="cudaHostRegister"):
        OnDevice(emulated, random_table(10))
    assert emulated.native.emulator.calls()["cudaHostUnregister"] == 1
    assert backends.live_bytes(emulated) == before


def test_threads_that_wait_for_copies_use_the_device_of_the_table_alone(emulated, tmp_path):
    emulator = emulated.native.emulator
    emulator.set_num_devices(2)
    emulator.set_device(1)  # this thread's, as torch would have it
    on_second = replace(emulated, device=1)
    on = OnDevice(on_second, random_table(3000))
    on.write(tmp_path / "s")
    assert (tmp_path / "s").read_bytes() == on.layout.expected_file()
    del on
    assert emulator.used_devices() == {1}


def test_threads_that_wait_for_copies_break_no_capture(emulated, tmp_path):
    emulator = emulated.native.emulator
    on = OnDevice(emulated, random_table(300))
    emulator.set_lazy(True)
    job = on.start(tmp_path / "s")
    job.capture(step=1)
    emulator.set_capturing(True)
    job.wait("written")
    assert emulator.set_capturing(False)
    job.finish(HEADER)
    assert (tmp_path / "s").read_bytes() == on.layout.expected_file()
