"""Numbers that come from files or from a caller's mistake are refused before memory is touched."""

import numpy as np
import pytest

from cpr_ext._native import native
from cpr_ext.errors import RowIndexError, UsageError
from python_tests.csrc import segments
from python_tests.csrc.segments import Layout, random_table

HUGE = 2**63 - 4096  # a multiple of 4096 that any addition overflows


def test_a_table_or_an_array_of_impossible_numbers_is_refused_and_not_kept():
    for numbers in [
        {"num_rows": -1},
        {"range_begin": -1},
        {"num_rows": 2**62, "range_begin": 2**62},
        *({"row_ids_offset": offset} for offset in (100, -2, -4096, HUGE)),
        *({"num_rows": rows, "row_ids_offset": 4096} for rows in (2**61, 2**63 - 1)),
        *({"block_bytes": size} for size in (-8, 0, 1, 16, 4097, 2**62)),
        {"block_bytes": 8, "row_ids_offset": 4100},
    ]:
        with pytest.raises(UsageError, match="table 't'"):
            native.SegmentTable(name="t", **{"num_rows": 1, **numbers})
    for num_rows, offset in [(10, 1), (10, -4096), (10, HUGE), (2**60, 0), (2**62, 4096)]:
        spec = native.SegmentTable(name="t", num_rows=num_rows)
        with pytest.raises(UsageError, match="weight"):
            spec.add_rows("weight", np.zeros((10, 4)), offset)
        if num_rows == 10:
            spec.add_rows("weight", np.zeros((10, 4)), 4096)
            assert spec.chunk_bytes(10) == 4096


def test_tables_of_a_segment_have_the_same_blocks(tmp_path):
    tables = [
        native.SegmentTable(name=str(size), num_rows=0, block_bytes=size) for size in (8, 4096)
    ]
    pipe = native.SnapshotPipeline(num_slots=2, slot_bytes=4096)
    with pytest.raises(UsageError, match=r"'8' and '4096' .* different block_bytes"):
        pipe.start(path=str(tmp_path / "s"), header_bytes=4096, file_bytes=4096, tables=tables)
    with pytest.raises(UsageError, match="multiples of 8"):
        pipe.start(
            path=str(tmp_path / "s"), header_bytes=4100, file_bytes=8192, tables=tables[:1]
        ).finish("h" * 4100)
    assert not list(tmp_path.iterdir())


def _restore(spec, chunk, **options):
    arguments = {
        "path": "/nonexistent",
        "tables": [spec],
        "wanted": [(0, 1 << 40)],
        "chunks": [chunk],
        "slots": native.SlotPool(num_slots=1, slot_bytes=1 << 16),
    }
    return native.restore_segment(**{**arguments, **options})


def _spec(num_rows=8192, ids=True, target=None):
    spec = native.SegmentTable(name="t", num_rows=num_rows, row_ids_offset=4096 if ids else -1)
    spec.add_rows("weight", np.zeros((8192, 2)) if target is None else target, 1 << 20)
    return spec


OUTSIDE = [(-512, 512), (0, 0), (0, -1), (0, 8193), (8192, 1), (HUGE, HUGE), (512, 2**63 - 1)]


@pytest.mark.parametrize(
    ("chunk", "why"),
    [
        *(((0, first, count, 1, [0, 0]), "outside") for first, count in OUTSIDE),
        *(((0, first, 512 - first % 2, 1, [0, 0]), "aligned") for first in (1, 256)),
        *(((0, 0, 512, 1, [0] * n), f"{n} checksums for 2") for n in (1, 3)),
        ((0, 0, 4096, 1, [0, 0]), "more than the staging slot"),
        *(((table, 0, 512, 1, [0, 0]), f"names table {table}") for table in (1, -1)),
    ],
    ids=str,
)
def test_a_hostile_chunk_is_refused(chunk, why):
    with pytest.raises(UsageError, match=why):
        _restore(_spec(), chunk)


def test_a_chunk_beyond_the_file_is_damage(tmp_path):
    """A believable table in a file that ends long before it."""
    path = tmp_path / "s"
    path.write_bytes(bytes(8192))
    spec = native.SegmentTable(name="t", num_rows=2**40, row_ids_offset=4096)
    spec.add_rows("weight", np.zeros((10, 2)), 2**49)
    result = _restore(spec, (0, 2**39, 512, 1, [0, 0]), path=str(path))
    assert len(result["damaged"]) == 1


def test_a_restoration_that_cannot_be_is_refused(tmp_path):
    fixed = np.zeros((8192, 2))
    fixed.flags.writeable = False
    with pytest.raises(RowIndexError, match="among the rows 0 to 8191"):
        _restore(_spec(8193, ids=False), (0, 0, 512, 1, [0]))
    with pytest.raises(UsageError, match="weight is read-only"):
        _restore(_spec(target=fixed), (0, 0, 512, 1, [0, 0]))
    with pytest.raises(UsageError, match="one wanted range per table"):
        _restore(_spec(), (0, 0, 512, 1, [0, 0]), wanted=[])
    for call in (lambda: _restore(None, (0, 0, 1, 1, [])), lambda: _start(tmp_path, None)):
        with pytest.raises((UsageError, TypeError)):
            call()


