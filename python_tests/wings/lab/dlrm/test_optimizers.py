import pytest
import torch

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.dlrm.batch import Hyperparameters
from cpr_ext.wings.lab.dlrm.model import DLRM
from cpr_ext.wings.lab.dlrm.optimizers import build_optimizers
from cpr_ext.wings.lab.dlrm.presets import find_preset
from cpr_ext.wings.lab.dlrm.rowwise_adagrad import RowWiseAdagrad
from cpr_ext.wings.lab.dlrm.synthetic import Synthetic


def test_every_parameter_has_one_optimizer_and_moves():
    source = Synthetic((50, 20, 3), num_samples=1000)
    model = DLRM.from_preset(find_preset("tiny"), source)
    tables, dense = build_optimizers(model, Hyperparameters(table_lr=0.3))
    assert type(tables) is RowWiseAdagrad
    assert tables.param_groups[0]["lr"] == 0.3
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    batch = next(source.train_batches(256))
    torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels).backward()

    tables.step()
    moved = {key for key, value in model.named_parameters() if not torch.equal(value, before[key])}
    assert moved == {f"tables.{table}.weight" for table in source.table_names}
    dense.step()
    assert not any(torch.equal(value, before[key]) for key, value in model.named_parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table_lr": 0.0}, "table_lr is 0.0"),
        ({"dense_lr": float("nan")}, "dense_lr is nan"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"epochs": -1}, "epochs is -1"),
    ],
)
def test_settings_that_cannot_train_are_refused(change, message):
    with pytest.raises(UsageError, match=message):
        Hyperparameters(**change)
