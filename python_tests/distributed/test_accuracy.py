"""What kills cost in accuracy, on real data, and what the emulator said they would."""

from dataclasses import replace

import pytest
import torch

import cpr_ext
from cpr_ext.wings.lab.dlrm.evaluation import evaluate
from cpr_ext.wings.lab.dlrm.failures import PlannedFailure
from cpr_ext.wings.lab.dlrm.model import DLRM
from cpr_ext.wings.lab.dlrm.presets import find_preset
from cpr_ext.wings.lab.dlrm.trainer import Trainer, TrainOptions
from python_tests.distributed.job import SEED, make_source

NUM_STEPS, EVERY_STEPS, WORLD_SIZE = 990, 45, 4
KILLS = ((250, 2), (500, 0), (800, 3))


def auc_of(cluster):
    """Of the model that the workers hold together."""
    source = make_source(cluster.settings)
    model = DLRM.from_preset(find_preset("tiny"), source, seed=SEED)
    parts, state = cluster.finals(), {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        is_table = ".rows." in name
        state[name.replace(".rows.", ".")] = torch.cat(values) if is_table else values[0]
        assert is_table or all(torch.equal(value, values[0]) for value in values)
    model.load_state_dict(state)
    return evaluate(model, source).auc


def auc_emulated(cluster, store, failures):
    settings = cluster.settings
    source = make_source(settings)
    return Trainer(
        find_preset("tiny"),
        source,
        TrainOptions(
            settings=replace(source.recommended, batch_size=settings.batch_size),
            seed=SEED,
            store=store,
            priority=cpr_ext.MostFrequentlyUsed(),
            every_steps=settings.every_steps,
            num_shards=settings.world_size,
            failures=failures,
            max_steps=settings.num_steps,
        ),
    ).run()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_three_kills_cost_what_the_emulator_says(make_cluster, tmp_path, real_movietweetings):
    jobs = {}
    for name, kills in (("untouched", ()), ("killed", KILLS)):
        cluster = jobs[name] = make_cluster(
            name, num_steps=NUM_STEPS, world_size=WORLD_SIZE, every_steps=EVERY_STEPS,
            batch_size=128, options={"movietweetings": str(real_movietweetings)}, digests=False,
        )  # fmt: skip
        cluster.start()
        for step, victim in kills:
            cluster.wait_for_step(step, *(rank for rank in cluster.ranks if rank != victim))
            cluster.kill(victim)
            cluster.start(victim)
        cluster.finish(300)
    struck = [recovery for recovery in jobs["killed"].recoveries(1) if recovery["step"] > 0]
    assert [recovery["lost"] for recovery in struck] == [[victim] for _, victim in KILLS]
    failures = tuple(PlannedFailure(r["step"], tuple(r["lost"])) for r in struck)
    none = auc_emulated(jobs["untouched"], tmp_path / "none", ())
    emulated = auc_emulated(jobs["killed"], tmp_path / "emulated", failures)
    live = {name: auc_of(cluster) for name, cluster in jobs.items()}
    lost = [r["samples_lost"][victim] for r, (_, victim) in zip(struck, KILLS, strict=True)]
    expected = [failure["samples_lost"] for failure in emulated.failures]
    print(f"AUC: untouched {live['untouched']:.4f}, three kills {live['killed']:.4f}; "
          f"one process {none.auc:.4f}, emulated {emulated.auc:.4f}; samples lost {lost}, "
          f"emulated {expected}")  # fmt: skip
    # The order of additions differs from that of one process, nothing else.
    assert live["untouched"] == pytest.approx(none.auc, abs=0.002)
    assert live["killed"] == pytest.approx(emulated.auc, abs=0.003)
    assert live["killed"] > live["untouched"] - 0.01
    # A snapshot that was on its way when its worker died is lost to the live job alone.
    for samples, said in zip(lost, expected, strict=True):
        assert samples - said in (0, EVERY_STEPS * 128)
    # A survivor that had not made the step in which its peer died goes on from one that had.
    assert all(
        recovery["samples_lost"][rank] <= 128
        for recovery, (_, victim) in zip(struck, KILLS, strict=True)
        for rank in set(range(WORLD_SIZE)) - {victim}
    )
