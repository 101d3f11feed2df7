"""What tests of several wings look at."""

import pytest

from python_tests.wings.tools.maintenance.stores import trained_store


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """A closed store of a base and four partial snapshots; nobody changes it."""
    directory = tmp_path_factory.mktemp("stores") / "store"
    trained_store(directory).checkpointer.close()
    return directory
