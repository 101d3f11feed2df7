"""Optimizer state under TorchRec's names, that of fused Adam and of cut columns included."""

import torch

from cpr_ext.wings.tools.maintenance.exporting import optimizer_state


class Array:
    """Stands for an array in a store."""

    def __init__(self, name, value):
        self.name, self.value = name, value

    def whole(self):
        return self.value


def test_adams_first_state_is_momentum1_in_whatever_order_it_is_stored():
    first, second = torch.ones(3, 2), torch.zeros(3, 2)
    rows = {"bags.users.weight": [Array("exp_avg_sq", second), Array("exp_avg", first)]}
    found = optimizer_state(rows, [], {})["bags.users.weight"]
    assert found.keys() == {"users.momentum1", "users.exp_avg_sq"}
    assert torch.equal(found["users.momentum1"], first)
    assert torch.equal(found["users.exp_avg_sq"], second)


def test_state_of_cut_columns_is_laid_end_to_end():
    parts = [Array("sum[0:4]", torch.zeros(3)), Array("sum[4:8]", torch.ones(3))]
    found = optimizer_state({"users.weight": parts}, [], {})["users.weight"]
    assert found["users.momentum1"].tolist() == [0, 0, 0, 1, 1, 1]


def test_dense_parameters_have_the_names_of_the_export():
    optimizer = {
        "parameters": [["module.linear.weight", "users.weight"], [""]],
        "states": {"0": {"step": torch.tensor(2.0)}, "1": {"step": torch.tensor(2.0)}, "2": {}},
    }
    names = {"module.linear.weight": "linear.weight"}
    found = optimizer_state({"users.weight": []}, [optimizer], names)
    assert found == {"linear.weight": {"step": torch.tensor(2.0)}}
