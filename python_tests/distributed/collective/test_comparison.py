"""What of several workers is compared, and how a difference is named."""

import pytest
import torch

import cpr_ext
from cpr_ext.distributed.collective.comparison import checksum, differences, facts_of
from cpr_ext.state.table_plans import plan_faults


def row(rows, columns=(0, 4), *, table="t", shape=(10, 4), dtype="float32"):
    return (table, rows, columns, *shape, dtype)


def test_a_whole_table_cut_in_any_way_is_one_plan():
    assert plan_faults([{"a": row((0, 6))}, {"b": row((6, 10))}]) == []
    assert plan_faults([{"a": row((0, 10), (0, 1))}, {"b": row((0, 10), (1, 4))}, {}]) == []
    assert plan_faults([{"own": (8, "float32")}, {"own": (8, "float32"), "more": (2, "x")}]) == []


@pytest.mark.parametrize(
    ("plans", "fault"),
    [
        ([{"a": row((0, 6))}, {"b": row((5, 10))}], "workers 0 and 1 both hold 't[5:6, 0:4]'"),
        ([{"a": row((0, 6))}, {"b": row((7, 10))}], "table 't': no worker holds 4 of its values"),
        (
            [{"a": row((0, 6))}, {"b": row((6, 11), shape=(11, 4))}],
            "table 't' has (rows, columns, type) [(10, 4, 'float32'), (11, 4, 'float32')] "
            "on workers [0, 1]",
        ),
        (
            [{"own": (8, "float32")}, {"own": (4, "float32")}],
            "table 'own' has (columns, type) (8, 'float32') on workers [0]; "
            "(4, 'float32') on workers [1]",
        ),
    ],
)
def test_another_plan_is_named(plans, fault):
    assert plan_faults(plans) == [fault]


def test_a_difference_names_what_each_worker_holds():
    said = [{"step": "5", "x": "a"}, {"step": "5", "x": "b"}, {"step": "5", "x": "a"}]
    assert differences(said) == ["x (workers [0, 2]: a; workers [1]: b)"]
    assert differences([{"x": "a"}, {}]) == ["x (workers [0]: a; workers [1]: nothing)"]


def test_one_bit_changes_a_checksum_whatever_the_type():
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        values = torch.zeros(3, 5, dtype=dtype)
        before = checksum(values)
        values.view(torch.uint8)[1, 2] ^= 1
        assert checksum(values) != before
    assert checksum(torch.ones(4, 3).T) == checksum(torch.ones(3, 4))
    assert checksum(torch.tensor(2.0)) != checksum(torch.tensor([2.0]))


def test_rows_generators_and_unsaved_buffers_are_a_workers_own(tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(20, 4), torch.nn.BatchNorm1d(4))
    model.register_buffer("mask", torch.zeros(2), persistent=False)
    optimizer = torch.optim.Adam(model.parameters())
    with cpr_ext.Checkpointer(model, optimizer, tmp_path / "store") as checkpointer:

        def facts(*, buffers):
            return facts_of(model, checkpointer, buffers=buffers)

        model[1](model[0](torch.tensor([1, 2]))).square().sum().backward()
        optimizer.step()
        before, without_buffers = facts(buffers=True), facts(buffers=False)
        with torch.no_grad():
            model[0].weight.add_(1.0)
            optimizer.state[model[0].weight]["exp_avg"].add_(1.0)
            model.mask.add_(1.0)
        torch.rand(3)
        assert facts(buffers=True) == before
        model[1].running_mean.add_(1.0)
        assert facts(buffers=False) == without_buffers
        assert differences([before, facts(buffers=True)])[0].startswith("buffer '1.running_mean'")
