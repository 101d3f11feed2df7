"""Parts of tables: their names, what two have in common, and how they are written down."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.state.table_part import TablePart


@st.composite
def parts(draw, table="t", num_rows=6, dim=5):
    begin, end = sorted(
        draw(st.lists(st.integers(0, num_rows), min_size=2, max_size=2, unique=True))
    )
    left, right = sorted(draw(st.lists(st.integers(0, dim), min_size=2, max_size=2, unique=True)))
    return TablePart(table, (begin, end), (left, right), num_rows, dim)


def cells(part):
    return {(row, column) for row in range(*part.rows) for column in range(*part.columns)}


@given(first=parts(), second=parts())
def test_an_overlap_holds_the_cells_that_both_hold(first, second):
    common = first.overlap(second)
    assert (cells(common) if common else set()) == cells(first) & cells(second)
    assert common == second.overlap(first)


@given(first=parts(), second=parts())
def test_different_parts_have_different_names(first, second):
    assert (first.name == second.name) == (first == second)
    assert (first.name == "t") == first.is_whole


@given(part=parts())
def test_a_part_is_written_down_as_json_and_read_back(part):
    assert TablePart.from_json(json.loads(json.dumps(part.to_json()))) == part


def test_anything_else_is_no_part():
    whole = TablePart("a", (0, 4), (0, 2), 4, 2)
    assert whole.overlap(TablePart("b", (0, 4), (0, 2), 4, 2)) is None
    for rows, columns in (((2, 2), (0, 1)), ((-1, 2), (0, 1)), ((0, 7), (0, 1)), ((0, 1), (4, 6))):
        with pytest.raises(ValueError, match="is no part of table 't'"):
            TablePart("t", rows, columns, 6, 5)
    good = TablePart("t", (0, 2), (0, 1), 6, 5).to_json()
    broken = [{"rows": [0, 2.0]}, {"rows": [0, True]}, {"rows": "02"}, {"columns": [0, 1, 2]}]
    for value in (None, [], {}, *(good | each for each in [*broken, {"num_embeddings": 2**60}])):
        with pytest.raises((ValueError, KeyError, TypeError)):
            TablePart.from_json(value)
