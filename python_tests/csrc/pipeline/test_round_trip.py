"""csrc/pipeline/: capture -> file -> restore gives back what numpy says it must."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import NanError, UsageError
from python_tests.csrc import segments
from python_tests.csrc.segments import ALIGNMENT, Layout, Table, random_table

DTYPES = [np.uint8, np.float16, np.float32, np.int64, np.float64]
SHAPES = [(), (1,), (3,), (4, 2), (16,)]


@st.composite
def tables(draw, name):
    """A table of up to 3 arrays with any of its rows saved, as a range or by row id."""
    num_rows = draw(st.sampled_from([0, 1, 2, 63, 512, 513, 4096, 5000, 13_000]))
    first = draw(st.sampled_from([0, 0, 7, 1 << 33]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    arrays = {}
    for i in range(draw(st.integers(1, 3))):
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        shape = draw(st.sampled_from(SHAPES))
        gap = draw(st.sampled_from([0, 0, 3])) if shape else 0
        whole = (num_rows, shape[0] + gap, *shape[1:]) if shape else (num_rows,)
        array = random.integers(0, 100, whole).astype(dtype)
        arrays[f"array{i}"] = array[:, : shape[0]] if shape else array
    if draw(st.booleans()):
        chosen = np.flatnonzero(random.random(num_rows) < draw(st.floats(0, 1)))
        return Table(name, arrays, row_ids=chosen + first, first_row_id=first)
    begin = draw(st.integers(0, num_rows))
    count = draw(st.integers(0, num_rows - begin))
    return Table(name, arrays, None, first + begin, count, first)


@st.composite
def table_lists(draw):
    return [draw(tables(f"t{i}")) for i in range(draw(st.integers(0, 4)))]


def _assert_restored(tables, targets, wanted=None):
    """Wanted saved rows have the saved values, every other byte is untouched."""
    for i, (table, target) in enumerate(zip(tables, targets, strict=True)):
        begin, end = (0, 1 << 62) if wanted is None else wanted[i]
        ids = table.saved_ids
        ids = ids[(ids >= begin) & (ids < end)] - table.first_row_id
        for name, array in table.arrays.items():
            expected = table.emptied().arrays[name]
            expected[ids] = array[ids]
            assert target.arrays[name].tobytes() == expected.tobytes(), (table.name, name)


@given(
    table_lists(),
    st.integers(1, 4),
    st.integers(2, 4),
    st.sampled_from([0, 1, 40_000, 1 << 30]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([ALIGNMENT, native.SMALL_BLOCK]),
)
def test_any_tables_come_back_and_the_file_is_as_predicted(
    tmp_path_factory, tables, slot_units, num_slots, max_bytes, wait_for_slot, direct_io, threads,
    block_bytes,
):  # fmt: skip
    slot_bytes = slot_units * segments.smallest_slot(tables)
    path = tmp_path_factory.mktemp("round") / "s"
    pipe = segments.pipeline(num_slots, slot_bytes, threads)
    layout = Layout(tables, block_bytes=block_bytes)
    job = segments.start(pipe, path, layout, direct_io=direct_io, refuse_nan=False)
    captured = []
    while job.state == "capturing":
        captured += job.capture(step=5, max_bytes=max_bytes, wait_for_slot=wait_for_slot)
    job.wait("written")
    assert pipe.num_free_slots == num_slots
    chunks = job.chunks()
    assert [chunk[:4] for chunk in chunks] == [chunk[:4] for chunk in captured]
    for i, table in enumerate(tables):  # each row once, in order
        rows = [chunk[1:3] for chunk in chunks if chunk[0] == i]
        assert [first for first, _ in rows] == [0, *np.cumsum([n for _, n in rows])][: len(rows)]
        assert sum(count for _, count in rows) == len(table.saved_ids)
    job.finish(segments.HEADER)
    job.mark_committed()
    assert job.state == "committed"
    assert path.read_bytes() == layout.expected_file()
    targets = [table.emptied() for table in tables]
    segment = segments.Segment(path, layout, chunks)
    slots = native.SlotPool(num_slots=1, slot_bytes=slot_bytes)
    result = segments.restore(segment, targets, slots=slots, direct_io=direct_io)
    assert result["damaged"] == []
    assert result["rows_restored"] == [len(table.saved_ids) for table in tables]
    assert slots.num_free == 1
    _assert_restored(tables, targets)


@given(table_lists(), st.data())
def test_only_wanted_rows_are_written(tmp_path_factory, tables, data):
    path = tmp_path_factory.mktemp("wanted") / "s"
    slot_bytes = segments.smallest_slot(tables)
    pipe = segments.pipeline(2, slot_bytes)
    segment = segments.write_segment(path, tables, pipe=pipe, refuse_nan=False)
    wanted = []
    for table in tables:
        bounds = st.integers(-5, 13_100).map(lambda x, first=table.first_row_id: x + first)
        wanted.append((data.draw(bounds), data.draw(bounds)))
    targets = [table.emptied() for table in tables]
    slots = native.SlotPool(num_slots=2, slot_bytes=slot_bytes)
    result = segments.restore(segment, targets, wanted, slots)
    assert result["damaged"] == []
    assert result["rows_restored"] == [
        int(np.count_nonzero((t.saved_ids >= begin) & (t.saved_ids < end)))
        for t, (begin, end) in zip(tables, wanted, strict=True)
    ]
    _assert_restored(tables, targets, wanted)


def test_each_chunk_holds_the_values_of_the_step_it_names(tmp_path):
    """Training writes between capture() calls; a row must be whole and of its chunk's step."""
    num_rows, every = 20_000, np.arange(0, 20_000, 2)
    table = random_table("t", num_rows, 16, row_ids=every)
    layout = Layout([table])
    pipe = segments.pipeline()
    job = segments.start(pipe, tmp_path / "s", layout)
    step = 0
    while job.state == "capturing":
        step += 1
        for array in table.arrays.values():
            array[:] = step
        job.capture(step=step, max_bytes=1, wait_for_slot=step % 2 == 0)
        for array in table.arrays.values():
            array[:] = -step  # what training writes at once after the capture
    job.wait("written")
    chunks = job.chunks()
    assert len({chunk[3] for chunk in chunks}) > 3, "the capture was meant to take many steps"
    job.finish(segments.HEADER)
    target = table.emptied()
    segments.restore(segments.Segment(tmp_path / "s", layout, chunks), [target])
    for _, first, count, of_step, _ in chunks:
        for name in table.arrays:
            rows = target.saved_rows(name)[first : first + count]
            assert (rows == of_step).all(), (name, first, of_step)


