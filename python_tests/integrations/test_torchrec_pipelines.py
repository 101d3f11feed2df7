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

from python_tests.distributed.losses import long
from python_tests.integrations.sharded_models import (
    ALONE,
    PooledDlrm,
    make_batch,
    require_resumes,
    sharded,
)

pytestmark = [*ALONE, pytest.mark.usefixtures("no_streams", "own_settings")]
STEPS = 7
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
COMPILED = ("TrainPipelinePT2", "TrainPipelineSparseDistCompAutograd")  # a minute each


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
    parallel._compiled_autograd_options = EAGER
    if kind == "StagedTrainPipeline":
        pipeline = Staged(parallel, optimizer)
    else:
        make = getattr(train_pipelines, kind)
        pipeline = make(parallel, optimizer, torch.device("cpu"), **PIPELINES[kind])
    if kind.startswith("Prefetch"):
        pipeline._data_dist_stream = NoStream()  # without one it does not prefetch
    data = []

    def train_step(step):
        data[:] = data or [batches(step)]
        pipeline.progress(data[0])

    return parallel, optimizer, train_step


@pytest.mark.parametrize("kind", [long(kind) if kind in COMPILED else kind for kind in PIPELINES])
def test_a_job_in_a_pipeline_resumes_as_it_was(tmp_path, kind):
    """Of the pipeline that applies a batch late, the state is that of the batches applied."""
    # It applies the dense part of a batch after it has looked up the next one.
    is_late = kind == "TrainPipelineSemiSync"
    require_resumes(tmp_path, lambda seed: start(kind, seed), steps=STEPS, is_late=is_late)
