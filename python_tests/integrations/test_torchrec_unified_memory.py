"""Tables of FBGEMM in a GPU's memory, and in unified memory with a cache of rows and without.

No GPU is needed. The operators are FBGEMM's for the CPU. ``CachedOperator`` gives one the memory
of an operator for a GPU: rows that training looks up are newer in a cache until it is flushed.
"""

import random

import pytest
import torch

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)

import cpr_ext
from cpr_ext.errors import UsageError
from cpr_ext.integrations.torchrec.sharded_tables import find_kernels, sharded_tables
from cpr_ext.saving.snapshot_rows import SnapshotRows
from python_tests.integrations.sharded_models import (
    ALONE,
    copy_parts,
    held,
    kernels_of,
    opened,
    same_tables,
    sharded,
    train,
    whole_tables,
)

pytestmark = ALONE
DEVICE, MANAGED = EmbeddingLocation.DEVICE, EmbeddingLocation.MANAGED
CACHED = EmbeddingLocation.MANAGED_CACHING


@pytest.fixture(autouse=True)
def only_own_flushes(monkeypatch):
    """TorchRec's state_dict() flushes too, which is not relied on."""
    for kind in (GroupedPooledEmbeddingsLookup, GroupedEmbeddingsLookup):
        monkeypatch.setattr(kind, "flush", lambda lookup: None)


