"""Changed rows: a consumer that applies them holds what recovery restores."""

import importlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cpr_ext
from cpr_ext import Retention, StoreOptions
from cpr_ext.wings.publishing import PositionError, RowBatch, changed_rows
from python_tests import preloaded
from python_tests.helpers import Trained, assert_same, same_bits, train_step
from python_tests.wings.publishing.consumers import Consumer
from python_tests.wings.tools.maintenance.stores import TABLES, recovered, trained_store

SMALL = {"big": (300, 4), "small": (3, 2)}
OPS = ["save", "save", "base", "crash", "back", "back_to_full", "change_priority"]


def consumer_of(trained):
    return Consumer({table.name: table.num_embeddings for table in trained.checkpointer.tables})


def train_rows(trained, rows):
    """A step that looks up these rows of the big table alone."""
    generator = torch.Generator().manual_seed(7)
    train_step(trained.model, trained.optimizers, {"big": torch.tensor(rows)}, generator)
    trained.checkpointer.step(1)


def save(trained, kind="partial"):
    trained.checkpointer.save(kind)
    trained.checkpointer.wait()


@pytest.fixture
def trained(tmp_path):
    found = trained_store(tmp_path / "store", snapshots=2)
    yield found
    found.die()


def test_it_yields_only_rows_of_later_snapshots(trained, monkeypatch):
    store, consumer, windowed = trained.store.directory, consumer_of(trained), consumer_of(trained)
    until = consumer.follow(store).until
    assert list(changed_rows(store, until=until))
    train_rows(trained, [5, 600])
    save(trained)
    with pytest.raises(PositionError, match="no longer"):
        changed_rows(store, until=until)
    changes = changed_rows(store, consumer.position)
    ids = torch.cat([b.row_ids for b in changes if b.table == "tables.big"]).tolist()
    assert {5, 600} <= set(ids)
    assert len(ids) == len(set(ids)) < 300
    assert not changes.is_copy
    consumer.follow(store, on_gap="raise")
    assert changed_rows(store, consumer.position).is_empty
    module = importlib.import_module("cpr_ext.wings.publishing.changed_rows")
    monkeypatch.setattr(module, "WINDOW_ROWS", 7)
    windowed.follow(store)
    assert_same(windowed.tables, consumer.tables)
    assert_as_recovered(consumer, trained)


def assert_as_recovered(consumer, trained):
    trained.die()
    _, rows, _ = recovered(trained.store.directory)
    assert consumer.differences(rows) == []


def files_of(trained):
    return [record.file for record in trained.store.manifest.rows]


def reopen(trained):
    again = Trained(
        trained.store.directory,
        TABLES,
        num_shards=3,
        schedule=cpr_ext.EverySteps(10**9),
        store=StoreOptions(None),
        priority=cpr_ext.MostFrequentlyUsed(0.1),
    )
    again.checkpointer.recover(mode="full")
    return again


def test_after_a_roll_back_a_copy_is_needed(trained):
    consumer = consumer_of(trained)
    consumer.follow(trained.store.directory)
    before = files_of(trained)
    trained.die()
    reopen(trained).die()
    again = reopen(trained)  # a process after the one that rolled back uses the numbers again
    for _ in before[1:]:
        train_rows(again, [5, 300, 600])
        save(again)
    assert files_of(again) == before
    with pytest.raises(PositionError, match="rolled back"):
        changed_rows(again.store.directory, consumer.position)
    changes = consumer.follow(again.store.directory)
    assert changes.is_copy
    assert_as_recovered(consumer, again)


def test_a_position_of_another_store_is_refused(trained, tmp_path):
    other = Trained(tmp_path / "other", {"big": (10, 2)}, num_shards=3)
    other.checkpointer.recover()
    other.train(1)
    save(other)
    position = changed_rows(tmp_path / "other").until
    other.die()
    with pytest.raises(PositionError, match="other tables"):
        changed_rows(trained.store.directory, position, on_gap="copy")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_arrow_keeps_every_bit(dtype):
    weight = torch.tensor([[0.0, -0.0], [float("nan"), 1.5]], dtype=dtype)
    batch = RowBatch(0, "t", torch.tensor([3, 9]), {"weight": weight, "sum": weight[:, 0]}, 12)
    record = batch.to_arrow()
    assert record.schema.names == ["row_id", "weight", "sum", "step"]
    assert record.column("row_id").to_pylist() == [3, 9]
    assert record.column("step").to_pylist() == [12, 12]
    flat = torch.from_numpy(record.column("weight").flatten().to_numpy(zero_copy_only=False).copy())
    assert same_bits(flat.view(dtype).reshape(2, 2), weight)


