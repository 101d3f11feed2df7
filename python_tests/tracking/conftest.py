"""A watched model for each test."""

import pytest

from python_tests.tracking.watched import plain


@pytest.fixture
def run(tmp_path):
    run = plain(tmp_path)
    yield run
    if not run.ckpt._guard.is_closed:
        run.ckpt._release()
