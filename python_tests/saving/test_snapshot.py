"""A snapshot is what it says: the promise that everything else stands on."""

import tempfile
from collections import defaultdict

import torch
from hypothesis import given
from hypothesis import strategies as st

import cpr_ext
from python_tests.helpers import (
    STILL_OPTIMIZERS,
    TABLE_OPTIMIZERS,
    assert_same,
    build,
    copy_rows,
    copy_state,
    die,
    make_indices,
    open_checkpointer,
    read_chunks,
    row_records,
    same_bits,
    short_windows,
    train_step,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


class Reference:
    """Every row as it was after each step, in plain copies; checks committed segments by them."""

    def __init__(self, checkpointer):
        self.checkpointer = checkpointer
        self.rows = {}
        self.dense = {}
        self.checked = set()
        self.steps_per_snapshot = defaultdict(set)

    def check_committed(self):
        for record, path in row_records(self.checkpointer.store):
            if record.snapshot in self.checked:
                continue
            try:
                chunks = read_chunks(path)
            except FileNotFoundError:  # a commit meanwhile made it superfluous
                assert path not in [now for *_, now in row_records(self.checkpointer.store)]
                continue
            self.checked.add(record.snapshot)
            self.check(record, chunks)

    def check(self, record, chunks):
        seen = defaultdict(list)
        for chunk in chunks:
            assert record.first_step <= chunk.step <= record.last_step
            self.steps_per_snapshot[record.snapshot].add(chunk.step)
            then = self.rows[chunk.step][chunk.table]
            assert chunk.arrays.keys() == then.keys()
            for name, values in chunk.arrays.items():
                assert same_bits(values, then[name][chunk.row_ids]), (record, chunk.table, name)
            seen[chunk.table] += chunk.row_ids.tolist()
        for table in self.checkpointer.tables:
            row_ids = seen[table.name]
            assert row_ids == sorted(set(row_ids))
            if record.kind == "base":
                assert row_ids == list(range(table.num_embeddings))
        steps = [chunk.step for chunk in chunks]
        assert (record.first_step, record.last_step) == (min(steps), max(steps))

    def newest_rows(self):
        """Each row as the newest segment that holds it says."""
        newest = {}
        for _, path in row_records(self.checkpointer.store):
            for chunk in read_chunks(path):
                then = self.rows[chunk.step][chunk.table]
                rows = newest.setdefault(
                    chunk.table, {name: torch.zeros_like(value) for name, value in then.items()}
                )
                for name in rows:
                    rows[name][chunk.row_ids] = then[name][chunk.row_ids]
        return newest


PRIORITIES = [getattr(cpr_ext, name) for name in (
    "MostFrequentlyUsed", "SubSampledUsed", "LargestChange", "AllRows"
)]  # fmt: skip
FRACTIONS = [0.05, 0.125, 0.5, 1.0]
table_sizes = st.dictionaries(
    st.sampled_from(["a", "user id", "ü"]),
    st.tuples(st.integers(1, 40) | st.integers(1000, 3000), st.sampled_from([1, 3, 4, 8])),
    min_size=1,
    max_size=3,
)


def num_different_rows(left, right):
    """Rows of which any bit of any array differs."""
    count = 0
    for table, arrays in left.items():
        differs = torch.zeros(len(arrays["weight"]), dtype=torch.bool)
        for name, rows in arrays.items():
            pair = (values.reshape(len(rows), -1) for values in (rows, right[table][name]))
            bits = [values.contiguous().view(torch.uint8) for values in pair]
            differs |= (bits[0] != bits[1]).any(dim=1)
        count += int(differs.sum())
    return count


@given(
    tables=table_sizes,
    optimizer=st.sampled_from(sorted(TABLE_OPTIMIZERS)),
    dtype=st.sampled_from(DTYPES),
    priority=st.tuples(*map(st.sampled_from, (PRIORITIES, FRACTIONS))).map(lambda p: p[0](p[1])),
    num_shards=st.integers(1, 4),
    schedule=st.builds(
        cpr_ext.EverySteps, st.integers(1, 4), when_busy=st.sampled_from(["delay", "wait"])
    ),
    staging=st.builds(
        cpr_ext.StagingOptions,
        slot_bytes=st.sampled_from([112 << 10, 192 << 10]),
        direct_io=st.booleans(),
    ),
    num_steps=st.integers(1, 14),
    saves=st.dictionaries(st.integers(1, 14), st.sampled_from(["base", "partial"]), max_size=2),
    store=st.sampled_from([None, 0.3, 4.0]).map(cpr_ext.StoreOptions),
    overlap=st.sampled_from(["never", "always"]),
    are_short=st.booleans(),
    lookups=st.sampled_from([1, 30, 500]),
    seed=st.integers(0, 1000),
)
def test_every_committed_row_equals_the_row_at_the_step_its_chunk_names_and_recovery_brings_it_back(
    tables, optimizer, dtype, lookups, num_steps, saves, seed, are_short, **options
):
    generator = torch.Generator().manual_seed(seed)
    with tempfile.TemporaryDirectory() as directory, short_windows(are_short):
        model, optimizers = build(tables, optimizer, dtype)
        checkpointer = open_checkpointer(model, optimizers, directory, **options)
        reference = Reference(checkpointer)
        for step in range(1, num_steps + 1):
            indices = make_indices(model, generator, lookups)
            train_step(model, optimizers, indices, generator)
            torch.rand(1)  # moves the global generator on
            # step() changes no row, so the copy may be made before it captures any.
            reference.rows[step] = copy_rows(checkpointer.tables)
            reference.dense[step] = copy_state(model, optimizers)
            checkpointer.step(num_samples=5)
            if step in saves:
                checkpointer.save(saves[step])
            reference.check_committed()
        assert checkpointer.wait()
        assert checkpointer.metrics.failed_snapshots == 0
        reference.check_committed()
        die(checkpointer)

        fresh, fresh_optimizers = build(tables, optimizer, dtype, seed=1)
        again = open_checkpointer(fresh, fresh_optimizers, directory, **options)
        report = again.recover()
        dense = again.store.manifest.dense[-1]
        assert (report.step, report.num_samples) == (dense.last_step, 5 * dense.last_step)
        assert report.rows_restored == sum(rows for rows, _ in tables.values())
        assert report.damaged_segments == []
        reference.checkpointer = again
        assert_same(copy_rows(again.tables), reference.newest_rows())
        assert report.rows_stale is not None or optimizer not in STILL_OPTIMIZERS
        if report.rows_stale is not None:
            older = num_different_rows(reference.newest_rows(), reference.rows[report.step])
            # An update may leave a row's bits as they are, in float16 above all.
            assert older <= report.rows_stale <= sum(rows for rows, _ in tables.values())
            if dense.is_complete:
                assert report.rows_stale == 0
        then, now = reference.dense[report.step], copy_state(fresh, fresh_optimizers)
        for part in ("torch", "numpy", "python"):
            assert_same(now[part], then[part])
        assert_same(now["optimizers"][1], then["optimizers"][1])
        for name, value in then["model"].items():
            if not name.startswith("tables."):
                assert same_bits(now["model"][name], value), name
        again.close()

        points = [record for record in again.store.manifest.dense if record.is_complete]
        if points:
            back, back_optimizers = build(tables, optimizer, dtype, seed=2)
            third = open_checkpointer(back, back_optimizers, directory, **options)
            assert third.recover(mode="full").step == points[-1].last_step
            assert_same(copy_state(back, back_optimizers), reference.dense[points[-1].last_step])
            third.close()


def test_a_capture_spread_over_steps_names_different_steps_for_its_chunks(tmp_path):
    """The property above is about mixtures; this shows that they do occur."""
    model, optimizers = build({"a": (6000, 8), "b": (2000, 8)}, "adam")
    staging = cpr_ext.StagingOptions(slot_bytes=64 << 10, num_slots=2)
    checkpointer = cpr_ext.Checkpointer(model, optimizers, tmp_path, staging=staging)
    checkpointer.schedule = cpr_ext.EverySteps(1000)
    generator = torch.Generator().manual_seed(0)
    reference = Reference(checkpointer)
    while checkpointer.metrics.base_snapshots == 0:
        train_step(model, optimizers, make_indices(model, generator, 100), generator)
        reference.rows[checkpointer.step_count + 1] = copy_rows(checkpointer.tables)
        checkpointer.step()
        snapshot = checkpointer._saver.in_flight
        if snapshot is not None and snapshot.state != "capturing":
            assert snapshot.wait_until_done(30)
    reference.check_committed()
    (steps,) = reference.steps_per_snapshot.values()
    assert len(steps) > 5
    assert reference.checked == {1}
    record = checkpointer.store.manifest.dense[-1]
    assert (record.first_step, record.last_step) == (max(steps), max(steps))
    assert not record.is_complete