def test_memory_is_that_of_a_few_slots(tmp_path):
    trained = Trained(
        tmp_path / "store",
        {"big": (250_000, 31)},
        staging=cpr_ext.StagingOptions(slot_bytes=1 << 20),
    )
    trained.checkpointer.recover()
    trained.train(1)
    trained.checkpointer.wait()
    train_rows(trained, list(range(0, 200_000, 7)))
    save(trained)
    trained.die()  # it reads its store back, which takes memory of its own
    num_rows = sum(len(batch.row_ids) for batch in changed_rows(tmp_path / "store", states=True))
    assert num_rows == 250_000
    # In a process of its own: what others free is used first, and the meter does not see that.
    code = (
        "import sys\n"
        "from cpr_ext.wings.publishing import changed_rows\n"
        "from python_tests.faults.memory_meter import MemoryMeter\n"
        "next(iter(changed_rows(sys.argv[1], states=True)))  # what the first reading imports\n"
        "memory, largest = MemoryMeter(), 0\n"
        "for batch in changed_rows(sys.argv[1], states=True):\n"
        "    largest = max(largest, sum(values.nbytes for values in batch.arrays.values()))\n"
        "print(largest, memory.grown_bytes())\n"
        "memory.begin()\n"
        "held = list(changed_rows(sys.argv[1], states=True))\n"
        "print(len(held), memory.grown_bytes())\n"
    )
    done = preloaded.run(["-c", code, tmp_path / "store"])
    assert done.returncode == 0, done.stderr
    (largest, grown), (_, all_of_it) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert largest <= 1 << 20
    assert grown < 10 << 20
    assert all_of_it > 25 << 20  # 31 MB of weights and as much of state, less what was free
    trained.die()


def _reopen(directory, priority):
    trained = Trained(
        directory,
        SMALL,
        num_shards=2,
        priority=priority,
        schedule=cpr_ext.EverySteps(10**9),
        store=StoreOptions(rebase_after=None, retention=Retention(full_recovery_points=2)),
        staging=cpr_ext.StagingOptions(slot_bytes=1 << 16),
    )
    trained.checkpointer.recover()
    return trained


def _step(trained, op, directory, priority):
    """Do one thing that changes the store; returns the process that trains on."""
    checkpointer = trained.checkpointer
    if op == "save":
        trained.train(2)
        save(trained)
    elif op == "base":
        trained.train(1)
        save(trained, "base")
    elif op == "crash":
        trained.train(1)
        checkpointer.save()  # in flight as the process ends
        trained.die()
        return _reopen(directory, priority)
    elif op == "back":
        checkpointer.recover(up_to_step=checkpointer.store.manifest.dense[0].last_step)
    elif op == "back_to_full":
        if any(record.is_complete for record in checkpointer.store.manifest.dense):
            checkpointer.recover(mode="full")
    else:
        trained.checkpointer.close()
        return _reopen(directory, cpr_ext.AllRows())
    return trained


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(ops=st.lists(st.tuples(st.sampled_from(OPS), st.booleans()), min_size=3, max_size=10))
def test_a_consumer_holds_what_recovery_restores(ops, tmp_path_factory):
    directory = tmp_path_factory.mktemp("store") / "s"
    priority = cpr_ext.MostFrequentlyUsed(0.2)
    trained = _reopen(directory, priority)
    trained.train(1)
    trained.checkpointer.wait()
    consumer = consumer_of(trained)
    consumer.follow(directory)
    for op, follows in ops:
        trained = _step(trained, op, directory, priority)
        if follows:
            consumer.follow(directory)
    consumer.follow(directory)
    trained.die()
    other = Trained(directory, SMALL, num_shards=2, seed=99)
    try:
        other.checkpointer.recover()
        assert consumer.differences(other.rows()) == []
    finally:
        other.die()
