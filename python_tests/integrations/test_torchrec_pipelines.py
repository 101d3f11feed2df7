"""TorchRec's pipelines, which look ahead in the data: a job that is killed in one resumes."""

from contextlib import nullcontext
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from torchrec import KeyedJaggedTensor
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage, SparseDataDistUtil
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
    pytest.mark.usefixtures("alone", "no_streams", "own_settings"),
    pytest.mark.filterwarnings("ignore"),  # TorchRec's and FBGEMM's own, by the dozen
]
OPTIONS = {"priority": cpr_ext.AllRows(), "schedule": cpr_ext.EverySteps(10**6)}
SAVED, STEPS = 3, 7
EAGER = {"backend": "eager", "dynamic": False, "fullgraph": False}
PIPELINES = {
    "TrainPipelineBase": {},
    "TrainPipelineSparseDist": {},
    "TrainPipelineSparseDistLite": {},
    "TrainPipelineFusedSparseDist": {},
    "TrainPipelineSemiSync": {"start_batch": 0},
    "PrefetchTrainPipelineSparseDist": {},
    "TrainPipelinePT2": {
        "compile_configs": train_pipelines.TorchCompileConfig(compile_on_iter=1, **EAGER)
    },
    "TrainPipelineSparseDistCompAutograd": {},
    "StagedTrainPipeline": {},
}


class NoStream:
    """Stands for a CUDA stream."""

    device = torch.device("cpu")

    def wait_stream(self, other):
        """All work is done when its call returns."""


@pytest.fixture
def no_streams(monkeypatch):
    """Some pipelines call these on the CPU, too, where there is no stream."""
    monkeypatch.setattr(KeyedJaggedTensor, "record_stream", lambda *arguments: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *arguments: None)
    for name in ("current_stream", "default_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda *arguments: nullcontext())


@pytest.fixture
def own_settings(monkeypatch):
    """Two pipelines set options of torch's compilers, and one needs DDP written in Python."""
    monkeypatch.setattr(torch._logging, "set_logs", lambda **options: None)
    configs = torch._dynamo.config, torch._functorch.config, torch._inductor.config
    before = [config.save_config() for config in configs]
    torch._dynamo.config.optimize_ddp = "python_reducer"
    yield
    for config, saved in zip(configs, before, strict=True):
        config.load_config(saved)


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


class Staged:
    """The loop that TorchRec's documentation gives for a StagedTrainPipeline."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        dist = SparseDataDistUtil(model, NoStream())
        copy = PipelineStage("copy", lambda batch: batch.to("cpu"), NoStream())
        start = PipelineStage(
            "start_sparse_data_dist",
            dist.start_sparse_data_dist,
            dist.data_dist_stream,
            fill_callback=dist.wait_sdd_fill_callback,
        )
        self.stages = train_pipelines.StagedTrainPipeline([copy, start], compute_stream=NoStream())

    def progress(self, data):
        batch = self.stages.progress(data)
        self.optimizer.zero_grad()
        self.model(batch)[0].backward()
        self.optimizer.step()


def start(kind, seed):
    torch.manual_seed(seed)
    parallel, optimizer = sharded("mixed", "rowwise_adagrad", seed=seed, model=Trained())
    if kind == "StagedTrainPipeline":
        return parallel, optimizer, Staged(parallel, optimizer)
    parallel._compiled_autograd_options = EAGER
    pipeline = getattr(train_pipelines, kind)(
        parallel, optimizer, torch.device("cpu"), **PIPELINES[kind]
    )
    if kind.startswith("Prefetch"):
        pipeline._data_dist_stream = NoStream()  # without one it does not prefetch
    return parallel, optimizer, pipeline


def train(pipeline, ckpt, data, steps):
    for _ in range(steps):
        pipeline.progress(data)
        ckpt.step(SAMPLES)


def held(parallel, ckpt):
    dense = [p.detach().clone() for p in parallel.module.linear.parameters()]
    return whole_tables(copy_parts(ckpt.tables)), dense


@pytest.mark.parametrize("kind", PIPELINES)
def test_a_job_in_a_pipeline_resumes_as_it_was(tmp_path, kind):
    """Of the pipeline that applies a batch late, the state is that of the batches applied."""
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
