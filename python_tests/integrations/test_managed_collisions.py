"""TorchRec's managed collisions on 1 to 4 ranks: no row returns under another id."""

import shutil

import pytest
import torch

from python_tests.helpers import assert_same, flip, open_checkpointer

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_modules import LRU_EvictionPolicy, MCHManagedCollisionModule

import cpr_ext
from cpr_ext.errors import DamageError, SnapshotFailedWarning, UsageError
from cpr_ext.integrations.torchrec import make_checkpointer
from cpr_ext.integrations.torchrec.managed_collisions import ManagedKeys
from cpr_ext.state.slot_keys import KeyShare
from python_tests.integrations.managed_job import (
    CASES,
    IDS,
    SAMPLES,
    SLOTS,
    ManagedJob,
    Model,
    buffers_of,
    make_batch,
    trained,
)


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def job(request, tmp_path_factory, ranks):
    """What each of so many ranks found, and their stores."""
    directory = tmp_path_factory.mktemp(f"ranks-{request.param}")
    return ranks.run(trained, directory, request.param), directory


def test_no_row_is_recovered_under_another_id_and_full_recovery_continues_bit_for_bit(job):
    """A partial recovery has the ids of its step; their evictions are expected changes."""
    results, _ = job
    for case in CASES:
        for result in results:
            found = result[case]
            assert (found["step"], found["rows_of_other_ids"]) == (46, 0)
            assert found["same_keys"]
            assert found["foreign"] == []
        assert sum(result[case]["stale"] for result in results) > 0
        held, ever = zip(*(result[case]["num_keys"] for result in results), strict=True)
        assert sum(ever) > sum(held)  # ids were evicted
    for result in results:
        assert result["warnings"] == []
        assert result["full"] == {"step": 41, "stale": 0, "differing": [], "rows": True}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("job", [2], indirect=True)
def test_damaged_stores_of_another_number_of_ranks_change_nothing(job, tmp_path):
    stores = [tmp_path / f"old-{rank}" for rank in range(2)]
    for rank, store in enumerate(stores):
        shutil.copytree(job[1] / f"partial-{rank}", store)
    segment = max(
        stores[1].glob("segments/*-base.safetensors"), key=lambda path: path.stat().st_size
    )
    flip(segment, segment.stat().st_size - 100)
    job = ManagedJob(tmp_path / "new", seed=3)
    before = buffers_of(job.model)
    with pytest.raises(DamageError, match=segment.name):
        job.ckpt.recover(from_store=stores)
    assert_same(buffers_of(job.model), before)
    assert job.rows() == {}
    job.ckpt.close()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("fused", "pooled"),
    [(torch.optim.SGD, True), (torch.optim.Adagrad, True), (torch.optim.Adagrad, False)],
)
def test_another_kind_of_module_recovers_rows_under_their_ids(tmp_path, fused, pooled):
    options = {"fused": fused, "pooled": pooled, "store": cpr_ext.StoreOptions(None)}
    job = ManagedJob(tmp_path, **options)
    job.train(13)
    job.end()
    again = ManagedJob(tmp_path, seed=1, **options)
    again.ckpt.recover()
    rows = again.rows()
    assert rows.keys() == job.keys_at[11]
    assert [key for key, row in rows.items() if row not in job.history[key]] == []
    again.end()


def unsharded(store, seed=0):
    torch.manual_seed(seed)
    model = Model("lru")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    options = {
        "schedule": cpr_ext.EverySteps(5, when_busy="wait"),
        "save_at_close": False,
        "make": make_checkpointer,
    }
    return model, optimizer, open_checkpointer(model, optimizer, store, **options)


def owners(model):
    """Return each table's ids by slot, and weights, from TorchRec's own buffers."""
    found = {}
    for name, module in model.bags._managed_collision_collection._managed_collision_modules.items():
        ids = torch.empty_like(module._mch_sorted_raw_ids)
        ids[module._mch_remapped_ids_mapping] = module._mch_sorted_raw_ids
        weight = model.bags._embedding_module.embedding_bags[name].weight
        found[name] = ids, weight.detach().clone()
    return found


