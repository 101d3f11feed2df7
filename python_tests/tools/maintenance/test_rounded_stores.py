"""Tools on a store of rounded rows: each shows the values that a recovery gives, and says so."""

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import cpr_ext
from cpr_ext.cli.app import app
from cpr_ext.tools.maintenance import export, inspect, read_rows
from cpr_ext.tools.publishing import changed_rows
from python_tests.helpers import Trained, assert_same
from python_tests.recovery.test_rounded_rows import recovered, saved_twice

WEIGHT = "tables.big.weight"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return a store of int8 partial snapshots, and the rows that a recovery gives."""
    directory = tmp_path_factory.mktemp("rounded") / "store"
    run, _, _ = saved_twice(directory, precision=cpr_ext.Precision(partial="int8"))
    run.die()
    return directory, recovered(directory)


def test_inspect_shows_bytes_by_precision_and_the_largest_error(stored):
    directory, (report, _) = stored
    summary = inspect(directory)
    sizes = {each.kept_as: each.file_bytes for each in summary.precisions}
    assert set(sizes) == {"exact", "int8", "row ids"}
    assert 0 < sizes["row ids"] < 600
    assert sizes["int8"] < sizes["exact"]
    assert summary.points[-1].rounding_error == report.largest_rounding_error > 0


def test_inspect_prints_what_is_rounded(stored):
    shown = CliRunner().invoke(app, ["inspect", str(stored[0])]).output
    assert "rounded by at most" in shown
    assert "rows kept as" in shown


def test_export_and_read_rows_give_float32(stored, tmp_path):
    directory, (_, rows) = stored
    export(directory, tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert_same(exported[WEIGHT], rows["tables.big"]["weight"])
    found = read_rows(directory, "tables.big", [599, 0, 7]).arrays["weight"]
    assert_same(found, rows["tables.big"]["weight"][[599, 0, 7]])


def test_changed_rows_are_those_that_a_recovery_gives(stored):
    directory, (_, rows) = stored
    held = torch.full((600, 16), float("nan"))
    for batch in changed_rows(directory):
        if batch.table == "tables.big":
            held[batch.row_ids] = batch.arrays["weight"]
    assert_same(held, rows["tables.big"]["weight"])


def test_a_full_recovery_point_of_rounded_rows_is_shown_as_such(tmp_path):
    run = Trained(tmp_path, {"t": (100, 16)}, precision=cpr_ext.Precision(base="int4"))
    run.train(1)
    run.checkpointer.wait()
    run.die()
    (point,) = inspect(tmp_path).points
    assert point.is_full_recovery_point
    assert point.rounding_error > 0
