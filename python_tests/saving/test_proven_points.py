"""What a store, a report and the tools say of a full-recovery point that is proven."""

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import cpr_ext
from cpr_ext.cli.app import app
from cpr_ext.errors import UntrackedChangeWarning
from cpr_ext.storage.manifest import Manifest
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.tools.maintenance.inspection import inspect
from python_tests.helpers import die, flip
from python_tests.tracking.watched import NEVER, Watched

N = 2000


def make():
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Embedding(N, 8, sparse=True), "head": nn.Linear(8, 1)})
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1)


def train(run, row=3):
    run.optimizers[0].zero_grad()
    run.model["head"](run.model["a"](torch.tensor([row]))).sum().backward()
    run.optimizers[0].step()
    run.ckpt.step()


def proven_on_disk(run):
    run.ckpt._saver._parts.committer.call(lambda: None).result()
    return [record.is_proven for record in StoreReader(run.directory).dense.segments]


@pytest.fixture
def run(tmp_path):
    """A run whose newest snapshot is partial, complete, and not proven yet."""
    run = Watched(tmp_path / "store", *make())
    train(run)
    run.save()
    yield run
    run.ckpt.close()


def recovered(run, **options):
    die(run.ckpt)
    run.ckpt._watch.detach()
    with cpr_ext.Checkpointer(*make(), run.directory, **NEVER, **options) as fresh:
        fresh._saving._save_at_close = False
        return fresh.recover()


def test_a_point_is_proven_on_disk_once_a_pass_has_ended(run):
    assert proven_on_disk(run) == [False]
    assert run.ckpt.metrics.proven_step < 2  # the first base may have been read back
    assert run.ckpt.scrub() == {}
    assert proven_on_disk(run) == [True]
    assert run.ckpt.metrics.proven_step == run.newest().last_step == 2
    report = recovered(run)
    assert (report.step, report.is_proven) == (2, True)


def test_a_newer_point_is_not_proven_by_an_older_one(run):
    assert run.ckpt.scrub() == {}
    train(run)
    run.save()
    assert proven_on_disk(run) == [False]
    assert not recovered(run).is_proven


def test_training_alone_proves_a_point_in_time(run):
    scrub = run.ckpt._saver.claims.scrub
    scrub.restart()
    run.ckpt._saver.claims._proofs.begin_pass()
    passes = run.ckpt.metrics.scrub_passes
    while run.ckpt.metrics.scrub_passes == passes:
        scrub._next_slice = 0.0
        run.ckpt.step()
    run.ckpt._saver._parts.committer.call(run.ckpt._saver.claims.round_trips.finish).result()
    run.ckpt.step()
    assert proven_on_disk(run) == [True]


def test_a_difference_leaves_it_unproven(run):
    run.model["a"].weight.data[77] += 1
    with pytest.warns(UntrackedChangeWarning, match="row 77"):
        run.ckpt.scrub()
    assert proven_on_disk(run) == [False]
    assert not run.newest().is_complete
    assert not recovered(run).is_proven


def test_a_base_that_follows_does_not_hide_a_change_that_it_saves(run):
    """It records hashes anew, of rows that were another in the point before, which lacks them."""
    run.model["a"].weight.data[77] += 1
    train(run)
    lacking = run.ckpt.save("partial")
    run.ckpt.wait()
    saver = run.ckpt._saver
    saver._parts.committer.call(saver.claims.round_trips.finish).result()
    train(run)
    base = run.ckpt.save("base")
    run.ckpt.wait()
    assert run.ckpt.scrub() == {}  # row 77 is as the base has it
    assert not lacking.is_proven
    assert base.is_proven


def test_a_change_that_is_found_while_a_base_is_captured_revokes_the_points_before(tmp_path):
    run = Watched(tmp_path / "store", *make(), overlap="always")
    train(run)
    before = run.ckpt.save("partial")
    run.ckpt.wait()
    proofs = run.ckpt._saver.claims._proofs
    proofs.begin_base()
    run.model["a"].weight.data[77] += 1
    with pytest.warns(UntrackedChangeWarning, match="row 77"):
        run.ckpt.scrub()
    assert not before.is_complete
    run.ckpt.close()


def test_a_recovery_past_damage_is_not_proven(run):
    assert run.ckpt.scrub() == {}
    (path,) = (run.directory / "shard-00000").glob("*partial*")
    flip(path, path.stat().st_size - 100)
    report = recovered(run)
    assert report.damaged_segments
    assert not report.is_proven


def test_another_store_that_is_proven_is_taken_as_such(run, tmp_path):
    run.ckpt.scrub()
    die(run.ckpt)
    run.ckpt._watch.detach()
    with cpr_ext.Checkpointer(*make(), tmp_path / "new", num_shards=3, **NEVER) as fresh:
        assert fresh.recover(from_store=run.directory).is_proven


def test_inspect_names_it(run):
    assert not inspect(run.directory).points[-1].is_proven
    run.ckpt.scrub()
    assert proven_on_disk(run) == [True]
    assert inspect(run.directory).points[-1].is_proven
    shown = CliRunner().invoke(app, ["inspect", str(run.directory)]).output
    assert "proven full-recovery point" in shown


def test_a_flag_of_another_type_is_damage(run):
    record = run.newest()
    with pytest.raises(ValueError, match="another type"):
        type(record)(**{**vars(record), "is_proven": 1})
    assert Manifest(run.directory / "dense").segments == run.ckpt.store.dense.segments
