"""csrc/core/instruction_set.h; that kernels agree is tested with the kernels."""

import os
import subprocess
import sys

import pytest

from cpr_ext._native import native
from cpr_ext.errors import UsageError


def test_the_best_is_used_the_portable_one_is_always_there_and_one_that_lacks_is_refused():
    names = native.instruction_sets()
    assert names[0] == "portable"
    if "CPR_EXT_INSTRUCTION_SET" not in os.environ:
        assert native.instruction_set() == names[-1]
    with pytest.raises(UsageError, match="'sve2'; this CPU has: portable"):
        native.use_instruction_set("sve2")


@pytest.mark.parametrize(("wanted", "found"), [("portable", "portable"), ("of no use", None)])
def test_the_environment_may_choose_and_a_wrong_name_costs_nothing(wanted, found):
    code = "from cpr_ext._native import native; print(native.instruction_set())"
    environment = {**os.environ, "CPR_EXT_INSTRUCTION_SET": wanted}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == (found or native.instruction_sets()[-1])
