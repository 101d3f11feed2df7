"""examples/serving.py follows ``cpr train``, which trains beside it until it is killed."""

import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from cpr_ext.wings.publishing import publish
from cpr_ext.wings.tools.maintenance import export
from python_tests.helpers import committed_steps, same_bits

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/serving.py"
STATES = 4
WAIT_SECONDS = 60


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def training(store):
    """A process that trains until it is killed."""
    command = [sys.executable, "-m", "cpr_ext.wings.cli", "train", "--quiet", "--epochs", "1000"]
    command += ["--every-steps", "10", "--store", str(store)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    yield process
    process.kill()
    process.communicate()


class Publisher:
    """Publishes one more state whenever the example has nothing to do; the last after a kill."""

    def __init__(self, store, publication, training):
        self._store, self._publication, self._training = store, publication, training
        self.reports = []

    def publish_next(self, pause=None):
        self._wait_for_a_commit()
        if len(self.reports) == STATES - 1:
            self._training.kill()
            assert self._training.wait() == -signal.SIGKILL  # it trained until now
        self.reports.append(publish(self._store, self._publication))

    def _wait_for_a_commit(self):
        newest, deadline = committed_steps(self._store)[-1:], time.monotonic() + WAIT_SECONDS
        while committed_steps(self._store)[-1:] in ([], newest):
            assert self._training.poll() is None, self._training.communicate()[0].decode()
            assert time.monotonic() < deadline, "no snapshot was committed"
            time.sleep(0.002)


def test_the_example_follows_training_and_ends_with_what_it_left(
    training, store, tmp_path, monkeypatch, capsys
):
    publisher = Publisher(store, tmp_path / "rows", training)
    main = runpy.run_path(str(EXAMPLE))["main"]
    clock = SimpleNamespace(sleep=publisher.publish_next, perf_counter=time.perf_counter)
    monkeypatch.setitem(main.__globals__, "time", clock)
    tables = main([str(tmp_path / "rows"), "--states", str(STATES)])
    shown = [line for line in capsys.readouterr().out.splitlines() if "of all tables" in line]
    steps = [report.step for report in publisher.reports]
    assert [int(line.split(":")[0].removeprefix("step ")) for line in shown] == steps
    assert steps == sorted(set(steps))
    first, *later = [report.rows for report in publisher.reports]
    assert min(later) < first  # only what changed; a new base snapshot may have come between
    export(store, tmp_path / "out")
    expected = load_file(tmp_path / "out" / "model.safetensors")
    for name, bag in tables.items():
        assert same_bits(bag.weight.detach(), expected[f"{name}.weight"]), name
