"""When snapshots begin, of what kind, how much they hold; and what a caller may not ask for."""

import os
import threading
import time

import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext.saving.snapshot_rows import SnapshotRows
from cpr_ext.storage.store import Store
from python_tests.helpers import Trained, assert_same, read_chunks, row_records, train_step


def begun_at(run, num_steps):
    """(step, kind) of the snapshots that begin in so many steps."""
    begun = []
    for _ in range(num_steps):
        before = run.checkpointer._saver._next_number
        run.train(1)
        if run.checkpointer._saver._next_number != before:
            kind = "base" if run.checkpointer._saver.in_flight.kind == "base" else "partial"
            begun.append((run.checkpointer.step_count, kind))
    return begun


EXACT = {"optimizer": "sgd"}
NEVER = cpr_ext.EverySteps(10**9, when_busy="wait")


def every(steps):
    return cpr_ext.EverySteps(steps, when_busy="wait")


def partial_chunks(run):
    """What the only partial snapshot holds."""
    (path,) = [path for record, path in row_records(run.store) if record.kind == "partial"]
    return read_chunks(path)


# --- when ---


def test_the_first_step_begins_a_base_and_partials_follow_by_schedule(tmp_path):
    run = Trained(tmp_path, schedule=every(4), store=cpr_ext.StoreOptions(None), **EXACT)
    assert begun_at(run, 10) == [(1, "base"), (5, "partial"), (9, "partial")]
    run.checkpointer.wait()
    metrics = run.checkpointer.metrics
    assert (metrics.base_snapshots, metrics.partial_snapshots) == (1, 2)
    assert (metrics.failed_snapshots, metrics.failures, metrics.samples_lost) == (0, [], 0)
    live = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert metrics.bytes_written >= live
    assert 0 < metrics.max_stall_seconds <= metrics.stall_seconds


@pytest.fixture
def held_commits(monkeypatch):
    """Commits wait until the event is set: a disk that takes its time."""
    gate = threading.Event()
    add = Store.add

    def add_later(self, dense, rows):
        assert gate.wait(60)
        add(self, dense, rows)

    monkeypatch.setattr(Store, "add", add_later)
    yield gate
    gate.set()


def test_a_snapshot_that_is_due_while_another_is_on_its_way_begins_once_that_is_committed(
    tmp_path, held_commits
):
    run = Trained(tmp_path, schedule=cpr_ext.EverySteps(2))
    assert begun_at(run, 7) == [(1, "base")]
    first = run.checkpointer._saver.in_flight
    assert first.state == "captured"
    held_commits.set()
    assert first.wait_until_done(30)
    assert begun_at(run, 1) == [(8, "partial")]
    run.checkpointer.close()


@pytest.mark.parametrize(
    ("schedule", "warns"),
    [
        (cpr_ext.EverySteps(2), True),
        (cpr_ext.Continuous(min_seconds=0) | cpr_ext.EverySteps(2), False),
        (cpr_ext.EverySteps(4), False),  # the disk takes three steps
    ],
)
def test_snapshots_that_are_due_faster_than_they_are_written_are_reported_once(
    tmp_path, held_commits, caplog, schedule, warns
):
    run = Trained(tmp_path, schedule=schedule)
    for number in range(1, 6):
        while run.checkpointer._saver.in_flight is None:
            run.train(1)
        run.train(2)
        assert "faster than" not in caplog.text or (warns and number > 3)
        snapshot = run.checkpointer._saver.in_flight
        held_commits.set()
        assert snapshot.wait_until_done(30)
        held_commits.clear()
        run.train(1)
    held_commits.set()
    assert caplog.text.count("snapshots are due faster than they are written") == warns
    run.checkpointer.close()


def test_when_busy_wait_holds_training_until_the_last_snapshot_is_committed(tmp_path, held_commits):
    run = Trained(tmp_path, schedule=every(2), **EXACT)
    run.train(2)
    started = time.monotonic()
    assert run.checkpointer.wait(timeout_seconds=0.1) is False
    assert time.monotonic() - started < 30
    threading.Timer(1.5, held_commits.set).start()
    assert begun_at(run, 1) == [(3, "partial")]
    assert run.checkpointer.metrics.base_snapshots == 1
    assert run.checkpointer.metrics.max_stall_seconds >= 0.1  # a busy machine begins to wait late
    assert run.checkpointer.wait(timeout_seconds=30) is True
    assert run.checkpointer.wait() is True


def test_one_step_captures_no_more_than_about_a_slot_or_all_slots_of_a_gpu(tmp_path, monkeypatch):
    slot_bytes, captured, capture = 64 << 10, [], SnapshotRows.capture
    staging = cpr_ext.StagingOptions(slot_bytes=slot_bytes)
    run = Trained(tmp_path, {"a": (12_000, 8)}, staging=staging)

    def note(self, step, **options):
        before = self.bytes_captured
        progressed = capture(self, step, **options)
        captured.append((step, self.bytes_captured - before))
        return progressed

    monkeypatch.setattr(SnapshotRows, "capture", note)
    run.train(40)
    most = 1 + run.checkpointer._saver._options.slots_per_step
    for step in range(1, 41):
        assert sum(n for at, n in captured if at == step) <= most * slot_bytes
    assert len({step for step, n in captured if n}) > 3
    run.checkpointer.close()


