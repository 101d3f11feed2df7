"""What FBGEMM's fused optimizers can do besides the usual: a job resumes in every bit."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    CowClipDefinition,
    WeightDecayMode,
)

from python_tests.helpers import assert_same
from python_tests.integrations import sharded_models
from python_tests.integrations.sharded_models import (
    kernels_of,
    require_resumes,
    sharded,
    train,
)

JOB = "python_tests.integrations.fused_kernel_job"
FULL, BY_ROW = {"exp_avg", "exp_avg_sq"}, {"exp_avg_sq"}
KINDS = {  # state by name, and those with a value per row
    "adam": (FULL, set()),
    "adam_by_row": (FULL | {"row_counter"}, {"row_counter"}),
    "partial_rowwise_adam": (FULL, BY_ROW),
    "lamb": (FULL, set()),
    "partial_rowwise_lamb": (FULL, BY_ROW),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By kind: what a job that was cut off has at its end, and one that was not."""
    directory = tmp_path_factory.mktemp("jobs")
    command = [sys.executable, "-O", "-m", JOB, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(directory / "found.pt")


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_was_cut_off_ends_in_the_bits_of_one_that_was_not(found, kind):
    """The operators are stand-ins: ``fused_kernel_job``."""
    resumed, whole = found[kind]
    assert (resumed.pop("report"), whole.pop("report")) == ((3, 0), (0, 0))
    assert_same(resumed, whole)
    names, by_row = KINDS[kind]
    assert set(whole["shapes"]) == names | {"weight"}
    assert {name for name, shape in whole["shapes"].items() if len(shape) == 1} == by_row


L2 = CounterWeightDecayMode.L2
DECAYS = {
    "l2": {"weight_decay_mode": WeightDecayMode.L2},
    "decoupled": {"weight_decay_mode": WeightDecayMode.DECOUPLE},
    "counter": {
        "weight_decay_mode": WeightDecayMode.COUNTER,
        "counter_based_regularization": CounterBasedRegularizationDefinition(
            counter_weight_decay_mode=L2, counter_halflife=3
        ),
    },
    "cowclip": {
        "weight_decay_mode": WeightDecayMode.COWCLIP,
        "cowclip_regularization": CowClipDefinition(counter_weight_decay_mode=L2),
    },
}


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("decay", DECAYS)
def test_a_job_with_weight_decay_in_its_kernels_resumes(tmp_path, decay, monkeypatch):
    settings = {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.05} | DECAYS[decay]
    monkeypatch.setattr(sharded_models, "settings_of", lambda fused: dict(settings))
    counters = []

    def start(seed):
        parallel, optimizer = sharded("mixed", "rowwise_adagrad", seed=seed)

        def train_step(step):
            counters[:] = [kernel.max_counter for kernel in kernels_of(parallel)]
            if step == 0:  # what an update by FBGEMM's GPU kernels sets now and then
                for counter in counters:
                    counter.fill_(7)
            train(parallel, optimizer, None, 1, first=step)

        return parallel, optimizer, train_step

    require_resumes(tmp_path, start)
    if decay in ("counter", "cowclip"):
        assert set(map(float, counters)) == {7.0}
