"""What of several workers is compared, and how a difference is named."""

import re
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cpr_ext
from cpr_ext.distributed.collective.comparison import checksum, differences, facts_of
from cpr_ext.state.table_part import TablePart
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
        ([row((0, 6)), row((5, 10))], "workers 0 and 1 both hold 't[5:6, 0:4]'"),
        ([row((0, 6)), row((7, 10))], "table 't': no worker holds 4 of its values"),
        (
            [row((0, 6)), row((6, 11), shape=(11, 4))],
            "table 't' has (rows, columns, type) [(10, 4, 'float32'), (11, 4, 'float32')] "
            "on workers [0, 1]",
        ),
        (
            [(8, "float32"), (4, "float32")],
            "table 'own' has (columns, type) (8, 'float32') on workers [0]; "
            "(4, 'float32') on workers [1]",
        ),
    ],
)
def test_another_plan_is_named(plans, fault):
    assert plan_faults([{"own": plan} for plan in plans]) == [fault]


@given(
    st.lists(
        st.tuples(*[st.integers(0, 5), st.integers(1, 6)] * 2)
        .filter(lambda cut: cut[0] < cut[1] and cut[2] < cut[3])
        .map(lambda cut: (cut[:2], cut[2:])),
        max_size=6,
    )
)
def test_parts_overlap_if_two_of_them_do(cuts):
    parts = [TablePart("t", rows, columns, 6, 6) for rows, columns in cuts]
    overlap = any(a.overlap(b) is not None for a, b in combinations(parts, 2))
    found = plan_faults([{"a": row(*cut, shape=(6, 6))} for cut in cuts])
    assert any("both hold" in fault for fault in found) == overlap
    for fault in found:
        if overlap:
            first, second = (int(n) for n in re.findall(r"\d+", fault)[:2])
            assert parts[first].overlap(parts[second]).name in fault


def test_the_plan_of_many_workers_is_checked_by_few_comparisons(monkeypatch):
    compared = []
    overlap = TablePart.overlap
    monkeypatch.setattr(TablePart, "overlap", lambda *two: (compared.append(two), overlap(*two))[1])
    for shape, cut in (
        ((4096, 4), lambda n: ((n, n + 1), (0, 4))),
        ((4, 4096), lambda n: ((0, 4), (n, n + 1))),
    ):
        plans = [{"a": row(*cut(number), shape=shape)} for number in range(4096)]
        assert plan_faults(plans) == []
    assert len(compared) <= 2 * 2 * 4096


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


def test_what_workers_share_is_compared_and_named_and_nothing_else(tmp_path):
    """Not rows, generators, and buffers that are not saved; others after a recovery only."""
    model = torch.nn.Sequential(torch.nn.Embedding(20, 4), torch.nn.BatchNorm1d(4))
    model.register_buffer("mask", torch.zeros(2), persistent=False)
    optimizer = torch.optim.Adam(model.parameters())
    with cpr_ext.Checkpointer(model, optimizer, tmp_path / "store") as checkpointer:

        def facts(*, buffers):
            return facts_of(model, checkpointer, buffers=buffers)

        model[1](model[0](torch.tensor([1, 2]))).square().sum().backward()
        optimizer.step()
        before, without_buffers = facts(buffers=True), facts(buffers=False)
        model[0].weight.data.add_(1.0)
        optimizer.state[model[0].weight]["exp_avg"].add_(1.0)
        model.mask.add_(1.0)
        torch.rand(3)
        assert facts(buffers=True) == before
        model[1].running_mean.add_(1.0)
        assert facts(buffers=False) == without_buffers
        named = ["buffer '1.running_mean'"]
        for change, name in (
            (lambda: model[1].bias.data.add_(1.0), "parameter '1.bias'"),
            (lambda: optimizer.state[model[1].bias]["exp_avg"].add_(1.0),
             "optimizer 0 (Adam): exp_avg of parameter '1.bias'"),
            (lambda: optimizer.param_groups[0].update(lr=0.5), "optimizer 0 (Adam), group 0: lr"),
            (lambda: checkpointer.step(7), "step"),
        ):  # fmt: skip
            change()
            named.append(name)
            found = differences([before, facts(buffers=True)])
            expected = {*named, *(["samples"] if name == "step" else [])}
            assert {each.partition(" (workers")[0] for each in found} == expected
