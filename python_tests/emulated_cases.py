"""What only a GPU does: run by python_tests/test_emulated_gpu.py on the emulated device."""

import gc
import itertools

import pytest
import torch

import cpr_ext
from cpr_ext import _emulated
from cpr_ext.checkpointer import parts, session
from cpr_ext.errors import CudaError, RowIndexError, UntrackedChangeWarning, UsageError
from cpr_ext.runtime import cuda
from cpr_ext.saving import background_capture, claims, priorities, saved_hashes, snapshot
from cpr_ext.storage import segment_format
from cpr_ext.tracking import gradient_rows, lookup_recorder
from python_tests.helpers import Kernel, assert_same, open_checkpointer, row_records

emulator = _emulated.emulator


@pytest.fixture(autouse=True)
def calm(monkeypatch):
    # A kernel takes the time of the thread that launches it: no check follows another so soon.
    monkeypatch.setattr(claims, "_SHORT_SECONDS", 60.0)
    yield
    emulator.fail_call("", 0)
    emulator.set_lazy(False)
    emulator.set_free_part(1.0)


class Run:
    """A table of 4000 rows in training."""

    def __init__(self, directory, *, optimizer=torch.optim.SGD, kernel=None, **options):
        self.model = torch.nn.EmbeddingBag(4000, 16, mode="sum", sparse=True)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        if kernel is not None:
            weight = self.model.weight
            self.table = cpr_ext.Table("embedding", weight, self.optimizer, lookups=kernel)
            options["tables"] = [self.table]
        # PyTorch gives a GPU's memory away only behind what its stream still does; not the CPU's.
        self.lookups: list[torch.Tensor] = []
        self.checkpointer = open_checkpointer(
            self.model,
            self.optimizer,
            directory,
            **{"schedule": cpr_ext.EverySteps(3), "save_at_close": False, **options},
        )

    def step(self, row_ids=range(100)):
        self.optimizer.zero_grad()
        self.lookups.append(torch.tensor(list(row_ids)).reshape(1, -1))
        self.model(self.lookups[-1]).sum().backward()
        self.optimizer.step()
        return self.checkpointer.step()

    def save_base(self):
        self.step()
        self.checkpointer.wait()
        assert self.checkpointer.metrics.base_snapshots == 1


def test_training_goes_on_while_the_device_chooses_rows(tmp_path, monkeypatch):
    # On the emulated device each question whether work is done does a piece of it.
    monkeypatch.setattr(cuda._HeldTensors, "release", lambda self, **options: None)
    run = Run(tmp_path / "s")
    run.save_base()
    emulator.set_lazy(True)
    while run.step() is None:
        pass
    snapshot = run.checkpointer._saver.in_flight
    assert snapshot.kind == "partial"
    assert not snapshot.rows.are_chosen
    emulator.calls()
    run.step()
    calls = emulator.calls()
    assert not snapshot.rows.are_chosen
    assert "cudaEventSynchronize" not in calls, "step() waited for the device"
    emulator.set_lazy(False)  # it catches up
    run.step()
    run.step()
    assert snapshot.rows.are_chosen
    run.checkpointer.wait()
    assert snapshot.state == "committed"
    run.checkpointer.close()


def test_save_waits_for_the_device_takes_this_step_and_a_bad_lookup_is_told_at_the_next(tmp_path):
    kernel = Kernel()
    run = Run(tmp_path / "s", schedule=cpr_ext.EverySteps(1000), kernel=kernel)
    run.save_base()
    run.step([5, 6, 7])
    expected = run.model.weight.detach().clone()
    assert run.checkpointer.save("partial").step == 2
    kernel.changes(run.table, torch.tensor([3, 4000]))
    run.step()
    with pytest.raises(RowIndexError, match="index 4000 at position 1 of an earlier lookup"):
        run.step()
    run.step(range(50, 80))
    assert run.checkpointer.recover(shards=[0]).row_updates_lost == 1 + 2 * 100 + 30
    run.checkpointer.close()
    other = Run(tmp_path / "s")
    other.checkpointer.recover()
    assert torch.equal(other.model.weight, expected)
    other.checkpointer.close()


