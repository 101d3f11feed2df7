import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr_ext.errors import UsageError
from cpr_ext.lab.dlrm.rowwise_adagrad import RowWiseAdagrad
from python_tests.faults.memory_meter import MemoryMeter
from python_tests.helpers import on_devices


def plain_loop(
    weight: torch.Tensor, gradients: list[torch.Tensor], lr: float, eps: float, first: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula, a row at a time, in double precision."""
    weight = weight.double().clone()
    row_sum = torch.full((weight.shape[0],), first, dtype=torch.float64)
    for gradient in gradients:
        for row, row_gradient in enumerate(gradient.double()):
            if row_gradient.any():
                row_sum[row] += (row_gradient**2).mean()
                weight[row] -= lr * row_gradient / (row_sum[row].sqrt() + eps)
    return weight, row_sum


def lookups_gradient(rows: list[int], num_rows: int, dim: int, seed: int) -> torch.Tensor:
    """An uncoalesced sparse gradient: a row may occur more than once, or not at all."""
    values = torch.randn(len(rows), dim, generator=torch.Generator().manual_seed(seed))
    indices = torch.tensor(rows, dtype=torch.int64).reshape(1, -1)
    return torch.sparse_coo_tensor(indices, values, (num_rows, dim), check_invariants=True)


def train(
    weight: torch.Tensor, gradients: list[torch.Tensor], **settings: float
) -> tuple[torch.Tensor, torch.Tensor]:
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
def test_updates_equal_a_plain_loop(
    steps: list[list[int]], dim: int, is_sparse: bool, lr: float, first: float
) -> None:
    weight = torch.randn(7, dim, generator=torch.Generator().manual_seed(9))
    gradients = [lookups_gradient(rows, 7, dim, seed) for seed, rows in enumerate(steps)]
    dense = [gradient.to_dense() for gradient in gradients]
    got_weight, got_sum = train(
        weight,
        gradients if is_sparse else dense,
        lr=lr,
        eps=1e-4,
        initial_accumulator_value=first,
    )
    weight_expected, sum_expected = plain_loop(weight, dense, lr, 1e-4, first)
    torch.testing.assert_close(got_weight.double(), weight_expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got_sum.double(), sum_expected, rtol=1e-5, atol=1e-6)


@on_devices
@pytest.mark.parametrize("is_sparse", [True, False])
def test_rows_without_a_gradient_keep_every_bit(device: str, is_sparse: bool) -> None:
    weight = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(device)
    gradient = lookups_gradient([1, 3, 3], 5, 3, seed=1)
    new_weight, row_sum = train(weight, [gradient if is_sparse else gradient.to_dense()], lr=0.5)
    untouched = torch.tensor([0, 2, 4], device=device)
    assert torch.equal(new_weight[untouched], weight[untouched])
    assert row_sum[untouched].tolist() == [0.0, 0.0, 0.0]
    assert bool((new_weight[[1, 3]] != weight[[1, 3]]).all())


def test_row_whose_gradient_is_zero_stays_finite_and_unchanged() -> None:
    weight = torch.ones(2, 3)
    zero = torch.sparse_coo_tensor([[0]], torch.zeros(1, 3), (2, 3), check_invariants=True)
    new_weight, row_sum = train(weight, [zero, torch.zeros(2, 3)])
    assert torch.equal(new_weight, weight)
    assert row_sum.tolist() == [0.0, 0.0]


def test_repeated_lookups_of_a_row_are_summed_before_squaring() -> None:
    gradient = torch.sparse_coo_tensor(
        [[0, 0]], torch.tensor([[1.0, 2.0], [2.0, 2.0]]), (1, 2), check_invariants=True
    )
    _, row_sum = train(torch.zeros(1, 2), [gradient])
    assert row_sum.tolist() == [(3.0**2 + 4.0**2) / 2]


def test_state_is_one_float32_per_row_before_the_first_step() -> None:
    parameter = torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16))
    state = RowWiseAdagrad([parameter], initial_accumulator_value=0.5).state[parameter]
    assert set(state) == {"sum"}
    assert state["sum"].dtype == torch.float32
    assert state["sum"].tolist() == [0.5] * 6


def test_state_of_rows_that_are_never_used_takes_no_memory() -> None:
    parameter = torch.nn.Parameter(torch.empty(50_000_000, 1))
    meter = MemoryMeter()
    sums = RowWiseAdagrad([parameter]).state[parameter]["sum"]
    assert meter.grown_bytes() < 20e6  # of 200 MB
    assert not sums[::1_000_000].any()


def test_run_goes_on_from_a_saved_state() -> None:
    gradients = [lookups_gradient([0, 2, 2], 4, 3, seed) for seed in range(4)]
    whole, _ = train(torch.zeros(4, 3), gradients)
    half = torch.nn.Parameter(torch.zeros(4, 3))
    first = RowWiseAdagrad([half])
    for gradient in gradients[:2]:
        half.grad = gradient
        first.step()
    resumed = torch.nn.Parameter(half.detach().clone())
    second = RowWiseAdagrad([resumed])
    second.load_state_dict(first.state_dict())
    for gradient in gradients[2:]:
        resumed.grad = gradient
        second.step()
    assert torch.equal(resumed.detach(), whole)


def test_each_group_has_its_own_learning_rate_and_none_gradients_are_skipped() -> None:
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
def test_settings_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RowWiseAdagrad([torch.nn.Parameter(torch.zeros(2, 2))], **settings)


def test_parameter_that_is_no_table_is_refused() -> None:
    with pytest.raises(UsageError, match=r"got shape \(3,\)"):
        RowWiseAdagrad([torch.nn.Parameter(torch.zeros(3))])
