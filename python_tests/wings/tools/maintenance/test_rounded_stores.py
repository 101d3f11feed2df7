"""Tools on a store of rounded rows: each shows the values that a recovery gives, and says so."""

import pytest
from click.testing import CliRunner

from cpr_ext import Precision, StoreOptions
from cpr_ext.wings.cli.app import app
from cpr_ext.wings.tools.maintenance import inspect
from python_tests.recovery.test_rounded_rows import recovered, saved_twice


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return a store of int8 partial snapshots, and the rows that a recovery gives."""
    directory = tmp_path_factory.mktemp("rounded") / "store"
    run, _, _ = saved_twice(directory, store=StoreOptions(precision=Precision(partial="int8")))
    run.die()
    return directory, recovered(directory)


def test_inspect_shows_bytes_by_precision(stored):
    directory, _ = stored
    summary = inspect(directory)
    sizes = {each.kept_as: each.file_bytes for each in summary.precisions}
    assert set(sizes) == {"exact", "int8", "row ids"}
    assert sizes["int8"] < sizes["exact"]
    assert summary.points[-1].is_rounded


def test_inspect_prints_what_is_rounded(stored):
    shown = CliRunner().invoke(app, ["inspect", str(stored[0])]).output
    assert "rounded rows" in shown
    assert "rows kept as" in shown
