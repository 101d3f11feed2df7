"""A live table takes the rows and columns that it has in common with a stored one."""

import pytest
import torch

from cpr_ext.recovery.import_store import PartCopy
from cpr_ext.state.table import Table
from cpr_ext.state.table_part import TablePart
from cpr_ext.storage.segment_format import ArraySpec

ROWS, DIM = 10, 6
WEIGHT = ArraySpec("weight", torch.float32, (4,))
PER_ROW = ArraySpec("sum", torch.float32, ())


def part(rows, columns):
    return TablePart("t", rows, columns, ROWS, DIM)


def make(held, wanted, *, optimizer=True):
    """A copy from the part ``held`` into a live table of zeros that is the part ``wanted``."""
    weight = torch.nn.Parameter(torch.zeros(wanted.shape))
    owner = torch.optim.SGD([weight], lr=0.1) if optimizer else None
    table = Table(wanted.name, weight, owner, part=wanted)
    return PartCopy(table, held, wanted, held.overlap(wanted))


def test_state_of_one_value_per_row_becomes_the_mean_over_columns():
    wanted = part((0, ROWS), (0, DIM))
    table = None
    for columns, value in (((0, 2), 3.0), ((2, 6), 6.0)):
        copy = make(part((0, ROWS), columns), wanted)
        copy = PartCopy(table or copy.table, copy.held, wanted, copy.common)
        table = copy.table
        assert copy.make_place(PER_ROW)
        copy.put("sum", torch.arange(ROWS), torch.full((ROWS,), value))
    assert torch.allclose(table.arrays()["sum"], torch.full((ROWS,), 5.0))


def test_state_of_any_shape_is_taken_if_the_columns_are_cut_alike():
    odd = ArraySpec("odd", torch.float64, (3, 2))
    same = make(part((0, 5), (0, 4)), part((2, ROWS), (0, 4)))
    assert same.make_place(odd)
    same.put("odd", torch.tensor([2]), torch.ones(1, 3, 2, dtype=torch.float64))
    assert same.table.arrays()["odd"][0].eq(1).all()
    cut = make(part((0, 5), (0, 4)), part((0, 5), (0, 2)))
    assert "cannot be cut" in cut.misfit(odd)
    assert not cut.make_place(odd)
    assert list(cut.table.arrays()) == ["weight"]


@pytest.mark.parametrize(
    ("array", "optimizer", "reason"),
    [
        (ArraySpec("weight", torch.float16, (4,)), True, "dtype torch.float16"),
        (ArraySpec("weight", torch.float32, (3,)), True, "rows of shape (3,)"),
        (PER_ROW, False, "is no state that the model's optimizer has"),
    ],
)
def test_an_array_without_a_place_is_named_and_left_out(array, optimizer, reason):
    same = part((0, ROWS), (0, 4))
    copy = make(same, same, optimizer=optimizer)
    misfit = copy.misfit(array)
    assert misfit.startswith(f"'t/{array.name}' ")
    assert reason in misfit
    assert not copy.make_place(array)
    assert copy.misfit(WEIGHT) is None