class CachedOperator:
    """What FBGEMM does on a GPU: an operator trains on rows of a cache; the table has others.

    ``weights_host`` is what the kernel computes on: the table, and over it the rows of the cache.

    Attributes:
        num_slots: rows that the cache holds; others are evicted to the table.
    """

    def __init__(self, operator, location, num_slots=9):
        self.operator, self.num_slots, self.rows = operator, num_slots, {}
        self.num_flushes = 0
        self._random = random.Random(0)
        for name in ("weights", "momentum1"):
            placements = getattr(operator, f"{name}_physical_placements", None)
            if placements is None:  # SGD has no state
                continue
            host = getattr(operator, f"{name}_host").detach()
            setattr(operator, f"{name}_physical_placements", [int(location)] * len(placements))
            memory = f"{name}_dev" if location == DEVICE else f"{name}_uvm"
            delattr(operator, memory)
            # State is never cached. Without a cache neither are weights.
            is_cached = name == "weights" and location == CACHED
            operator.register_buffer(memory, host.clone() if is_cached else host)
        if location == CACHED:
            operator.flush, operator.reset_cache_states = self.flush, self.rows.clear
            operator.register_forward_pre_hook(self._look_up, with_kwargs=True)

    def _row(self, memory, table, row):
        dim = self.operator.embedding_specs[table][1]
        first = self.operator.weights_physical_offsets[table] + row * dim
        return memory[first : first + dim]

    def _read(self):
        for key, value in self.rows.items():  # as the last backward pass left them
            value.copy_(self._row(self.operator.weights_host.detach(), *key))

    def _write(self, memory, key):
        self._row(memory, *key).copy_(self.rows[key])

    def _look_up(self, module, args, kwargs):
        given = dict(zip(("indices", "offsets"), args, strict=False)) | kwargs
        features = self.operator.feature_table_map
        bounds = given["offsets"][:: (given["offsets"].numel() - 1) // len(features)].tolist()
        self._read()
        looked_up = {
            (table, row)
            for feature, table in enumerate(features)
            for row in given["indices"][bounds[feature] : bounds[feature + 1]].tolist()
        }
        for key in sorted(looked_up - self.rows.keys()):
            self.rows[key] = self._row(self.operator.weights_uvm, *key).clone()
        for key in sorted(self.rows.keys() - looked_up):
            if len(self.rows) > self.num_slots and self._random.random() < 0.5:
                self._write(self.operator.weights_uvm, key)
                del self.rows[key]
        with torch.no_grad():
            self.operator.weights_host.copy_(self.operator.weights_uvm)
            for key in self.rows:
                self._write(self.operator.weights_host, key)

    def flush(self):
        self.num_flushes += 1
        self._read()
        for key in self.rows:
            self._write(self.operator.weights_uvm, key)


def cached(plan, fused="adagrad", location=CACHED, seed=0):
    parallel, optimizer = sharded(plan, fused, seed=seed)
    return parallel, optimizer, [CachedOperator(each, location) for each in kernels_of(parallel)]


def plain(plan, fused, num_steps):
    """The rows of a model without a cache after so many steps."""
    parallel, optimizer = sharded(plan, fused)
    train(parallel, optimizer, None, num_steps, first=0)
    return whole_tables(copy_parts(sharded_tables(find_kernels(parallel))))


def stored(store, plan, fused):
    """The rows that a model without a cache gets from a store."""
    parallel, optimizer = sharded(plan, fused, seed=2)
    with opened(parallel, optimizer, store) as checkpointer:
        checkpointer.recover()
        return held(checkpointer)


def check_saving(store, plan, fused, location, **options):
    parallel, optimizer, _ = cached(plan, fused, location)
    with opened(parallel, optimizer, store, **options) as checkpointer:
        for kind, num_steps in (("base", 3), ("partial", 2), ("partial", 4)):
            train(parallel, optimizer, checkpointer, num_steps)
            checkpointer.save(kind)
            checkpointer.wait()
            checkpointer.check()
        assert checkpointer.metrics.rows_changed_unseen == 0
    assert same_tables(stored(store, plan, fused), plain(plan, fused, 9))


def check_recovery(store, plan, fused, location):
    parallel, optimizer, _ = cached(plan, fused, location)
    with opened(parallel, optimizer, store) as checkpointer:
        train(parallel, optimizer, checkpointer, 4)
        checkpointer.save()
        checkpointer.wait()
        train(parallel, optimizer, checkpointer, 3)  # the cache is full of rows that are undone
        assert checkpointer.recover().step == 4
        train(parallel, optimizer, checkpointer, 5)
        assert same_tables(held(checkpointer), plain(plan, fused, 9))
    parallel, optimizer, _ = cached(plan, fused, location, seed=1)
    with opened(parallel, optimizer, store) as checkpointer:
        train(parallel, optimizer, None, 2, first=0)
        assert checkpointer.recover().step == 4
        train(parallel, optimizer, checkpointer, 5)
        assert same_tables(held(checkpointer), plain(plan, fused, 9))


def check_lost_shards(store, plan, fused, location):
    """The rows of a lost shard are as saved, all others stay the newest; then training goes on."""
    results = []
    for is_cached in (True, False):
        parallel, optimizer = (
            cached(plan, fused, location)[:2] if is_cached else sharded(plan, fused)
        )
        with opened(parallel, optimizer, store / str(is_cached), num_shards=3) as checkpointer:
            train(parallel, optimizer, checkpointer, 4)
            checkpointer.save()
            checkpointer.wait()
            train(parallel, optimizer, checkpointer, 3)
            checkpointer.recover(shards=[1])
            rows = held(checkpointer)
            train(parallel, optimizer, checkpointer, 3)
            results.append((rows, held(checkpointer)))
    for with_cache, without in zip(*results, strict=True):
        assert same_tables(with_cache, without)


CHECKS = [check_saving, check_recovery, check_lost_shards]


@pytest.mark.parametrize("location", [DEVICE, MANAGED, CACHED])
@pytest.mark.parametrize(("plan", "fused"), [("mixed", "rowwise_adagrad"), ("table_wise", "sgd")])
@pytest.mark.parametrize("check", CHECKS)
def test_rows_are_those_of_a_model_in_other_memory(tmp_path, check, plan, fused, location):
    check(tmp_path / "s", plan, fused, location)


@pytest.mark.parametrize("priority", [cpr_ext.AllRows(), cpr_ext.LargestChange(fraction=1.0)])
def test_ways_of_saving_read_the_newest_rows(tmp_path, priority):
    check_saving(tmp_path / "s", "mixed", "adagrad", CACHED, priority=priority)


def test_rows_that_are_captured_in_later_steps_are_flushed_then(tmp_path, monkeypatch):
    capture, steps = SnapshotRows.capture, []

    def capture_a_chunk(rows, step, **options):
        if step in steps:
            return False
        steps.append(step)
        return capture(rows, step, **options | {"max_bytes": 1})

    parallel, optimizer, caches = cached("mixed")
    every = cpr_ext.EverySteps(1)
    with opened(parallel, optimizer, tmp_path / "s", schedule=every) as checkpointer:
        num_steps = len(checkpointer.tables)  # a chunk of each
        with monkeypatch.context() as slowly:
            slowly.setattr(SnapshotRows, "capture", capture_a_chunk)
            train(parallel, optimizer, checkpointer, num_steps)
        assert steps == list(range(1, num_steps + 1))
        assert [each.num_flushes for each in caches] == [num_steps] * len(caches)
        checkpointer.save("partial")
        checkpointer.wait()
    rows = plain("mixed", "adagrad", num_steps)
    assert same_tables(stored(tmp_path / "s", "mixed", "adagrad"), rows)


def test_a_snapshot_flushes_each_cache_once_and_a_check_none(tmp_path):
    parallel, optimizer, caches = cached("mixed")
    with opened(parallel, optimizer, tmp_path / "s", num_shards=3) as checkpointer:
        for _ in range(2):
            train(parallel, optimizer, checkpointer, 3)
            before = [each.num_flushes for each in caches]
            checkpointer.save("partial")
            checkpointer.wait()
            assert [each.num_flushes for each in caches] == [count + 1 for count in before]
        train(parallel, optimizer, checkpointer, 2)
        checkpointer.check()
        train(parallel, optimizer, checkpointer, 1)
        assert [each.num_flushes for each in caches] == [count + 1 for count in before]


def test_rows_that_moved_or_lie_in_an_unknown_place_are_refused_by_name(tmp_path):
    parallel, _, caches = cached("mixed", location=DEVICE)
    tables = sharded_tables(find_kernels(parallel))
    for each in caches:  # within the GPU
        each.operator.weights_dev = each.operator.weights_dev.clone()
    with pytest.raises(UsageError, match="was moved to other memory"):
        tables[0].arrays()
    parallel, optimizer, _ = cached("table_wise", location=EmbeddingLocation.MTIA)
    refusal = r"'\S+embedding\S+': EmbeddingLocation.MTIA: an unknown place.* 'fused'"
    with pytest.raises(UsageError, match=refusal):
        opened(parallel, optimizer, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_prefetching_and_a_cache_of_another_precision_are_refused(tmp_path):
    parallel, optimizer, caches = cached("table_wise")
    operator = caches[0].operator
    operator.prefetch_pipeline = True
    with pytest.raises(UsageError, match=r"'bags\S+': .*prefetch_pipeline=False"):
        opened(parallel, optimizer, tmp_path / "s")
    operator.prefetch_pipeline = False
    right = operator.lxu_cache_weights
    operator.lxu_cache_weights = torch.zeros(0, 0, dtype=torch.float16)
    with pytest.raises(UsageError, match=r"its cache has torch.float16, the table torch.float32"):
        opened(parallel, optimizer, tmp_path / "s")
    assert not (tmp_path / "s").exists()
    operator.lxu_cache_weights = right
    with opened(parallel, optimizer, tmp_path / "s") as checkpointer:
        train(parallel, optimizer, checkpointer, 1)
        checkpointer.save("base")
        checkpointer.wait()
        operator.lxu_cache_locations_list = [torch.zeros(1)]
        with pytest.raises(UsageError, match="rows of later batches ahead"):
            checkpointer.recover()
        operator.lxu_cache_locations_list = []
        train(parallel, optimizer, checkpointer, 1)
        operator.prefetch_stream = object()
        with pytest.raises(UsageError, match="rows of later batches ahead"):
            checkpointer.tables[0].arrays()
        operator.prefetch_stream = None
