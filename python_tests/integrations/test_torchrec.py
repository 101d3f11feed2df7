"""A TorchRec model on one rank: what is found, counted, saved, brought back and refused."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from python_tests.helpers import run_python

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, OptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from cpr_ext import AllRows, EverySteps, Retention, StoreOptions
from cpr_ext._native import native
from cpr_ext.errors import StoreError, UsageError
from cpr_ext.integrations.torchrec import make_checkpointer
from cpr_ext.integrations.torchrec.lookups import KernelLookups
from cpr_ext.integrations.torchrec.row_cache import RowCache
from cpr_ext.integrations.torchrec.sharded_tables import find_kernels, sharded_tables
from cpr_ext.runtime import cuda
from cpr_ext.saving import background_capture
from cpr_ext.saving.background_capture import CaptureThread
from cpr_ext.state.table import Table
from python_tests.integrations.sharded_models import (
    ALONE,
    NAMES,
    PooledDlrm,
    SmallDlrm,
    dense_of,
    held,
    kernels_of,
    make_batch,
    opened,
    require_resumes,
    same_tables,
    sharded,
    train,
)

pytestmark = ALONE


def test_a_table_without_a_row_on_this_rank_is_passed_over():
    """TorchRec makes one where ranks outnumber rows; FBGEMM cannot train it on a CPU."""
    parallel, _ = sharded("row_wise")
    for module in (parallel.module.bags, parallel.module.sequences):
        for lookup in module._lookups:
            lookup._emb_modules[0].config.embedding_tables[0].local_rows = 0
    found = {table.part.table for table in sharded_tables(find_kernels(parallel))}
    assert found == set(NAMES.values()) - {NAMES["a"], NAMES["s"]}


def test_only_passes_that_can_change_rows_are_counted(tmp_path):
    parallel, optimizer = sharded("row_wise")
    inputs, looked_up = make_batch(step=7)
    num_lookups = sum(len(ids) for ids in looked_up.values())
    with opened(parallel, optimizer, tmp_path) as checkpointer:

        def counted(run):
            before = checkpointer.metrics.row_updates
            run()
            checkpointer.step()
            return checkpointer.metrics.row_updates - before

        assert counted(lambda: parallel(*inputs)) == 0
        with torch.no_grad():
            assert counted(lambda: parallel(*inputs)) == 0
        assert counted(lambda: parallel(*inputs).backward()) == num_lookups
        parallel.eval()  # a backward pass changes rows in eval mode too
        before = held(checkpointer)
        assert counted(lambda: parallel(*inputs).backward()) == num_lookups
        assert not same_tables(before, held(checkpointer))
    assert not any(kernel._forward_hooks for kernel in kernels_of(parallel))


def capture_late(monkeypatch):
    """Have the capture thread's work done at the last moment: when it is told to stop."""
    monkeypatch.setattr(background_capture, "OVERLAP_BYTES", 0)
    work = []
    monkeypatch.setattr(CaptureThread, "resume", lambda self, given: work.append(given))

    def pause(self):
        while work:
            work.pop()(native.StopFlag())

    monkeypatch.setattr(CaptureThread, "pause", pause)


def test_rows_are_captured_while_training_reads_them_until_the_backward_pass(tmp_path, monkeypatch):
    capture_late(monkeypatch)
    options = {
        "schedule": EverySteps(2, when_busy="wait"),
        "priority": AllRows(),
        "store": StoreOptions(retention=Retention(full_recovery_points=99)),
    }
    parallel, optimizer = sharded("row_wise")
    states = {}
    with make_checkpointer(parallel, optimizer, tmp_path, **options) as checkpointer:
        for step in range(1, 13):
            train(parallel, optimizer, checkpointer, 1)
            states[step] = held(checkpointer)
        checkpointer.wait()
        points = [each.last_step for each in checkpointer.store.manifest.dense if each.is_complete]
    assert len(points) > 2
    for point in reversed(points):
        parallel, optimizer = sharded("row_wise", seed=1)
        with make_checkpointer(parallel, optimizer, tmp_path, **options) as checkpointer:
            assert checkpointer.recover(at_step=point).step == point
            assert same_tables(held(checkpointer), states[point])