def _start(tmp_path, spec, file_bytes=1 << 21):
    return segments.pipeline().start(
        path=str(tmp_path / "s"), header_bytes=4096, file_bytes=file_bytes, tables=[spec]
    )


def test_a_capture_that_lacks_row_ids_or_arrays_is_refused(tmp_path):
    bare = native.SegmentTable(name="t", num_rows=10)
    for call, words in [
        (lambda: _start(tmp_path, _spec(5)), "row_ids are needed"),
        (lambda: _start(tmp_path, bare), "no arrays"),
        (lambda: bare.rows_per_chunk(1 << 20), "no arrays"),
        (lambda: bare.add_rows("w", np.zeros((9, 4)), 4096, -5), "first_row_id"),
        *((lambda n=n: bare.chunk_bytes(n), "count is") for n in (-1, 11, 2**62)),
        (lambda: _by_id(np.arange(3), num_rows=2), "3 row_ids for 2 rows"),
        (lambda: native.SegmentTable(name="t", num_rows=3, row_ids=np.arange(3)), "row_ids"),
    ]:
        with pytest.raises(UsageError, match=words):
            call()
    job = _start(tmp_path, native.SegmentTable(name="t", num_rows=0), 4096)
    job.capture(step=1)
    job.wait("written")


@pytest.mark.parametrize("ids_offset", [0, 1 << 20, (1 << 21) - 4096, 1 << 21])
def test_pieces_that_overlap_each_other_the_header_or_the_end_are_refused(tmp_path, ids_offset):
    row_ids = np.arange(1000)
    spec = native.SegmentTable(name="t", num_rows=1000, row_ids_offset=ids_offset, row_ids=row_ids)
    spec.add_rows("weight", np.zeros((1000, 2)), 1 << 20)
    with pytest.raises(UsageError, match=r"overlap|outside"):
        _start(tmp_path, spec)


def _by_id(row_ids, array=None, **options):
    """A segment of these rows of one array."""
    ids_at, options = 4096, {"num_rows": len(row_ids), "row_ids": row_ids, **options}
    spec = native.SegmentTable(name="t", row_ids_offset=ids_at, **options)
    spec.add_rows("weight", np.zeros((8192, 2)) if array is None else array, 8192)
    return spec


def test_row_ids_to_capture_must_ascend_and_be_in_memory(tmp_path):
    for row_ids in ([1, 1], [2, 1], [-1, 5], [5, 8192]):
        with pytest.raises(UsageError):
            _start(tmp_path, _by_id(np.array(row_ids)))
    packed = _by_id(np.array([5, 7000, 1 << 40]), np.zeros((2, 2)), is_packed=True)
    with pytest.raises(RowIndexError, match="row 2 is not among the rows 0 to 1"):
        _start(tmp_path, packed)


def test_row_ids_of_a_selection_are_shared_and_others_copied(tmp_path):
    """Whoever changes ids that are shared changes those to be captured: so none was copied."""
    chosen = [native.top_rows(np.arange(4096, dtype=np.uint32), 8) for _ in range(2)]
    for row_ids, is_shared in [(chosen[0], True), (chosen[1][:4], False), (np.arange(8), False)]:
        spec = _by_id(row_ids)
        row_ids[3] = 0
        if is_shared:
            with pytest.raises(UsageError, match="must ascend"):
                _start(tmp_path, spec)
        else:
            _start(tmp_path, spec).cancel("done")


def test_a_table_is_placed_later_and_checked_again():
    spec = native.SegmentTable(name="t", num_rows=2, row_ids_offset=0, row_ids=np.arange(2))
    spec.add_rows("weight", np.zeros((8192, 2)), 0)
    spec.place(4096, [8192])
    for ids_offset, offsets in [(-1, [8192]), (4096, []), (4096, [8192, 12288])]:
        with pytest.raises(UsageError, match=r"table 't': \d offsets, row_ids at"):
            spec.place(ids_offset, offsets)
    for ids_offset, offset in [(4096, 100), (100, 8192), (4096, HUGE)]:
        with pytest.raises(UsageError, match="table 't'"):
            spec.place(ids_offset, [offset])


def test_a_slot_too_small_for_one_chunk_is_refused_with_the_size_it_needs(tmp_path):
    layout = Layout([random_table("broad", 2000, 1000)])
    with pytest.raises(UsageError, match=r"'broad'.*make slot_bytes at least 4100096"):
        segments.start(segments.pipeline(), tmp_path / "s", layout)