@pytest.mark.parametrize(
    "call", ["cudaMallocFromPoolAsync", "cudaLaunchKernelEx", "cudaMemcpyAsync"]
)
@pytest.mark.parametrize("nth", [1, 2, 4, 8, 12])
def test_a_device_that_fails_during_a_snapshot_costs_that_snapshot_only(tmp_path, call, nth):
    run = Run(tmp_path / "s", schedule=cpr_ext.EverySteps(1000))
    run.save_base()
    run.step()
    emulator.fail_call(call, nth, 1)
    snapshot = run.checkpointer.save("partial")
    emulator.fail_call("", 0)
    snapshot.wait_until_done()
    if snapshot.error is not None:
        assert isinstance(snapshot.error, CudaError)
        with pytest.warns(UserWarning, match="training continues"):
            run.step()
    saved = run.checkpointer.save("partial")
    expected = run.model.weight.detach().clone()
    run.checkpointer.wait()
    assert saved.state == "committed"
    metrics = run.checkpointer.metrics
    assert len(metrics.failures) <= 1
    run.checkpointer.close()
    other = Run(tmp_path / "s")
    other.checkpointer.recover()
    assert torch.equal(other.model.weight, expected), "rows of the failed snapshot were forgotten"
    other.checkpointer.close()


def test_memory_of_a_snapshot_serves_the_next_and_is_given_back_in_the_end(tmp_path):
    cuda.trim_memory([0])
    before = emulator.pooled_bytes()
    run = Run(tmp_path / "s", schedule=cpr_ext.EverySteps(1000))
    run.save_base()
    gc.collect()  # what earlier tests have left
    mapped, sizes, kept = [], [], []
    for number in range(8):
        run.step()
        kept.append(run.checkpointer.save("base" if number > 5 else "partial"))
        run.checkpointer.wait()
        mapped.append(emulator.mappings())
        sizes.append(sum(emulator.allocations().values()))
    assert mapped[2:6] == [0] * 4
    assert len(set(sizes[2:])) == 1, "what was taken is not freed, or is kept by who has a snapshot"
    assert emulator.pooled_bytes() > before
    emulator.set_free_part(0.01)
    run.step()
    run.checkpointer.save("partial")
    assert emulator.pooled_bytes() > before
    run.checkpointer.wait()
    assert emulator.pooled_bytes() == before  # at its end if the device has little
    emulator.set_free_part(1.0)
    run.step()
    run.checkpointer.save("partial")
    run.checkpointer.close()
    assert emulator.pooled_bytes() == before


def test_torchs_cache_is_emptied_before_memory_counts_as_short(tmp_path, monkeypatch):
    run = Run(tmp_path / "s", schedule=cpr_ext.EverySteps(1000))
    run.save_base()
    run.step()
    emptied = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    emulator.fail_call("cudaMallocFromPoolAsync", 1)
    run.checkpointer.save("partial")
    run.checkpointer.wait()
    assert emptied == [True]
    run.checkpointer.close()


MIXED = cpr_ext.StoreOptions(
    precision=cpr_ext.Precision("float32", partial="int8", state="float16")
)
ROUNDED = cpr_ext.StoreOptions(precision=cpr_ext.Precision(base="float16", partial="int8"))
RUNS = {
    "MFU": {"priority": cpr_ext.MostFrequentlyUsed(0.1)},
    "SSU": {"priority": cpr_ext.SubSampledUsed(0.1, period=3)},
    "SCAR": {"priority": cpr_ext.LargestChange(0.1), "store": MIXED},
    "all": {"priority": cpr_ext.AllRows(), "store": ROUNDED},
    "all, over several steps": {
        "priority": cpr_ext.AllRows(),
        "store": MIXED,
        "staging": cpr_ext.StagingOptions(gather_bytes=0),
    },
}


def train_anew(directory, patch, **options):
    """Bytes of the rows of every snapshot of a run of its own, and which trackers it had."""
    ids = map("{:032x}".format, itertools.count(1))  # they are in the headers
    patch.setattr(snapshot, "new_id", ids.__next__)
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    run = Run(directory, optimizer=torch.optim.Adagrad, **options)
    kinds = {type(tracker).__name__ for tracker in run.checkpointer._trackers.values()}
    run.model.weight.data[17, 3] = 1e38  # a row that breaks every bound
    for _ in range(20):
        # More rows than the budget allows, no more than SSU's sample holds.
        run.step(torch.randint(900, (300,), generator=random).tolist())
        run.checkpointer.wait()
    run.checkpointer.close()
    return {path.name: path.read_bytes() for _, path in row_records(run.checkpointer.store)}, kinds


