"""A whole job, exported as the unsharded model: without processes, any cut, any steps."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import cpr_ext
from cpr_ext.errors import StoreError
from cpr_ext.storage.job_stores import worker_directory
from cpr_ext.wings.tools.maintenance import export
from python_tests.helpers import assert_same
from python_tests.recovery.test_resharding import OPTIMIZERS, cuts, saved, whole
from python_tests.wings.tools.maintenance.jobs import (
    ROWS,
    WorkerAlone,
    gathered,
    make_job,
    parts_of,
)


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_any_cut_over_any_stores_is_exported_bit_for_bit(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("cuts")
    optimizer = data.draw(st.sampled_from(sorted(OPTIMIZERS)))
    cut = data.draw(cuts())
    holders, stores = saved(directory, cut, optimizer, num_shards=data.draw(st.integers(1, 3)))
    report = export(stores, directory / "out")
    model = load_file(directory / "out" / "model.safetensors")
    rows = load_file(directory / "out" / "optimizer_rows.safetensors")
    (key,) = model.keys() - {"dense"}
    assert torch.equal(model[key], whole(holders, "weight"))
    assert torch.equal(model["dense"], holders[2].dense)
    assert [store.step for store in report.stores] == [1, 2, 3]
    assert (report.step, report.step_of_rows, report.dense_from) == (3, None, "2")
    columns = sorted({part.columns for parts in cut for part in parts})
    live = [table for holder in holders for table in holder.tables]
    expected = {}
    for name in set(live[0].array_names()) - {"weight"}:
        if live[0].arrays()[name].dim() == 2:
            expected[f"{key}.{name}"] = whole(holders, name)
        elif len(columns) == 1:
            expected[f"{key}.{name}"] = whole(holders, name)[:, 0].contiguous()
        else:
            for begin, end in columns:
                expected[f"{key}.{name}[{begin}:{end}]"] = whole(holders, name)[
                    :, begin
                ].contiguous()
    assert_same(rows, expected)


def test_full_takes_the_newest_step_that_all_have(tmp_path):
    at_two, workers = [], []
    for rank, part in enumerate(parts_of(2)):
        worker = WorkerAlone(worker_directory(tmp_path / "job", rank, 2), part, seed=rank)
        worker.train(2)
        worker.save()
        at_two.append(worker.model.items.weight.detach().clone())
        worker.train(1 + rank)
        worker.save()
        worker.checkpointer.close()
        workers.append(worker)
    assert export(tmp_path / "job", tmp_path / "newest").step_of_rows is None
    report = export(tmp_path / "job", tmp_path / "full", full=True)
    assert (report.step, report.step_of_rows) == (2, 2)
    model = load_file(tmp_path / "full" / "model.safetensors")
    assert torch.equal(model["items.weight"], torch.cat(at_two))
    shutil.rmtree(tmp_path / "job" / "worker-00001-of-00002")
    other = make_job(tmp_path / "other", steps=(7, 7))
    shutil.move(tmp_path / "other" / "worker-00001-of-00002", tmp_path / "job")
    assert other[0].checkpointer.step_count == 7
    with pytest.raises(StoreError, match="no step at which every one of them"):
        export(tmp_path / "job", tmp_path / "none", full=True)


def test_rows_of_stores_that_do_not_say_which_are_joined_only_when_told_to(tmp_path):
    workers = make_job(tmp_path / "job", says_part=False)
    with pytest.raises(StoreError, match=r"'items' is in 3 stores.*--rows-in-order"):
        export(tmp_path / "job", tmp_path / "out")
    export(tmp_path / "job", tmp_path / "out", rows_in_order=True)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), gathered(workers)[0])


def test_a_state_that_a_worker_lacks_and_replicas_that_differ_are_told(tmp_path):
    for rank, part in enumerate(parts_of(2)):
        worker = WorkerAlone(worker_directory(tmp_path / "job", rank, 2), part, seed=rank)
        if rank == 1:
            worker.checkpointer.tables[0].keep_row_states([])
        with torch.no_grad():
            worker.model.linear.bias[0] += rank
        worker.save()
        worker.checkpointer.close()
    notes = export(tmp_path / "job", tmp_path / "out").notes
    assert "'items/sum' is not in the store of worker 1: zero there" in notes
    told = "workers 0 and 1 hold other values of 'linear.bias' at step 0"
    assert len(notes) == 2
    assert any(told in note for note in notes)
    rows = load_file(tmp_path / "out" / "optimizer_rows.safetensors")
    assert not rows["items.weight.sum"][ROWS // 2 :].any()


WRAPPED = {
    "data parallel": (nn.DataParallel, ("module.",)),
    "compiled": (lambda model: torch.compile(model, backend="eager"), ("_orig_mod.",)),
    "inside": (lambda m: nn.Sequential(m[0], nn.DataParallel(m[1])), ("module.",)),
    "plain": (lambda model: model, ()),
}


@pytest.mark.parametrize("wrapper", sorted(WRAPPED))
def test_names_are_those_of_the_model_without_wrappers(tmp_path, wrapper):
    from python_tests.state.test_wrapper_names import make

    wrap, removed = WRAPPED[wrapper]
    model = wrap(make(1)[:2])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with cpr_ext.Checkpointer(model, optimizer, tmp_path / "store") as checkpointer:
        checkpointer.save("base").wait_until_done()
    report = export(tmp_path / "store", tmp_path / "out")
    assert report.removed == removed
    plain = make(2)[:2]  # it has a module of its own that is called module
    plain.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=True)
    assert_same(list(plain.state_dict().values()), list(model.state_dict().values()))
    assert list(load_file(tmp_path / "out" / "optimizer_rows.safetensors")) == ["0.weight.sum"]
    export(tmp_path / "store", tmp_path / "kept", keep_names=True)
    kept = load_file(tmp_path / "kept" / "model.safetensors")
    assert kept.keys() == model.state_dict().keys()
