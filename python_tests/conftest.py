"""Shared by all tests: where they import from, and hypothesis profiles.

The checkout is appended to the path, not inserted: ``python_tests.*`` can be imported, and the
cpr_ext under test stays the installed one or that on PYTHONPATH (such as a sanitizer build).
Profiles are chosen by CPR_EXT_HYPOTHESIS=dev|ci|sanitize|threads (dev if unset).
"""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.append(str(Path(__file__).resolve().parents[1]))

# A shell's background jobs ignore Ctrl-C, and what they start inherits that; tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_COMMON = {
    "deadline": None,  # the machine's other work is no failure of ours
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("dev", max_examples=60, **_COMMON)
settings.register_profile("ci", max_examples=300, print_blob=True, **_COMMON)
settings.register_profile("sanitize", max_examples=15, **_COMMON)
settings.register_profile("threads", max_examples=5, **_COMMON)
settings.load_profile(os.environ.get("CPR_EXT_HYPOTHESIS", "dev"))


def pytest_report_header() -> str:
    from cpr_ext._native import native

    return f"native core: {native.__file__}"


def pytest_collection_finish() -> None:
    """What was imported stays: let no garbage collection walk through all of torch again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def real_movietweetings() -> Path:
    """The full data set: in CPR_EXT_MOVIETWEETINGS, or where the checkout has it beside it."""
    beside = Path(__file__).parents[2] / "shared" / "data" / "movietweetings"
    folder = Path(os.environ.get("CPR_EXT_MOVIETWEETINGS", beside))
    if not folder.is_dir():
        pytest.skip(f"the MovieTweetings data set is not at {folder}; set CPR_EXT_MOVIETWEETINGS")
    return folder
