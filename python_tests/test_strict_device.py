"""The tests for a GPU on the strict emulated device (python_tests/strict_device.py): they are right
about where memory lies, before they see a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cpr_ext import _emulated
from cpr_ext.errors import UsageError
from python_tests.strict_device import FAULTS, on_device, strict

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments):
    return subprocess.run(
        [
            *(sys.executable, "-m", "python_tests.strict_device", *arguments),
            *("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CPR_EXT_HYPOTHESIS": "threads"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )


@pytest.mark.timeout(600)
def test_all_tests_of_a_gpu_pass_where_the_device_takes_its_own_memory_alone():
    done = run("python_tests/csrc")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    summary = done.stdout.rsplit(" in ", 1)[0].rsplit("\n", 1)[-1]
    assert int(re.search(r"(\d+) passed", summary).group(1)) >= 300, summary
    assert "skipped" not in summary
    assert int(done.stdout.rsplit("kernels launched:", 1)[1]) > 10


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_test_or_a_binding_is_found(fault):
    file = "python_tests/csrc/tracking/test_change_meter.py"
    done = run("--plant", fault, file, "-k", "the_weight_is_required")
    assert done.returncode == 1, done.stdout[-2000:]
    assert re.search(r"on device '.*'; needed is 'cuda:\d+'", done.stdout), done.stdout[-2000:]


ROWS = np.zeros((8, 4), np.float32)
IDS = np.arange(3)


def copy_rows(name, *arguments):
    stager = _emulated.DeviceStager(device=0, slot_bytes=4096, num_slots=2)
    getattr(_emulated, name)(*arguments, stager=stager)


def observe(kind, to, **options):
    getattr(_emulated, kind)(name="t", num_rows=8, device=0, **options).observe(to(IDS))


#: Calls with memory that must lie on the device, which ``to`` has put there.
ON_DEVICE = {
    "lookups to count": lambda to: observe("DeviceAccessCounter", to),
    "lookups to mark": lambda to: observe("DeviceDirtyRows", to),
    "lookups to sample": lambda to: observe("DeviceRowSampler", to, capacity=3),
    "a weight to measure": lambda to: _emulated.DeviceChangeMeter(
        name="t", weight=to(ROWS), device=0
    ),
    "scores": lambda to: _emulated.device_top_rows(to(IDS.astype(np.uint32)), 2, device=0),
    "rows to gather": lambda to: copy_rows("gather_rows", to(ROWS), IDS, ROWS[:3].copy()),
    "rows to scatter to": lambda to: copy_rows("scatter_rows", ROWS[:3], IDS, to(ROWS)),
}


@pytest.mark.emulated
@pytest.mark.parametrize("call", ON_DEVICE.values(), ids=ON_DEVICE)
@pytest.mark.parametrize("to", [np.array, torch.from_numpy], ids=["numpy", "torch"])
def test_memory_of_the_host_is_refused_where_that_of_a_device_is_needed(call, to):
    call(to)  # as long as it is not strict
    with strict():
        call(on_device)
        with pytest.raises(UsageError, match=r"allowed: torch.Tensor|needed is 'cuda:0'"):
            call(to)


@pytest.mark.emulated
def test_memory_of_a_device_is_refused_where_that_of_the_host_is_needed():
    with strict():
        for ids, out in ((on_device(IDS), ROWS[:3].copy()), (IDS, on_device(ROWS[:3]))):
            with pytest.raises(UsageError, match="needed is a CPU tensor"):
                copy_rows("gather_rows", on_device(ROWS), ids, out)
