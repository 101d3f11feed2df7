import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.dlrm.rowwise_adagrad import RowWiseAdagrad


def plain_loop(weight, gradients, lr, eps, first):
    """The formula, a row at a time, in double precision."""
    weight = weight.double().clone()
    row_sum = torch.full((weight.shape[0],), first, dtype=torch.float64)
    for gradient in gradients:
        for row, row_gradient in enumerate(gradient.double()):
            if row_gradient.any():
                row_sum[row] += (row_gradient**2).mean()
                weight[row] -= lr * row_gradient / (row_sum[row].sqrt() + eps)
    return weight, row_sum


def lookups_gradient(rows, num_rows, dim, seed):
    """An uncoalesced sparse gradient: a row may occur more than once, or not at all."""
    values = torch.randn(len(rows), dim, generator=torch.Generator().manual_seed(seed))
    indices = torch.tensor(rows, dtype=torch.int64).reshape(1, -1)
    return torch.sparse_coo_tensor(indices, values, (num_rows, dim), check_invariants=True)


def train(weight, gradients, **settings):
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = RowWiseAdagrad([parameter], **settings)
    for gradient in gradients:
        parameter.grad = gradient.to(parameter.device)
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]["sum"]


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.lists(st.integers(0, 6), max_size=12), min_size=1, max_size=4),
    dim=st.integers(1, 5),
    is_sparse=st.booleans(),
    lr=st.floats(0.0, 1.0),
    first=st.sampled_from([0.0, 0.1]),
)
def test_updates_equal_a_plain_loop(steps, dim, is_sparse, lr, first):
    weight = torch.randn(7, dim, generator=torch.Generator().manual_seed(9))
    gradients = [lookups_gradient(rows, 7, dim, seed) for seed, rows in enumerate(steps)]
    dense = [gradient.to_dense() for gradient in gradients]
    got_weight, got_sum = train(
        weight, gradients if is_sparse else dense, lr=lr, eps=1e-4, initial_accumulator_value=first
    )
    weight_expected, sum_expected = plain_loop(weight, dense, lr, 1e-4, first)
    torch.testing.assert_close(got_weight.double(), weight_expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got_sum.double(), sum_expected, rtol=1e-5, atol=1e-6)


def test_state_is_one_float32_per_row_before_the_first_step():
    parameter = torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16))
    state = RowWiseAdagrad([parameter], initial_accumulator_value=0.5).state[parameter]
    assert set(state) == {"sum"}
    assert state["sum"].dtype == torch.float32
    assert state["sum"].tolist() == [0.5] * 6


def test_each_group_has_its_own_learning_rate_and_none_gradients_are_skipped():
    slow, fast, idle = (torch.nn.Parameter(torch.zeros(1, 1)) for _ in range(3))
    optimizer = RowWiseAdagrad(
        [{"params": [slow, idle]}, {"params": [fast], "lr": 1.0}], lr=0.1, eps=1e-12
    )
    slow.grad, fast.grad = torch.ones(1, 1), torch.ones(1, 1)
    loss = optimizer.step(lambda: 2.5)
    assert loss == 2.5
    assert [slow.item(), fast.item(), idle.item()] == pytest.approx([-0.1, -1.0, 0.0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -0.1}, "lr is -0.1"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"eps": 0.0}, "eps is 0.0"),
        ({"initial_accumulator_value": -1.0}, "initial_accumulator_value is -1.0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        RowWiseAdagrad([torch.nn.Parameter(torch.zeros(2, 2))], **settings)
    with pytest.raises(UsageError, match=r"got shape \(3,\)"):
        RowWiseAdagrad([torch.nn.Parameter(torch.zeros(3))])