def recovered(directory):
    run = Run(directory, optimizer=torch.optim.Adagrad)
    report = run.checkpointer.recover()
    run.checkpointer.close()
    state = run.optimizer.state[run.model.weight]["sum"]
    return [run.model.weight.detach(), state, report.rows_restored, report.rows_rounded]


def move_to_host(patch):
    """Tables are on the CPU from now on, in the same process."""
    users = (parts, priorities, background_capture, saved_hashes, lookup_recorder, gradient_rows)
    for module in (cuda, *users):
        patch.setattr(module, "device_of", lambda tensor: None)
    patch.setattr(segment_format, "stager_of", lambda tensor: None)


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_snapshots_are_those_of_the_cpu_byte_for_byte_and_each_restores_the_other(
    tmp_path, options, monkeypatch
):
    of_device, kinds = train_anew(tmp_path / "device", monkeypatch, **options)
    assert all(kind.startswith("Device") for kind in kinds)
    rows = [recovered(tmp_path / "device")]
    with monkeypatch.context() as patch:
        move_to_host(patch)
        of_host, kinds = train_anew(tmp_path / "host", patch, **options)
        assert not any(kind.startswith("Device") for kind in kinds)
        rows += [recovered(tmp_path / "host"), recovered(tmp_path / "device")]
    rows.append(recovered(tmp_path / "host"))
    assert len([name for name in of_host if "partial" in name]) >= 5
    assert of_device.keys() == of_host.keys()
    for name, data in of_host.items():
        assert of_device[name] == data, name
    for each in rows[1:]:
        assert_same(each, rows[0])
    assert (rows[0][3] > 300) == ("store" in options)


@pytest.fixture
def capture(monkeypatch):
    """Begins and ends the capture of a CUDA graph; garbage first, as ``torch.cuda.graph`` does."""

    def set_capturing(capturing):
        if capturing:
            gc.collect()
            emulator.calls()  # those that freed the garbage do not count
        for module in (cuda, session, lookup_recorder, gradient_rows):
            monkeypatch.setattr(module, "is_capturing", lambda: capturing)
        assert emulator.set_capturing(capturing), "a call has broken the capture"

    gc.disable()
    yield set_capturing
    gc.enable()
    emulator.set_capturing(False)


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_step_that_is_captured_counts_rows_by_the_graph(tmp_path, capture, is_lazy):
    """Also while the device is still at steps before."""
    run = Run(tmp_path / "s", schedule=cpr_ext.EverySteps(1000))
    run.save_base()
    tracker = next(iter(run.checkpointer._trackers.values()))
    emulator.set_lazy(is_lazy)
    run.step([0])
    assert (emulator.num_waiting() > 0) == is_lazy
    emulator.calls()
    capture(True)
    run.optimizer.zero_grad()
    run.lookups.append(torch.tensor([[1, 2, 2]]))
    run.model(run.lookups[-1]).sum().backward()
    run.optimizer.step()
    assert emulator.calls() == {"cudaLaunchKernelEx": 1}
    for call in (run.checkpointer.step, run.checkpointer.wait, run.checkpointer.close):
        with pytest.raises(UsageError, match="while a CUDA graph is captured"):
            call()
    capture(False)
    assert tracker.num_dirty() == 1
    emulator.replay_graph()
    run.step([7])
    assert tracker.dirty_rows().tolist() == [0, 1, 2, 7]
    emulator.set_lazy(False)
    run.checkpointer.save("partial")
    run.checkpointer.wait()
    assert run.checkpointer.store.manifest.dense[-1].is_complete
    run.checkpointer.close()