@given(data=st.data())
@settings(max_examples=20)
def test_indices_of_an_operator_are_told_apart_by_table(data):
    """Several features of one table and batches of variable size included."""
    feature_tables = sorted([0, 1, 2, *data.draw(st.lists(st.integers(0, 2), max_size=2))])
    variable = data.draw(st.booleans())
    sizes = st.lists(st.integers(1, 3), min_size=2, max_size=2)
    per_rank = [data.draw(sizes) for _ in feature_tables]
    if not variable:
        per_rank = [per_rank[0]] * len(feature_tables)
    bags = [
        [data.draw(st.lists(st.integers(0, 9), max_size=3)) for _ in range(sum(of_ranks))]
        for of_ranks in per_rank
    ]
    operator = SplitTableBatchedEmbeddingBagsCodegen(
        [(10, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)] * 3,
        feature_table_map=feature_tables,
        optimizer=EmbOptimType.EXACT_SGD,
    )
    weights = operator.split_embedding_weights()
    lookups = KernelLookups(operator, RowCache(operator))
    lookups.tables.update({i: Table(f"t{i}", weights[i]) for i in (0, 2)})  # t1 is not here
    noted = {"t0": [], "t2": []}
    (handle,) = lookups.watch_lookups(lambda table, rows: noted[table.name].extend(rows.tolist()))
    lengths = torch.tensor([0] + [len(bag) for feature in bags for bag in feature])
    operator(
        torch.tensor([row for feature in bags for bag in feature for row in bag]).long(),
        lengths.cumsum(0),
        **({"batch_size_per_feature_per_rank": per_rank} if variable else {}),
    )
    handle.remove()
    for number in (0, 2):
        expected = [
            row
            for feature, table in zip(bags, feature_tables, strict=True)
            for bag in feature
            for row in bag
            if table == number
        ]
        assert noted[f"t{number}"] == expected


class Offsets(torch.Tensor):
    """Says when the host waits for its values, and when it has begun to copy them."""

    told = None

    def tolist(self):
        self.told.append("wait for all")
        return self.as_subclass(torch.Tensor).tolist()

    def to(self, device, *, non_blocking):
        self.told.append(f"copy, {device}, {non_blocking}")
        return self.as_subclass(torch.Tensor)


def test_a_lookup_on_a_gpu_waits_for_nothing_and_its_update_for_the_offsets_alone(monkeypatch):
    told = Offsets.told = []
    mark = SimpleNamespace(wait=lambda: told.append("wait for the mark"))
    monkeypatch.setattr(cuda, "device_of", lambda tensor: 0)
    monkeypatch.setattr(cuda, "use_training_streams", lambda devices: None)
    fake = SimpleNamespace(StreamMark=lambda device: told.append("mark") or mark)
    monkeypatch.setattr(cuda, "native", fake)
    operator = SimpleNamespace(feature_table_map=[0, 1])
    source = KernelLookups(operator, RowCache(operator))
    source.tables[1] = Table("t", torch.nn.Parameter(torch.zeros(10, 4)))
    offsets = torch.tensor([0, 2, 3, 3, 5]).as_subclass(Offsets)
    found = source._lookups_of((torch.arange(5), offsets), {})
    assert told == ["copy, cpu, True", "mark"]
    [(table, indices)] = found()
    assert told[2:] == ["wait for the mark"]
    assert (table.name, indices.tolist()) == ("t", [3, 4])


class Decaying(OptimizerWrapper):
    """A wrapper of a user's own: counts its steps, and has a running mean."""

    def __init__(self, optimizer, decay=0.5):
        super().__init__(optimizer)
        self.decay, self.steps, self.mean = decay, 0, torch.zeros(2)

    def step(self, closure=None):
        self.steps += 1
        self.mean = self.decay * self.mean + self.steps
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + float(self.mean[0]))
        super().step(closure)


STAGES = (
    WarmupStage(WarmupPolicy.LINEAR, max_iters=3, value=0.1),
    WarmupStage(WarmupPolicy.POLY, max_iters=9, value=2.0, decay_iters=20),
)
# How the optimizers of the sharded and of the dense part are wrapped.
WRAPPED = {
    "warm-up of all": lambda fused, dense: WarmupOptimizer(
        CombinedOptimizer([fused, dense]), list(STAGES), lr=0.2
    ),
    "clipped by value, warmed up": lambda fused, dense: CombinedOptimizer(
        [
            fused,
            WarmupOptimizer(
                GradientClippingOptimizer(dense, GradientClipping.VALUE, max_gradient=0.01),
                list(STAGES),
                lr=0.2,
            ),
        ]
    ),
    "by a class of the user's": lambda fused, dense: Decaying(CombinedOptimizer([fused, dense])),
}


