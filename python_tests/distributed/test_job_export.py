"""Real workers, killed on the way, and their job exported: equal to what they held in the end."""

import numpy as np
import torch
from safetensors.torch import load_file

from cpr_ext.wings.tools.maintenance import export, inspect_job, verify_job
from python_tests.distributed.mlp_job import DIM, ROWS, Mlp
from python_tests.helpers import assert_same

MLP = ("python_tests.distributed.mlp_job", "MlpJob")


def models_of(cluster):
    """What each worker's model held when the job was done."""
    directory = cluster.settings.directory
    return [
        {name: torch.tensor(value) for name, value in np.load(f"{directory}/model-{r}.npz").items()}
        for r in cluster.ranks
    ]


def run_with_kills(cluster, *ranks):
    cluster.start()
    for number, rank in enumerate(ranks):
        cluster.wait_for_step(8 * (number + 1))
        cluster.kill(rank)
        cluster.wait_for_death(rank)
        cluster.start(rank)
    cluster.finish()
    return models_of(cluster)


def test_a_job_of_two_with_parts_and_wrappers_is_exported_as_the_gathered_model(
    make_cluster, tmp_path
):
    variants = ["plain", "compiled"]
    cluster = make_cluster(
        job=MLP, world_size=2, num_steps=30, options={"layers": (DIM, 5, 1), "variants": variants}
    )
    models = run_with_kills(cluster, 1)
    stores = tmp_path / "job" / "stores"
    assert verify_job(stores).is_sound
    report = export(stores, tmp_path / "out")
    assert (report.step, report.step_of_rows) == (30, 30)
    assert report.removed == ("module.", "_orig_mod.")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(exported["rows.weight"], torch.cat([m["rows.weight"] for m in models]))
    assert len(exported["rows.weight"]) == 2 * ROWS
    plain = torch.nn.Module()
    plain.rows = torch.nn.Embedding(2 * ROWS, DIM)
    for name in variants:
        setattr(plain, name, Mlp((DIM, 5, 1)))
    plain.load_state_dict(exported, strict=True)
    for name, value in models[0].items():
        if name != "rows.weight":
            unwrapped = name.replace("_orig_mod.", "").replace(".module.", ".")
            assert torch.equal(exported[unwrapped], value), name


def test_row_shards_of_four_workers_are_exported_in_their_order(make_cluster, tmp_path):
    cluster = make_cluster(num_steps=30)
    models = run_with_kills(cluster, 2, 0)
    stores = tmp_path / "job" / "stores"
    assert inspect_job(stores).is_sound
    report = export(stores, tmp_path / "out", rows_in_order=True)
    assert (report.step, report.step_of_rows) == (30, 30)
    tables = [name for name in models[0] if name.endswith(".rows.weight")]
    assert len(tables) == 2
    expected = {**models[0], **{name: torch.cat([m[name] for m in models]) for name in tables}}
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), expected)


def test_stores_of_a_job_that_was_killed_stand_at_the_steps_that_are_told(make_cluster, tmp_path):
    cluster = make_cluster(world_size=3, num_steps=10_000, batch_size=33, every_steps=4)
    cluster.start()
    cluster.wait_for_step(30)
    stores = tmp_path / "job" / "stores"
    export(stores, tmp_path / "alive", rows_in_order=True)  # while all train
    cluster.kill(*cluster.ranks)
    cluster.wait_for_death(*cluster.ranks)
    assert verify_job(stores).is_sound
    report = export(stores, tmp_path / "out", rows_in_order=True)
    steps = {w.worker: w.summary.points[-1].step for w in inspect_job(stores).workers}
    assert {store.worker: store.step for store in report.stores} == steps
    assert report.step == max(steps.values()) >= 20
    # All may have died at the same full-recovery point.
    are_whole = all(store.is_full_recovery_point for store in report.stores)
    is_one_step = len(set(steps.values())) == 1
    assert report.step_of_rows == (report.step if are_whole and is_one_step else None)
    load_file(tmp_path / "out" / "model.safetensors")