def test_max_bytes_bounds_a_call_but_a_call_always_gets_one_chunk_done(tmp_path):
    small = Layout([random_table(f"t{i}", 10, 4) for i in range(8)])
    sharing = segments.start(segments.pipeline(2, 16 * ALIGNMENT), tmp_path / "s", small)
    assert len(sharing.capture(step=1, wait_for_slot=False)) == 8  # of one slot
    table = random_table("t", 20_000, 16)
    spec = Layout([table]).specs(capture=True)[0]
    whole_chunk = spec.chunk_bytes(spec.rows_per_chunk(32 * ALIGNMENT))
    pipe = segments.pipeline()
    for max_bytes, most in ((1, 1), (whole_chunk, 1), (3 * whole_chunk, 3), (0, 1000)):
        job = segments.start(pipe, tmp_path / f"s{max_bytes}", Layout([table]))
        calls = []
        while job.state == "capturing":
            calls.append(len(segments.capture_all(job, max_bytes=max_bytes)))
        assert max(calls) == min(most, sum(calls))
        assert min(calls) >= 1
        job.wait("written")


@given(
    st.integers(0, 10_000),
    st.lists(st.integers(1, 600), max_size=3),
    st.booleans(),
    st.integers(1, 400),
)
def test_chunks_start_aligned_and_fit_the_slot_or_the_table_is_refused_by_name(
    num_rows, widths, with_ids, slot_blocks
):
    slot_bytes = slot_blocks * ALIGNMENT
    spec = native.SegmentTable(
        name="wide one", num_rows=num_rows, row_ids_offset=0 if with_ids else -1
    )
    for i, width in enumerate(widths):
        spec.add_rows(f"a{i}", np.zeros((1, width), np.uint8), 0)
    widths = [8] * with_ids + widths
    try:
        count = spec.rows_per_chunk(slot_bytes)
    except UsageError as error:
        assert "wide one" in str(error)  # noqa: PT017
        if widths:
            unit = max(ALIGNMENT // np.gcd(ALIGNMENT, width) for width in widths)
            rows = min(num_rows, unit)
            assert sum(segments.align_up(rows * width) for width in widths) > slot_bytes
        return
    assert count >= 1
    assert spec.chunk_bytes(min(count, num_rows)) <= slot_bytes
    if count < num_rows:
        assert all(count * width % ALIGNMENT == 0 for width in widths)


def test_a_long_restoration_says_how_far_it_is(tmp_path):
    segment = segments.write_segment(tmp_path / "s", [random_table()])
    (chunk,) = segment.chunks
    target, done = segment.layout.tables[0].emptied(), []

    def note(bytes_read):
        done.append(bytes_read)
        if len(done) == 2:
            raise KeyError

    def restore_ever_more():
        for times in (20_000 << doubled for doubled in range(20)):
            done.clear()
            source = segments.source(
                segments.Segment(segment.path, segment.layout, [chunk] * times), [target]
            )
            slots = native.SlotPool(num_slots=2, slot_bytes=1 << 20)
            native.restore_segments([source], slots=slots, on_progress=note)

    with pytest.raises(KeyError):
        restore_ever_more()
    assert 0 < done[0] < done[1]


def test_slots_that_cannot_be_are_refused():
    for num_slots in (0, 1):
        with pytest.raises(UsageError):
            segments.pipeline(num_slots)
    for options in [(0, 4096), (-1, 4096), *((1, size) for size in (0, -4096, 1, 4095, 4097))]:
        with pytest.raises(UsageError, match=r"at least 1|multiple of 4096"):
            native.SlotPool(num_slots=options[0], slot_bytes=options[1])
    if not segments.SANITIZER:  # which reports the attempt
        with pytest.raises(MemoryError):
            native.SlotPool(num_slots=1, slot_bytes=1 << 60)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("by_id", [True, False])
def test_nan_is_refused_and_the_table_row_and_array_are_named(tmp_path, dtype, by_id):
    table = random_table("users", 9000, 4, **({"row_ids": np.arange(1, 9000, 2)} if by_id else {}))
    table.arrays = {name: array.astype(dtype) for name, array in table.arrays.items()}
    if by_id:
        table.arrays["weight"][::2] = np.nan  # not saved, so it does not matter
    table.arrays["sum"][7123] = np.nan
    pipe = segments.pipeline()
    job = segments.start(pipe, tmp_path / "s", Layout([table]))
    segments.capture_all(job)
    with pytest.raises(NanError, match="table 'users', row 7123: sum is NaN"):
        job.wait("written")
    assert list(tmp_path.iterdir()) == []
    assert pipe.num_free_slots == 2
    segments.write_segment(tmp_path / "s", [table], refuse_nan=False)