def wrapped(kind, seed):
    parallel, combined = sharded("mixed", "rowwise_adagrad", seed=seed)
    return parallel, WRAPPED[kind](*(inner for _, inner in combined.optimizers))


class CountingDlrm(PooledDlrm):
    """Scales by how often it was called."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, pooled, sequences):
        self.calls += 1
        return super().forward(pooled, sequences) * (1 + 0.01 * self.calls)


OTHERS = {
    "a replicated table": {"replicated": ["b"]},
    "a buffer around tables": {"model": CountingDlrm},
}


@pytest.mark.parametrize("kind", [*WRAPPED, *OTHERS])
def test_a_job_resumes_bit_for_bit(tmp_path, kind):
    """Saved in the middle of a stage of the warm-up, with other rates before and after."""

    def start(seed):
        if kind in WRAPPED:
            parallel, optimizer = wrapped(kind, seed)
        else:
            options = {"model": SmallDlrm, **OTHERS[kind]}
            torch.manual_seed(seed)
            options["model"] = options["model"]()
            parallel, optimizer = sharded("row_wise", seed=seed, **options)
            assert dense_of(parallel).keys() > {"linear.weight", "linear.bias"}
        return parallel, optimizer, lambda step: train(parallel, optimizer, None, 1, first=step)

    require_resumes(tmp_path, start, saved=4)


def test_settings_of_a_wrapper_are_those_of_the_program_that_resumes(tmp_path):
    for decay in (0.5, 0.25):
        parallel, combined = sharded("mixed")
        optimizer = Decaying(combined, decay=decay)
        with opened(parallel, optimizer, tmp_path) as checkpointer:
            checkpointer.recover()
            train(parallel, optimizer, checkpointer, 2 - checkpointer.step_count)
            checkpointer.save().wait_until_done()
    assert (optimizer.decay, optimizer.steps) == (0.25, 2)
    assert torch.equal(optimizer.mean, torch.full((2,), 2.5))


@pytest.mark.parametrize(
    ("saved", "opens", "says"),
    [
        (
            lambda: wrapped("warm-up of all", 0),
            lambda: sharded("mixed", "rowwise_adagrad", seed=1),
            r"WarmupOptimizer\._extra_state' is not in the model",
        ),
        (
            lambda: sharded("row_wise", "adagrad"),
            lambda: sharded("row_wise", "sgd", seed=1),
            "fused optimizer exact_sgd does not have",
        ),
    ],
)
def test_a_store_of_other_optimizers_is_refused(tmp_path, saved, opens, says):
    parallel, optimizer = saved()
    with opened(parallel, optimizer, tmp_path) as checkpointer:
        train(parallel, optimizer, checkpointer, 1)
        checkpointer.save("base").wait_until_done()
    parallel, optimizer = opens()
    with opened(parallel, optimizer, tmp_path) as checkpointer:
        before = held(checkpointer)
        with pytest.raises(StoreError, match=says):
            checkpointer.recover()
        assert same_tables(before, held(checkpointer))


def test_what_cannot_be_saved_is_refused_by_name(tmp_path):
    parallel, optimizer = sharded("row_wise", fused=None)
    with pytest.raises(UsageError, match="compute kernel 'dense' cannot be saved"):
        make_checkpointer(parallel, optimizer, tmp_path / "store")
    parallel, optimizer = sharded("row_wise")
    with opened(parallel, optimizer, tmp_path) as checkpointer:
        for kernel in kernels_of(parallel):
            kernel.weights_host = torch.nn.Parameter(kernel.weights_host.detach().clone())
        with pytest.raises(UsageError, match="was moved to other memory"):
            checkpointer.tables[0].arrays()


def test_where_torchrec_is_missing_the_install_line_is_told():
    code = (
        "import sys; sys.modules['torchrec'] = None\n"
        "try:\n    import cpr_ext.integrations.torchrec\n"
        "except Exception as error:\n    print(type(error).__name__, error)"
    )
    message = run_python(code, is_new=True)
    assert message.startswith("UsageError TorchRec cannot be imported")
    assert "pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0" in message
