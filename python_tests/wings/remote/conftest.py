from unittest.mock import patch

import pytest

from cpr_ext.wings.remote import range_reading, remote_copy
from python_tests.wings.remote.faulty_objects import UnsteadyObjects


@pytest.fixture
def objects():
    """All addresses lead to these objects, and requests are tried again soon."""
    found = UnsteadyObjects()
    with (
        patch("cpr_ext.wings.remote.opening.open_objects", lambda options: found),
        patch.object(remote_copy, "FIRST_PAUSE_SECONDS", 0.01),
        patch.object(remote_copy, "LONGEST_PAUSE_SECONDS", 0.02),
        patch.object(range_reading, "FIRST_PAUSE_SECONDS", 0.0),
    ):
        yield found
