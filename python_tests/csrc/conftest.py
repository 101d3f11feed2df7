"""Tests marked ``usefixtures("every_instruction_set")`` hold for each one that this CPU has."""

import pytest

from cpr_ext._native import native


@pytest.fixture(scope="module", params=native.instruction_sets())
def every_instruction_set(request):
    before = native.instruction_set()
    native.use_instruction_set(request.param)
    yield
    native.use_instruction_set(before)