# --- how much ---


def test_a_partial_snapshot_holds_the_most_used_rows_within_the_budget_of_each_shard(tmp_path):
    priority = cpr_ext.MostFrequentlyUsed(0.1)
    run = Trained(tmp_path, {"a": (80, 2)}, num_shards=2, priority=priority, schedule=NEVER)
    run.checkpointer.step()
    run.checkpointer.wait()
    generator = torch.Generator().manual_seed(3)
    counts = torch.zeros(80, dtype=torch.int64)
    for _ in range(5):
        indices = torch.randint(0, 80, (60,), generator=generator)
        counts += torch.bincount(indices, minlength=80)
        train_step(run.model, run.optimizers, {"a": indices}, generator)
        run.checkpointer.step()
    run.save()
    (chunk,) = partial_chunks(run)
    expected = []
    for begin in (0, 40):
        order = sorted(range(begin, begin + 40), key=lambda row: (-counts[row].item(), row))
        expected += sorted(order[:4])
    assert chunk.row_ids.tolist() == expected


def test_small_tables_are_saved_whole_with_each_partial_snapshot(tmp_path):
    run = Trained(tmp_path, {"large": (20_000, 2), "tiny": (5, 2)}, schedule=every(3), **EXACT)
    run.train(4)
    run.checkpointer.wait()
    chunks = {chunk.table: chunk for chunk in partial_chunks(run)}
    assert chunks["tables.tiny"].row_ids.tolist() == list(range(5))
    assert 0 < len(chunks["tables.large"].row_ids) <= 3 * run.lookups


def test_rows_a_partial_snapshot_passed_over_are_first_the_next_time(tmp_path):
    priority = cpr_ext.MostFrequentlyUsed(0.05)
    run = Trained(tmp_path, {"a": (40, 2)}, priority=priority, schedule=NEVER, **EXACT)
    run.checkpointer.step()
    run.checkpointer.wait()
    for rows in ([1, 2, 3, 4], [1, 2, 3], [1]):
        with run.checkpointer.writing_rows("tables.a", torch.tensor(rows)):
            pass
    saved = []
    for _ in range(3):
        run.save()
        (*_, path) = [path for _, path in row_records(run.store)]
        saved.append(read_chunks(path)[0].row_ids.tolist())
    assert saved == [[1, 2], [3, 4], [3, 4]]  # the third had no rows, so the second is the newest


@pytest.mark.parametrize("rebase_after", [0.5, 2.0, None])
def test_a_base_is_taken_again_when_partials_have_written_so_many_times_its_bytes(
    tmp_path, rebase_after
):
    store = cpr_ext.StoreOptions(rebase_after=rebase_after)
    run = Trained(tmp_path, {"a": (300, 4)}, lookups=40, store=store, schedule=every(1), **EXACT)
    written = {"base": 0, "partial": 0}
    for _ in range(20):
        snapshot = run.checkpointer.step()
        assert snapshot.wait_until_done(30)
        limit = float("inf") if rebase_after is None else rebase_after * written["base"]
        is_base = not written["base"] or written["partial"] > limit
        assert snapshot.kind == ("base" if is_base else "partial")
        if is_base:
            written = {"base": 0, "partial": 0}
        written[snapshot.kind] += snapshot.file_bytes
    metrics = run.checkpointer.metrics
    assert (metrics.base_snapshots == 1) == (rebase_after is None)
    run.save("base")  # leaves its own segments alone
    names = [path.name for path in tmp_path.rglob("*.safetensors")]
    assert len(names) == 2
    assert len({name.split("-")[0] for name in names}) == 1


def test_memory_is_bounded_by_the_slots_whatever_the_size_of_a_table(tmp_path):
    staging = cpr_ext.StagingOptions(slot_bytes=1 << 20)
    run = Trained(tmp_path, {"a": (200_000, 16)}, staging=staging, **EXACT)
    pipeline = run.checkpointer._saver._parts.context.pipeline
    assert (pipeline.num_free_slots, pipeline.slot_bytes) == (3, 1 << 20)
    before = resident_bytes()
    run.save("base")
    assert resident_bytes() - before < 6 << 20  # the table has 12.8 MB
    assert pipeline.num_free_slots == 3


def resident_bytes():
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_registered_tables_are_saved_and_recovered_without_modules(tmp_path):
    def make(seed):
        weight = nn.Parameter(torch.randn(50, 3, generator=torch.Generator().manual_seed(seed)))
        optimizer = torch.optim.Adagrad([weight], lr=0.1)
        checkpointer = cpr_ext.Checkpointer(
            nn.Linear(2, 1), optimizer, tmp_path, tables={"w": weight}
        )
        return weight, optimizer, checkpointer

    weight, optimizer, checkpointer = make(0)
    weight[torch.tensor([3, 4])].sum().backward()
    optimizer.step()
    checkpointer.step()
    checkpointer.close()
    again, _, second = make(1)
    second.recover()
    assert_same(again.detach(), weight.detach())
    second.close()