def test_rows_of_dense_gradients_are_not_listed_in_a_capture_and_found_by_comparison(
    tmp_path, capture, monkeypatch
):
    run = Run(tmp_path / "s", schedule=cpr_ext.EverySteps(1000))
    run.model.sparse = False
    run.save_base()
    capture(True)
    run.optimizer.zero_grad()
    run.model(torch.tensor([[1, 2]])).sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(gradient_rows, "changed_rows", None)  # which waits for the device
        with pytest.warns(UntrackedChangeWarning, match="dense"):
            run.optimizer.step()
    capture(False)
    assert next(iter(run.checkpointer._trackers.values())).num_dirty() == 0
    run.checkpointer.step()
    run.model.weight.data[1] += 1  # what a replay does

    def save_and_wait():
        run.checkpointer.save("partial")
        run.checkpointer.wait()

    with pytest.warns(UntrackedChangeWarning, match="row 1 counts as unchanged"):
        save_and_wait()
    run.checkpointer.close()


def test_lookups_of_a_kernel_count_by_the_graph_or_on_the_stream_that_is_current(
    tmp_path, capture, monkeypatch
):
    kernel = Kernel()
    run = Run(tmp_path / "s", schedule=cpr_ext.EverySteps(1000), kernel=kernel)
    run.save_base()
    tracker = run.checkpointer._trackers[run.table.name]
    kernel.changes(run.table, torch.tensor([5]))
    emulator.calls()
    lookups = torch.tensor([8, 9])  # its memory is the graph's
    capture(True)
    kernel.changes(run.table, lookups)
    capture(False)
    assert emulator.calls() == {"cudaLaunchKernelEx": 1}
    emulator.replay_graph()
    assert tracker.dirty_rows().tolist() == [8, 9]
    run.checkpointer.step()
    assert tracker.dirty_rows().tolist() == [5, 8, 9]
    asked = []
    monkeypatch.setattr(cuda, "_current_stream", lambda device: asked.append(device) or 0)
    monkeypatch.setattr(lookup_recorder, "_MAX_PENDING_LOOKUPS", 2)
    kernel.changes(run.table, torch.tensor([5, 6]))
    assert asked == []
    kernel.changes(run.table, torch.tensor([7]))
    assert asked == [0]
    assert tracker.dirty_rows().tolist() == [5, 6, 7, 8, 9]
    run.checkpointer.close()


PRECISIONS = {
    "exact": cpr_ext.Precision(),
    "rounded": cpr_ext.Precision(base="float16", partial="int8", state="float16"),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_points_of_tables_on_a_device_are_complete(tmp_path, precision):
    options = {
        "store": cpr_ext.StoreOptions(precision=PRECISIONS[precision]),
        "priority": cpr_ext.AllRows(),
    }
    for is_first in (True, False):
        run = Run(tmp_path, **options)
        if not is_first:
            assert run.checkpointer.recover().is_complete
        for first_row in range(0, 2000, 150):
            run.step(range(first_row, first_row + 100))
        saved = run.checkpointer.save()
        run.checkpointer.wait()
        assert saved.is_complete
        assert run.checkpointer.check() == {}
        run.checkpointer.close()


def test_a_write_past_pytorch_before_a_point_is_found_on_the_device_at_a_later_step(tmp_path):
    run = Run(tmp_path, schedule=cpr_ext.EverySteps(1000), priority=cpr_ext.AllRows())
    run.save_base()
    run.step(range(10))
    run.model.weight.data[3333, 5] += 1e-3
    emulator.set_lazy(True)
    false = run.checkpointer.save("partial")

    def step_until_it_is_found():
        while not run.checkpointer.metrics.rows_changed_unseen:
            run.checkpointer.step()

    with pytest.warns(UntrackedChangeWarning, match="row 3333 counts as unchanged"):
        step_until_it_is_found()
    true = run.checkpointer.save("partial")  # all of the table counts as changed
    run.checkpointer.wait()
    assert (false.is_complete, true.is_complete) == (False, True)
    run.checkpointer.close()


def test_rows_of_unchanged_shards_are_compared_before_they_are_kept(tmp_path):
    run = Run(tmp_path, num_shards=4)
    run.save_base()
    table = run.checkpointer.tables[0]
    saver = run.checkpointer._saver
    assert saver.claims.hashes.are_unchanged(table, [(200, 1000), (2000, 4000)])
    run.model.weight.data[2500, 0] += 1
    assert not saver.claims.hashes.are_unchanged(table, [(2000, 3000)])
    run.checkpointer.close()
