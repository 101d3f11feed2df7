"""What ``ResumableLoader`` takes and refuses; that it resumes: test_positions.py."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import cpr_ext
from cpr_ext.errors import UntrackedChangeWarning, UsageError
from cpr_ext.wings.callbacks.loops import ResumableLoader
from python_tests.helpers import die

SAMPLES, BATCH, EPOCHS = 22, 4, 3
STEPS = EPOCHS * 6  # the last batch of an epoch has two samples


class _CutOffError(Exception):
    pass


class NumpySampler:
    """Shuffles by a generator of NumPy that nobody sees."""

    def __init__(self, generator):
        self.random = generator

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        yield from self.random.permutation(SAMPLES).tolist()


def loader(data=range(SAMPLES), **options):
    return DataLoader(data, BATCH, **options)


class Job:
    """A library's trainer: its loop knows nothing of a Checkpointer."""

    def __init__(self, store):
        torch.manual_seed(0)
        self.model = nn.Embedding(SAMPLES, 4, sparse=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.num_epochs, self.stop_after, self.num_seen = EPOCHS, None, 0
        self.batches = ResumableLoader(loader(shuffle=True))
        self.ckpt = cpr_ext.Checkpointer(
            *(self.model, self.optimizer, store),
            schedule=cpr_ext.EverySteps(1, when_busy="wait"),
            state={"batches": self.batches},
        )

    def fit(self, batches):
        for _ in range(self.num_epochs):
            for ids in batches:
                self.num_seen += 1
                self.optimizer.zero_grad()
                self.model(ids).sum().backward()
                self.optimizer.step()
                if self.num_seen == self.stop_after:
                    raise _CutOffError

    def run(self, stop_after=None):
        self.stop_after = stop_after
        self.ckpt.recover()
        self.num_epochs -= self.batches.epoch
        with self.batches.reporting_to(self.ckpt):
            self.fit(self.batches)
        self.ckpt.close()


@contextmanager
def cut_off(job):
    with pytest.raises(_CutOffError):
        yield
    job.ckpt.wait()
    die(job.ckpt)


def test_a_loader_that_draws_other_batches_again_is_reported(tmp_path):
    """Its sampler shuffles by a generator that nobody sees."""

    def job():
        job = Job(tmp_path / "store")
        job.batches.over(loader(sampler=NumpySampler(np.random.default_rng(len(jobs)))))
        jobs.append(job)
        return job

    jobs = []
    with cut_off(job()):
        jobs[-1].run(3)
    with pytest.warns(UntrackedChangeWarning, match="the first 2 batches of epoch 0 are not those"):
        job().run()


KINDS_OF_TENSORS = {
    "empty": lambda: torch.empty(0),
    "scalar": lambda: torch.tensor(3),
    "bool": lambda: torch.ones(3, dtype=torch.bool),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16, requires_grad=True),
    "transposed": lambda: torch.rand(4, 5).T,
    "column": lambda: torch.rand(4, 5)[:, 1],
    "expanded": lambda: torch.rand(1, dtype=torch.float64).expand(4),
    "conjugate": lambda: torch.rand(3, dtype=torch.complex64).conj(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "no memory": lambda: torch.ones(3, device="meta"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", KINDS_OF_TENSORS)
def test_batches_are_any_tensors(tmp_path, kind):
    tensor = KINDS_OF_TENSORS[kind]()
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = ResumableLoader([[tensor], [tensor]])
    with cpr_ext.Checkpointer(
        model, optimizer, tmp_path / "store", state={"batches": batches}
    ) as ckpt:
        with batches.reporting_to(ckpt):
            assert len(list(batches)) == 2
        assert ckpt.num_samples == 2 * (tensor.size(0) if tensor.dim() else 1)


def test_samples_are_counted_by_batch_or_as_the_user_says(tmp_path):
    job = Job(tmp_path / "store")
    job.run()
    assert job.ckpt.metrics.snapshot_step == STEPS
    assert job.ckpt.store.manifest.dense[-1].num_samples == EPOCHS * SAMPLES
    other = Job(tmp_path / "other")
    other.batches._count = lambda batch: 10
    other.run()
    assert other.ckpt.store.manifest.dense[-1].num_samples == 10 * STEPS


def test_what_cannot_be_resumed_is_refused_with_the_remedy(tmp_path):
    job = Job(tmp_path / "store")
    assert (job.batches.batch_size, len(job.batches)) == (BATCH, STEPS // EPOCHS)
    with pytest.raises(AttributeError, match="no_such"):
        job.batches.no_such  # noqa: B018
    with pytest.raises(UsageError, match=r"with batches.reporting_to\(ckpt\)"):
        job.fit(job.batches)
    with cut_off(job):
        job.run(4)
    before = job.batches.state_dict()["generators"]
    job = Job(tmp_path / "store")
    job.batches.over(loader(range(8), shuffle=True))
    with pytest.raises(UsageError, match="3 batches of this epoch were trained, the loader has 2"):
        job.run()
    job.batches.over(loader(shuffle=True, generator=torch.Generator()))
    job.batches.load_state_dict(job.batches.state_dict() | {"generators": before})
    with pytest.raises(UsageError, match=r"have 1 torch generators, those .* made with 0"):
        job.run()
    die(job.ckpt)
    with pytest.raises(UsageError, match=r"no loader yet.*batches.over\(loader\)"):
        len(ResumableLoader())
