"""Rows that change past PyTorch: found, reported, and no snapshot claims to hold them."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext.errors import CudaError, UntrackedChangeWarning, UsageError
from cpr_ext.saving.table_scrub import TableScrub
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.tools.maintenance.row_reading import read_rows
from python_tests.helpers import die
from python_tests.tracking.watched import NEVER, Watched, backward_of

N = 2000


def make(tables=1, kind=torch.optim.Adagrad):
    torch.manual_seed(0)
    model = nn.ModuleDict({f"t{i}": nn.Embedding(N, 8, sparse=True) for i in range(tables)})
    return model, kind(model.parameters(), lr=0.1)


def train(run, row=3):
    run.optimizers[0].zero_grad()
    sum(module(torch.tensor([row])).sum() for module in run.model.values()).backward()
    run.optimizers[0].step()
    return run.ckpt.step()


def read_back(ckpt):
    ckpt._saver._parts.committer.call(ckpt._saver.claims.round_trips.finish).result()


def is_complete_on_disk(run):
    """What another process reads now."""
    return [record.is_complete for record in StoreReader(run.directory).dense.segments]


def write_past_pytorch(run, table, row, bit=0):
    weight = run.model[table].weight.data  # shares memory, not the version
    weight.view(torch.uint8)[row, bit // 8] ^= 1 << bit % 8


@pytest.fixture
def run(tmp_path):
    run = Watched(tmp_path / "store", *make(2))
    yield run
    run.ckpt.close()


def test_every_single_bit_write_is_found_by_the_end_of_a_pass(run):
    random = np.random.default_rng(0)
    scrub = run.ckpt._saver.claims.scrub
    missed = []
    for table in random.permuted(["t0", "t1"] * 5_000):
        row, bit = int(random.integers(N)), int(random.integers(8 * 32))
        write_past_pytorch(run, table, row, bit)
        scrub.restart()
        found = [(each.table.name, each.row_id) for each in scrub.run_pass()]
        if found != [(table, row)]:
            missed.append((table, row, bit))
        write_past_pytorch(run, table, row, bit)
    assert missed == []
    assert run.ckpt.scrub() == {}


def test_one_row_is_found_by_a_pass_over_slices(run):
    write_past_pytorch(run, "t1", N - 1)
    scrub = run.ckpt._saver.claims.scrub
    scrub.restart()
    found = []
    while not found:
        changed, _ = scrub._advance(1000)
        found += changed
    assert [(each.table.name, each.row_id) for each in found] == [("t1", N - 1)]


def test_training_scrubs_by_itself(run):
    write_past_pytorch(run, "t1", N - 1)
    scrub = run.ckpt._saver.claims.scrub

    def train_a_while():
        for _ in range(4):
            scrub._next_slice = 0.0
            train(run)

    with pytest.warns(UntrackedChangeWarning, match=f"'t1'.*row {N - 1} counts as unchanged"):
        train_a_while()
    assert run.ckpt.metrics.rows_changed_unseen == 1
    assert run.save("base").is_complete
    run.assert_recovers(lambda: make(2))


def test_slices_take_a_bounded_share_of_the_time(run, monkeypatch):
    scrub = run.ckpt._saver.claims.scrub
    moments = iter([100.0, 100.5])  # a slice that took half a second
    monkeypatch.setattr("cpr_ext.saving.scrub.time.perf_counter", lambda: next(moments))
    scrub.advance()
    assert scrub._next_slice >= 100.5 + 0.5 / 0.0005


def test_a_write_to_several_tables_is_found_in_each(tmp_path):
    run = Watched(tmp_path / "store", *make(3), consistency="step", overlap="never")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(6):
            train(run, step)
            with torch.no_grad():
                for module in run.model.values():
                    module.weight.data.mul_(0.999)
            if step % 2:
                record = run.save()
                for name, module in run.model.items():
                    saved = read_rows(run.directory, name, range(N)).arrays["weight"]
                    is_same = torch.equal(saved, module.weight.detach())
                    assert is_same or not record.is_complete
    texts = [str(each.message) for each in warned if each.category is UntrackedChangeWarning]
    assert [text.split("'")[1] for text in texts] == ["t0", "t1", "t2"]
    run.ckpt.close()


def test_a_difference_revokes_what_no_pass_has_proven_on_disk(tmp_path):
    run = Watched(tmp_path / "store", *make(2))
    train(run)
    proven = run.ckpt.save()
    run.ckpt.wait()
    assert proven.is_complete
    assert not proven.is_proven
    assert run.ckpt.scrub() == {}
    assert proven.is_proven
    train(run)
    run.ckpt.store.retention = cpr_ext.Retention(full_recovery_points=5)
    false = run.ckpt.save()
    run.ckpt.wait()
    assert is_complete_on_disk(run)[-2:] == [True, True]
    write_past_pytorch(run, "t1", 77)
    with pytest.warns(UntrackedChangeWarning, match="row 77"):
        assert run.ckpt.scrub() == {"t1": 77}
    assert is_complete_on_disk(run)[-2:] == [True, False]  # as after a kill
    assert (proven.is_complete, proven.is_proven) == (True, True)
    assert (false.is_complete, false.is_proven) == (False, False)
    die(run.ckpt)


def test_a_base_snapshot_captured_at_once_is_proven_and_stays_a_full_recovery_point(run):
    handle = run.ckpt.save("base")
    run.ckpt.wait()
    read_back(run.ckpt)
    assert handle.is_proven
    write_past_pytorch(run, "t0", 5)
    with pytest.warns(UntrackedChangeWarning):
        run.ckpt.scrub()
    assert handle.is_complete
    assert is_complete_on_disk(run)[-1]


def test_restored_rows_are_known(tmp_path):
    run = Watched(tmp_path / "store", *make(2))
    train(run)
    die(run.ckpt)
    model, optimizer = make(2)
    with cpr_ext.Checkpointer(model, optimizer, run.directory, **NEVER) as ckpt:
        ckpt.recover()
        model["t1"].weight.data.view(torch.uint8)[1234, 0] ^= 4
        with pytest.warns(UntrackedChangeWarning, match="row 1234"):
            assert ckpt.scrub() == {"t1": 1234}


def test_restored_shards_hide_no_change_of_the_others(tmp_path):
    run = Watched(tmp_path / "store", *make(), num_shards=4)
    train(run)
    run.save()
    write_past_pytorch(run, "t0", N // 4)
    write_past_pytorch(run, "t0", N - 1)
    run.ckpt.recover(shards=[3])
    with pytest.warns(UntrackedChangeWarning, match=f"row {N // 4} "):
        assert run.ckpt.scrub() == {"t0": N // 4}
    run.ckpt.close()


def test_rows_that_training_changes_are_not_reported(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for row in range(30):
            train(run, row)
            assert run.ckpt.scrub() == {}
            if row % 3 == 0:
                run.save("partial" if row % 2 else "base")
    assert run.ckpt.metrics.scrub_passes == 30


def test_state_that_the_optimizer_makes_later_is_no_change(tmp_path):
    run = Watched(tmp_path / "store", *make(1, torch.optim.SparseAdam))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for row in range(4):
            train(run, row)
            assert run.ckpt.scrub() == {}
    run.ckpt.close()


def test_weight_decay_that_the_loop_switches_on_and_off_is_no_change_past_pytorch(tmp_path):
    model, optimizer = make(1, torch.optim.SGD)
    run = Watched(tmp_path / "store", model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            optimizer.param_groups[0]["weight_decay"] = 0.1 * (step % 2)
            model["t0"].sparse = not step % 2  # decay needs dense gradients
            train(run, step)
            run.ckpt.scrub()
            run.save()
    run.ckpt.close()


def test_it_waits_for_the_end_of_a_step(run):
    backward_of(run.model["t0"], 3)
    run.optimizers[0].step()
    with pytest.raises(UsageError, match=r"scrub\(\) in the middle of step"):
        run.ckpt.scrub()


def test_a_pass_that_leaves_a_table_out_proves_nothing(tmp_path):
    torch.manual_seed(0)
    model = nn.ModuleDict({f"t{i}": nn.Embedding(N, 8, sparse=False) for i in range(2)})
    optimizers = [
        torch.optim.SGD(model["t0"].parameters(), lr=0.1),
        torch.optim.SGD(model["t1"].parameters(), lr=0.1, momentum=0.9),  # moves every row
    ]
    run = Watched(tmp_path / "store", model, optimizers)
    for optimizer in optimizers:
        optimizer.zero_grad()
    sum(module(torch.tensor([3])).sum() for module in model.values()).backward()
    for optimizer in optimizers:
        optimizer.step()
    run.ckpt.step()
    saved = run.ckpt.save("base")
    run.ckpt.wait()
    read_back(run.ckpt)
    assert saved.is_proven  # all of it was copied at one moment
    snapshot = saved._snapshot
    snapshot.is_scrubbed = False  # as if its rows had been captured over several steps
    run.ckpt._saver.claims._proofs._waiting.append(snapshot)
    assert run.ckpt.scrub() == {}
    assert not saved.is_proven
    assert run.ckpt.metrics.scrub_passes == 1
    run.ckpt.close()


def test_rows_that_a_device_could_not_hash_after_a_recovery_prove_nothing(tmp_path, monkeypatch):
    """Their first comparison records them: a row that changed before would count as saved."""
    run = Watched(tmp_path / "store", *make())
    train(run)
    run.save("base")
    die(run.ckpt)

    def fail(scrub, begin, end, **_):
        raise CudaError("out of memory")

    monkeypatch.setattr(TableScrub, "record_restored", fail)
    model, optimizer = make()
    again = cpr_ext.Checkpointer(
        model, optimizer, tmp_path / "store", priority=cpr_ext.AllRows(), **NEVER
    )
    again.recover()
    monkeypatch.undo()
    write_past_pytorch(run=SimpleNamespace(model=model), table="t0", row=77)
    optimizer.zero_grad()
    model["t0"](torch.tensor([3])).sum().backward()
    optimizer.step()
    again.step()
    saved = again.save("partial")
    again.wait()
    read_back(again)
    assert again.scrub() == {}  # nothing is known to compare with
    assert not saved.is_proven
    assert not again._saver.claims.scrub.are_unchanged(again.tables[0], [(0, N)])
    again.close()