def test_an_unsharded_module_recovers_its_map_with_the_rows(tmp_path):
    model, optimizer, ckpt = unsharded(tmp_path)
    history = [owners(model)]
    for step in range(33):
        optimizer.zero_grad()
        model(make_batch(step, 0)).backward()
        optimizer.step()
        history.append(owners(model))
        ckpt.step(SAMPLES)
    ckpt.close()
    again, _, ckpt = unsharded(tmp_path, seed=1)
    report = ckpt.recover()
    ckpt.close()
    for name, (ids, weight) in owners(again).items():
        assert torch.equal(ids, history[report.step][name][0])
        for slot, (number, row) in enumerate(zip(ids.tolist(), weight, strict=True)):
            states = [then[name] for then in history if then[name][0][slot] == number]
            assert any(torch.equal(row, rows[slot]) for _, rows in states)


def test_a_module_with_all_slots_has_all_ids_whatever_its_buckets():
    for segments, buckets in ((None, 1), ([0, 16, 24, 40], 3)):
        module = MCHManagedCollisionModule(
            zch_size=40,
            device=torch.device("cpu"),
            eviction_policy=LRU_EvictionPolicy(),
            eviction_interval=3,
            input_hash_size=1000,
            output_segments=segments,
            buckets=buckets,
        )
        assert ManagedKeys("a", module).share.owns(torch.arange(0, 2000, 7)).all()
        part = module.rebuild_with_output_id_range((24, 40), [0, 12, 24, 40])
        share = ManagedKeys("a", part).share
        assert (share.index, share.count) == (2, 3)
        ids = torch.tensor([0, 333, 667, 668, 999, 1002, 1003, 1004])
        assert share.owns(ids).tolist() == [i in (668, 999, 1004) for i in ids.tolist()]


@pytest.mark.parametrize(("count", "num_ids"), [(3, 1000), (4, IDS), (2, 2**63 - 1), (1, 5)])
def test_an_id_belongs_to_the_rank_that_torchrec_asks_for_it(count, num_ids):
    draw = torch.Generator().manual_seed(count)
    ids = torch.randint(0, min(2**63 - 1, 2 * num_ids), (500,), generator=draw)
    block = torch.tensor([-(-num_ids // count)])
    for number in ids:
        lengths, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
            torch.tensor([1]), number[None], False, False, block, count
        )
        owns = [bool(KeyShare(at, count, num_ids).owns(number[None])) for at in range(count)]
        assert owns == lengths.bool().tolist()


def test_a_plain_checkpointer_names_the_one_that_saves_the_ids(tmp_path):
    model = Model("lru")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"'bags' is a .* Use\s+cpr_ext.*make_checkpointer"):
        cpr_ext.Checkpointer(model, optimizer, tmp_path)


def test_modules_and_policies_that_are_not_known_are_refused_by_name(tmp_path):
    class OwnPolicy(LRU_EvictionPolicy):
        pass

    model = Model("lru")
    modules = model.bags._managed_collision_collection._managed_collision_modules
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    modules["a"]._eviction_policy = OwnPolicy()
    with pytest.raises(UsageError, match=r"bags\.a' evicts by a OwnPolicy, whose state is not"):
        make_checkpointer(model, optimizer, tmp_path)
    modules["a"] = HashZchManagedCollisionModule(
        zch_size=SLOTS["a"], device=torch.device("cpu"), total_num_buckets=2
    )
    with pytest.raises(UsageError, match=r"bags\.a' is mapped by a HashZchManagedCollisionModule"):
        make_checkpointer(model, optimizer, tmp_path)
    alone = torch.nn.Sequential(Model("lru").bags._managed_collision_collection, model.linear)
    with pytest.raises(UsageError, match="which table it gives rows of is not known"):
        make_checkpointer(alone, optimizer, tmp_path)


def test_a_map_that_gives_a_slot_twice_fails_the_snapshot(tmp_path):
    model, optimizer, ckpt = unsharded(tmp_path)
    modules = model.bags._managed_collision_collection._managed_collision_modules
    mapping = modules["b"]._mch_remapped_ids_mapping
    model(make_batch(0, 0)).backward()
    optimizer.step()
    ckpt.step(SAMPLES)
    for buffer, wrong, message in (
        (mapping, 1, "gives slot 0 to no id"),
        (modules["b"]._mch_sorted_raw_ids, -5, "id -5 is negative"),
    ):
        right = buffer[0].clone()
        buffer[0] = wrong
        ckpt.save()
        with pytest.warns(SnapshotFailedWarning, match=message):
            ckpt.step(SAMPLES)
        buffer[0] = right
    ckpt.save()
    ckpt.close()
