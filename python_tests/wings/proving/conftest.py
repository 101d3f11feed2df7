"""Proofs whose processes have torch already."""

import pytest

from cpr_ext.wings.proving import prove
from python_tests import preloaded


def run_preloaded(plan, file):
    done = preloaded.run([prove.LIFE, file], merged=True)
    return prove.Ended(done.returncode, done.stdout)


@pytest.fixture(autouse=True)
def quick_processes(monkeypatch):
    monkeypatch.setattr(prove, "run_process", run_preloaded)
