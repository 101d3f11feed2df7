"""What `inspect` says of a store of rounded rows."""

import pytest
from click.testing import CliRunner

import cpr_ext
from cpr_ext import Precision, StoreOptions
from cpr_ext.wings.cli.app import app
from cpr_ext.wings.tools.maintenance import inspect
from python_tests.helpers import Trained


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A store of a base and an int8 partial snapshot."""
    directory = tmp_path_factory.mktemp("rounded") / "store"
    options = {"priority": cpr_ext.AllRows(), "schedule": cpr_ext.EverySteps(10**9)}
    store = StoreOptions(precision=Precision(partial="int8"))
    run = Trained(directory, {"big": (600, 16), "thin": (40, 2)}, store=store, **options)
    for kind in ("base", "partial"):
        run.train(2)
        run.save(kind)
    run.die()
    return directory


def test_inspect_says_which_points_have_rounded_rows(stored):
    assert inspect(stored).points[-1].is_rounded
    assert "rounded rows" in CliRunner().invoke(app, ["inspect", str(stored)]).output
