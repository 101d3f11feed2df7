import pytest

from python_tests.wings.tools.maintenance.stores import trained_store


@pytest.fixture
def trained(tmp_path):
    found = trained_store(tmp_path / "store", snapshots=1)
    yield found
    found.die()
