"""What rows are captured from is kept between snapshots, until memory or form is another."""

import copy

import pytest
import torch

import cpr_ext
from cpr_ext.saving.segment_capture import place_of
from python_tests.helpers import Trained, assert_same

OPTIONS = {"priority": cpr_ext.AllRows(), "schedule": cpr_ext.EverySteps(10**9)}
CHANGES = {
    "weight of other memory": lambda w, s, o: setattr(w, "data", w.data.clone()),
    "weight resized": lambda w, s, o: w.data.resize_(9999, 4).resize_(200, 4),
    "state of other memory": lambda w, s, o: setattr(s["sum"], "data", s["sum"].clone()),
    "state resized": lambda w, s, o: s["sum"].resize_(9999, 4).resize_(200, 4),
    "state loaded": lambda w, s, o: o.load_state_dict(copy.deepcopy(o.state_dict())),
}


@pytest.mark.filterwarnings("ignore::cpr_ext.errors.UntrackedChangeWarning")
@pytest.mark.parametrize("change", CHANGES)
def test_a_snapshot_after_a_change_of_memory_is_of_the_new_one(change, tmp_path):
    run = Trained(tmp_path, **OPTIONS)
    kept = run.checkpointer.session.saver._parts.context.sources._kept
    weight, optimizer = run.model.tables["big"].weight, run.optimizers[0]
    seen = []
    for _ in range(3):
        run.train(2)
        run.save()
        seen.append(kept["tables.big"][-1])
    assert seen[1] is seen[2], "nothing was kept"
    CHANGES[change](weight, optimizer.state[weight], optimizer)
    run.train(2)
    run.save()
    assert kept["tables.big"][-1] is not seen[2]
    run.die()
    fresh = Trained(tmp_path, **OPTIONS)
    fresh.checkpointer.recover()
    assert_same(fresh.rows(), run.rows())


def test_a_replaced_weight_and_another_form_are_seen(tmp_path):
    run = Trained(tmp_path, **OPTIONS)
    run.train(2)
    run.save()
    run.model.tables["big"].weight = torch.nn.Parameter(torch.zeros(200, 4))
    assert not run.save().is_complete  # no row is dirty, so it has none of this table
    with pytest.raises(cpr_ext.errors.SnapshotError, match="failed"):
        run.save("base")
    values = torch.zeros(4, 4)
    others = values[:2], values.t(), values.view(torch.int32), values.to("meta")
    assert not [each for each in others if place_of(each) == place_of(values)]
