"""Real workers, killed on the way, and their job exported: equal to what they held in the end."""

import torch
from safetensors.torch import load_file

from cpr_ext.wings.tools.maintenance import export, inspect_job, verify_job
from python_tests.distributed.losses import mlp
from python_tests.distributed.mlp_job import DIM, ROWS, Mlp
from python_tests.helpers import assert_same


def test_a_job_of_two_with_parts_and_wrappers_is_exported_as_the_gathered_model(
    make_cluster, tmp_path
):
    variants, layers = ["plain", "compiled"], (DIM, 5, 1)
    options = {"layers": layers, "variants": variants}
    deaths = {1: [["reduced", 8]]}
    settings = {**mlp(num_steps=20), "recovery": "partial", "options": options}
    cluster = make_cluster(deaths=deaths, **settings)
    cluster.run()
    models = cluster.finals()
    assert verify_job(cluster.stores).is_sound
    report = export(cluster.stores, tmp_path / "out")
    assert (report.step, report.step_of_rows) == (20, 20)
    assert report.removed == ("module.", "_orig_mod.")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(exported["rows.weight"], torch.cat([m["rows.weight"] for m in models]))
    assert len(exported["rows.weight"]) == 2 * ROWS
    plain = torch.nn.Module()
    plain.rows = torch.nn.Embedding(2 * ROWS, DIM)
    for name in variants:
        setattr(plain, name, Mlp(layers))
    plain.load_state_dict(exported, strict=True)
    for name, value in models[0].items():
        if name != "rows.weight":
            unwrapped = name.replace("_orig_mod.", "").replace(".module.", ".")
            assert torch.equal(exported[unwrapped], value), name


def test_stores_of_row_shards_stand_at_the_steps_that_are_told_and_are_exported_in_order(
    make_cluster, tmp_path
):
    cluster = make_cluster(world_size=3, num_steps=200, batch_size=33, every_steps=4)
    cluster.start()
    cluster.wait_for_step(30)
    stores = cluster.stores
    export(stores, tmp_path / "alive", rows_in_order=True)  # while all train
    cluster.kill(*cluster.ranks)
    assert verify_job(stores).is_sound
    report = export(stores, tmp_path / "out", rows_in_order=True)
    steps = {w.worker: w.summary.points[-1].step for w in inspect_job(stores).workers}
    assert {store.worker: store.step for store in report.stores} == steps
    assert report.step == max(steps.values()) >= 20
    # All may have died at the same full-recovery point.
    is_one = len(set(steps.values())) == 1 and all(s.is_full_recovery_point for s in report.stores)
    assert report.step_of_rows == (report.step if is_one else None)
    cluster.start()
    cluster.finish()
    models = cluster.finals()
    report = export(stores, tmp_path / "end", rows_in_order=True)
    assert (report.step, report.step_of_rows) == (200, 200)
    tables = [name for name in models[0] if name.endswith(".rows.weight")]
    assert len(tables) == 2
    expected = {**models[0], **{name: torch.cat([m[name] for m in models]) for name in tables}}
    assert_same(load_file(tmp_path / "end" / "model.safetensors"), expected)
