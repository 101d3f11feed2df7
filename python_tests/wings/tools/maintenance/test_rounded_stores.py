"""Tools on a store of rounded rows: each shows the values that a recovery gives, and says so."""

from click.testing import CliRunner

from cpr_ext import Precision, StoreOptions
from cpr_ext.wings.cli.app import app
from cpr_ext.wings.tools.maintenance import inspect
from python_tests.recovery.test_rounded_rows import saved_twice


def test_inspect_shows_what_is_rounded_and_bytes_by_precision(tmp_path):
    options = StoreOptions(precision=Precision(partial="int8"))
    saved_twice(tmp_path / "store", store=options)[0].die()
    summary = inspect(tmp_path / "store")
    sizes = {each.kept_as: each.file_bytes for each in summary.precisions}
    assert set(sizes) == {"exact", "int8", "row ids"}
    assert sizes["int8"] < sizes["exact"]
    assert summary.points[-1].is_rounded
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "store")]).output
    assert "rounded rows" in shown
    assert "rows kept as" in shown
