"""TorchRec's pipelines, which look ahead in the data: a job that is killed in one resumes."""

from contextlib import nullcontext
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from torchrec import KeyedJaggedTensor
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.streamable import Pipelineable

import cpr_ext
from cpr_ext.integrations.torchrec import make_checkpointer
from python_tests.integrations.sharded_models import (
    SAMPLES,
    PooledDlrm,
    copy_parts,
    make_batch,
    same_tables,
    sharded,
    whole_tables,
)

pytestmark = [
    pytest.mark.usefixtures("alone"),
    pytest.mark.filterwarnings("ignore"),  # TorchRec's and FBGEMM's own, by the dozen
]
OPTIONS = {"priority": cpr_ext.AllRows(), "schedule": cpr_ext.EverySteps(10**6)}
SAVED, STEPS = 3, 7
PIPELINES = {
    "TrainPipelineBase": {},
    "TrainPipelineSparseDist": {},
    "TrainPipelineSparseDistLite": {},
    "TrainPipelineFusedSparseDist": {},
    "TrainPipelineSemiSync": {"start_batch": 0},
}


@dataclass
class Batch(Pipelineable):
    features: KeyedJaggedTensor

    def to(self, device, non_blocking=False):
        return Batch(self.features.to(device, non_blocking=non_blocking))

    def record_stream(self, stream):
        """There is no stream on a CPU."""

    def pin_memory(self):
        return self


class Trained(PooledDlrm):
    """Gives the loss first, as pipelines need it."""

    def forward(self, batch):
        loss = self.linear(self.bags(batch.features).values()).sin().mean()
        return loss, loss.detach()


def batches(first):
    return iter([Batch(make_batch(step)[0][0]) for step in range(first, STEPS)])


def start(kind, seed):
    torch.manual_seed(seed)
    parallel, optimizer = sharded("mixed", "rowwise_adagrad", seed=seed, model=Trained())
    pipeline = getattr(train_pipelines, kind)(
        parallel, optimizer, torch.device("cpu"), **PIPELINES[kind]
    )
    return parallel, optimizer, pipeline


def train(pipeline, ckpt, data, steps):
    for _ in range(steps):
        pipeline.progress(data)
        ckpt.step(SAMPLES)


def held(parallel, ckpt):
    dense = [p.detach().clone() for p in parallel.module.linear.parameters()]
    return whole_tables(copy_parts(ckpt.tables)), dense


@pytest.mark.parametrize("kind", PIPELINES)
def test_a_job_in_a_pipeline_resumes_as_it_was(tmp_path, kind, monkeypatch):
    """Of the pipeline that applies a batch late, the state is that of the batches applied."""
    # Two pipelines call these on the CPU, too, where there is no stream.
    monkeypatch.setattr(KeyedJaggedTensor, "record_stream", lambda *arguments: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *arguments: None)
    for name in ("current_stream", "default_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda *arguments: nullcontext())
    parallel, optimizer, pipeline = start(kind, 0)
    with make_checkpointer(parallel, optimizer, tmp_path / "cut", **OPTIONS) as ckpt:
        train(pipeline, ckpt, batches(0), SAVED)
        ckpt.save("partial").wait_until_done()
        saved, dense = held(parallel, ckpt)
    parallel, optimizer, pipeline = start(kind, 1)
    with make_checkpointer(parallel, optimizer, tmp_path / "cut", **OPTIONS) as ckpt:
        report = ckpt.recover()
        assert (report.step, report.rows_stale) == (SAVED, 0)
        found, live = held(parallel, ckpt)
        assert same_tables(found, saved)
        assert all(map(torch.equal, live, dense))
        train(pipeline, ckpt, batches(SAVED), STEPS - SAVED)
        resumed, ended = held(parallel, ckpt)
    if kind == "TrainPipelineSemiSync":
        return  # it applies the dense part of a batch after it has looked up the next one
    parallel, optimizer, pipeline = start(kind, 0)
    with make_checkpointer(parallel, optimizer, tmp_path / "whole", **OPTIONS) as ckpt:
        train(pipeline, ckpt, batches(0), STEPS)
        whole, linear = held(parallel, ckpt)
    assert same_tables(resumed, whole)
    assert all(map(torch.equal, ended, linear))
