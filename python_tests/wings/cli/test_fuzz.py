"""A sample of random calls of every command; `python -m python_tests.wings.cli.fuzz`: 10,000."""

from python_tests.helpers import run_python

CODE = """
import json, sys
from python_tests.wings.cli.fuzz import fuzz
print(json.dumps(fuzz(int(sys.argv[1]), int(sys.argv[2]))))
"""
PLANTED = """
import pathlib, sys
from unittest import mock
from python_tests.wings.cli.fuzz import Places, ended
Places(pathlib.Path(sys.argv[1]))
inspect = "cpr_ext.wings.tools.maintenance.inspect"
mock.patch(inspect, side_effect=ZeroDivisionError("planted")).start()
print(*(ended(["inspect", store]).trouble for store in ("store", "missing")))
"""


def test_no_random_call_ends_in_a_traceback():
    found = run_python(CODE, 100, 20, timeout_seconds=280)
    assert found.splitlines()[-1] == "[]", found


def test_a_planted_traceback_is_found(tmp_path):
    found = run_python(PLANTED, tmp_path)
    assert "ZeroDivisionError: planted" in found
    assert found.endswith(" None\n")
